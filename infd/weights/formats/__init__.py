"""Readers of checkpoint tensors: `plain.py` reads floating-point tensors, `encoded.py` reads encoded matrices."""
