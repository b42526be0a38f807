"""GPTQ, versions 1 and 2, with or without desc_act: a transposed matrix of words that hold consecutive inputs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from infd.rounding import ceil_div
from infd.weights.encodings.compressed_tensors import group_index, label
from infd.weights.encodings.config import convert, few, fitting, refusal
from infd.weights.encodings.module import FLOATS
from infd.weights.encodings.scaled import Numbers, Scaled, Scales

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.weights.encodings.module import Module

Bits = Literal[2, 4, 8]
GroupSize = Annotated[int, Meta(ge=-1, le=2**24)]


class Config(Struct, frozen=True):
    bits: Bits
    group_size: GroupSize = 128
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False
    dynamic: dict[str, dict[str, Any]] | None = None


class Override(Struct, frozen=True):
    bits: Bits | None = None
    group_size: GroupSize | None = None


class GPTQ:
    """The GPTQ format. Implements `Format` of find.py."""

    suffixes = (".weight", ".qweight", ".qzeros", ".scales", ".g_idx")
    matrix = ".weight"

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check `table`, a quantization_config. Raises CheckpointError."""
        config = convert(dict(table), Config)
        written = "marlin" if config.is_marlin_format else config.checkpoint_format
        if written not in ("gptq", "gptq_v2"):
            raise refusal(f"checkpoint_format {written!r} is not supported; supported: gptq, gptq_v2")
        stated = (convert(change, Override) for change in (config.dynamic or {}).values())
        changes = [change for change in dict.fromkeys(stated) if change != Override()]
        few(changes)
        self._configs = [config, *(_changed(config, change) for change in changes)]

    def encode(self, module: Module) -> Scaled | None:
        """See `Format.encode` in find.py."""
        if module.is_plain():
            return None
        return fitting(partial(_encode, module, config) for config in self._configs)


def _encode(module: Module, config: Config) -> Scaled:
    bits = config.bits
    each = 32 // bits
    words = module.take(".qweight", ("I32",), (-1, -1))
    inputs, outputs = words.shape[0] * each, words.shape[1]
    if outputs % each:
        module.refuse(words, f"the zero points of {outputs} rows do not fill words of {each}")
    count = ceil_div(inputs, config.group_size) if config.group_size > 0 else 1
    # In version 1, 1 was subtracted from each zero point. The subtraction was done on whole words, so that a zero point
    # of 0 borrowed from the next field; adding the same word of ones restores all fields.
    ones = sum(1 << bits * at for at in range(each)) if config.checkpoint_format == "gptq" else 0
    zeros = Numbers(
        stored=module.take(".qzeros", ("I32",), (count, outputs // each)),
        type="uint",
        bits=bits,
        turned=True,
        across=True,
        added=ones - (1 << 32) if ones >= 1 << 31 else ones,
    )
    scales = Scales(
        stored=module.take(".scales", FLOATS, (count, outputs)),
        grid=(outputs, count),
        block=(1, config.group_size if config.group_size > 0 else inputs),
        turned=True,
    )
    if config.desc_act:
        module.take(".g_idx", ("I32",))
    groups = group_index(module, ".g_idx", inputs, scales)
    return Scaled(
        label=label(f"int{bits}", scales, zeros, groups),
        shape=(outputs, inputs),
        numbers=Numbers(stored=words, type="uint", bits=bits, turned=True),
        scales=scales,
        zeros=zeros,
        groups=groups,
        unused=() if groups else module.present(".g_idx"),
    )


def _changed(config: Config, change: Override) -> Config:
    size = config.group_size if change.group_size is None else change.group_size
    return replace(config, bits=change.bits or config.bits, group_size=size)
