"""Decoders for which infd has no model file: transformers' modelling code over infd's attention, cache and weights.

Modules of this package other than `known` import transformers, which takes seconds. They are imported only for a
checkpoint that transformers' code computes.
"""
