"""MXFP4 as gpt-oss writes it: the experts of a layer in one tensor, blocks of 16 bytes with an exponent each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infd.weights.encodings.scaled import Numbers, Scaled, Scales

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.weights.encodings.module import Module

BLOCK = 32  # inputs with one exponent


class MXFP4:
    """The encodings of a gpt-oss checkpoint: matrices [experts, rows, inputs]."""

    suffixes = ("_blocks", "_scales")
    matrix = ""

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Read nothing of the config: the tensors' names say what is encoded."""

    def encode(self, module: Module) -> Scaled:
        """See `Format.encode` in find.py."""
        words = module.take("_blocks", ("U8",), (-1, -1, -1, BLOCK // 2))
        experts, rows, blocks, _ = words.shape
        exponents = module.take("_scales", ("U8",), (experts, rows, blocks))
        scales = Scales(stored=exponents, grid=(experts * rows, blocks), block=(1, BLOCK), exponent=True)
        numbers = Numbers(stored=words, type="e2m1", bits=4)
        return Scaled(label="mxfp4", shape=(experts, rows, blocks * BLOCK), numbers=numbers, scales=scales)
