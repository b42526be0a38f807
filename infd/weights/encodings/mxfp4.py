"""MXFP4 as gpt-oss stores it: one tensor for all experts of a layer, in blocks of 32 inputs that share an exponent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infd.weights.encodings.scaled import Numbers, Scaled, Scales

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.weights.encodings.module import Module

BLOCK = 32  # inputs that share an exponent


class MXFP4:
    """The format of gpt-oss, with matrices [experts, rows, inputs]. Implements `Format` of find.py."""

    suffixes = ("_blocks", "_scales")
    matrix = ""

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Ignore `table`: the names of the stored tensors determine which matrices are encoded."""

    def encode(self, module: Module) -> Scaled:
        """See `Format.encode` in find.py."""
        words = module.take("_blocks", ("U8",), (-1, -1, -1, BLOCK // 2))
        experts, rows, blocks, _ = words.shape
        exponents = module.take("_scales", ("U8",), (experts, rows, blocks))
        scales = Scales(stored=exponents, grid=(experts * rows, blocks), block=(1, BLOCK), exponent=True)
        numbers = Numbers(stored=words, type="e2m1", bits=4)
        return Scaled(label="mxfp4", shape=(experts, rows, blocks * BLOCK), numbers=numbers, scales=scales)
