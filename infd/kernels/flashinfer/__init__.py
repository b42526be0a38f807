"""Kernel families by FlashInfer; unsupported cases are delegated to Triton.

The host waits for the device only before it plans a captured step anew, until the previous plan is copied.
"""
