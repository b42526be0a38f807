"""Every decoder that infd has no file for: transformers' own modelling code over infd's attention, cache and weights.

Imported only for such a checkpoint, because importing transformers takes seconds.
"""
