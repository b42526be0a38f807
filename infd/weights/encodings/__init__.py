"""Encodings of quantized matrices: which stored tensors represent a matrix, and how its rows are computed.

`find.py` replaces the stored tensors of each encoded matrix by one EncodedTensor. Each quantization format has a file.
"""
