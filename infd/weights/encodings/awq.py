"""AWQ, version "gemm": a transposed matrix of words, each with 4-bit integers of 8 consecutive outputs, interleaved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from infd.weights.encodings.compressed_tensors import label
from infd.weights.encodings.config import convert, refusal
from infd.weights.encodings.module import FLOATS
from infd.weights.encodings.scaled import Numbers, Scaled, Scales

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.weights.encodings.module import Module

EACH = 8  # 4-bit integers in a 32-bit word


class Config(Struct, frozen=True):
    bits: Literal[4]
    group_size: Annotated[int, Meta(ge=-1, le=2**24)] = 128
    version: str = "gemm"
    format: str | None = None
    checkpoint_format: str | None = None


class AWQ:
    """The AWQ format. Implements `Format` of find.py."""

    suffixes = (".weight", ".qweight", ".qzeros", ".scales")
    matrix = ".weight"

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check `table`, a quantization_config. Raises CheckpointError."""
        config = convert(dict(table), Config)
        version = (config.checkpoint_format or config.format or config.version).lower()
        if version != "gemm":
            raise refusal(f"AWQ's version {version!r} is not supported; supported: gemm")
        self._group = config.group_size

    def encode(self, module: Module) -> Scaled | None:
        """See `Format.encode` in find.py."""
        if module.is_plain():
            return None
        words = module.take(".qweight", ("I32",), (-1, -1))
        inputs, outputs = words.shape[0], words.shape[1] * EACH
        count = module.groups(inputs, self._group, words)
        zeros = Numbers(
            stored=module.take(".qzeros", ("I32",), (count, outputs // EACH)),
            type="uint",
            bits=4,
            turned=True,
            across=True,
            interleaved=True,
        )
        scales = Scales(
            stored=module.take(".scales", FLOATS, (count, outputs)),
            grid=(outputs, count),
            block=(1, self._group if self._group > 0 else inputs),
            turned=True,
        )
        return Scaled(
            label=label("int4", scales, zeros, None),
            shape=(outputs, inputs),
            numbers=Numbers(stored=words, type="uint", bits=4, turned=True, across=True, interleaved=True),
            scales=scales,
            zeros=zeros,
        )
