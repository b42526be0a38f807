"""Decoders without a file in infd: transformers' modelling code over infd's attention, cache and weights.

Imported only for checkpoints that need it, because importing transformers takes seconds.
"""
