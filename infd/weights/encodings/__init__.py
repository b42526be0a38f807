"""Encodings of quantized matrices: which stored tensors make a matrix, and its rows as floats.

`find.py` replaces each encoded module's tensors in a checkpoint by one EncodedTensor; a file each format.
"""
