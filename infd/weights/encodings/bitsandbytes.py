"""bitsandbytes: 4-bit indices into a table, with scales for blocks of the flattened matrix; or int8 with row scales."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from infd.rounding import ceil_div
from infd.weights.encodings.compressed_tensors import label
from infd.weights.encodings.scaled import Numbers, Scaled, Scales

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.weights.encodings.module import Module
    from infd.weights.stored import Encoding, StoredTensor

INT8: Final = 7.874015718698502e-3  # 1 / 127 in float32, as bitsandbytes computes it
STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
Count = Annotated[int, Meta(ge=1, le=2**24)]


class State(Struct, frozen=True):
    """The JSON object in a quant_state tensor."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: Count
    dtype: str
    shape: tuple[Count, Count]
    nested_blocksize: Count | None = None
    nested_dtype: Literal["float32"] | None = None
    nested_offset: float | None = None


class Flat(Struct, frozen=True, kw_only=True):
    """A matrix of 4-bit indices into `table`, two in a byte, the first in the high bits. Implements `Encoding`.

    size    elements in a block; the flattened matrix is divided into blocks
    absmax  the scale of each block; if `codes` is set, an index i for each block, whose scale is
            codes[i] * nested + offset
    nested  one factor for each `nested_size` blocks
    """

    label: str
    shape: tuple[int, int]
    indices: StoredTensor
    table: StoredTensor
    absmax: StoredTensor
    size: int
    codes: StoredTensor | None = None
    nested: StoredTensor | None = None
    nested_size: int = 0
    offset: float = 0.0
    unused: tuple[StoredTensor, ...] = ()

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        parts = (self.indices, self.table, self.absmax, self.codes, self.nested)
        return tuple(part for part in parts if part is not None)

    @property
    def inputs(self) -> None:
        """None: bitsandbytes' 4-bit matrices quantize no inputs."""

    def packed(self) -> str:
        """Return why no form can keep the matrix."""
        return "its numbers are no integers"

    def rows(self, first: int, count: int) -> None:
        """Return None: a row's indices and scales are in several tensors."""


class BitsAndBytes:
    """The bitsandbytes format. Implements `Format` of find.py."""

    suffixes = (
        ".weight",
        ".SCB",
        ".weight_format",
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *STATES,
    )
    matrix = ".weight"

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Ignore `table`: the stored tensors describe how each matrix is encoded."""

    def encode(self, module: Module) -> Encoding | None:
        """See `Format.encode` in find.py."""
        if module.is_plain():
            return None
        if module.dtype(".weight") == "I8":
            return _int8(module)
        return _four_bits(module)


def _int8(module: Module) -> Scaled:
    words = module.take(".weight", ("I8",), (-1, -1))
    outputs, inputs = words.shape
    scales = Scales(stored=module.take(".SCB", ("F32",), (outputs,)), grid=(outputs, 1), block=(1, inputs), factor=INT8)
    if (written := module.find(".weight_format", ("U8",), ())) is not None and written.content()[0] != 0:
        module.refuse(written, f"expected 0, rows, found {written.content()[0]}")
    numbers = Numbers(stored=words, type="int")
    unused = module.present(".weight_format")
    return Scaled(
        label=label("int8", scales, None, None), shape=words.shape, numbers=numbers, scales=scales, unused=unused
    )


def _four_bits(module: Module) -> Flat:
    suffix = next((each for each in STATES if each in module), STATES[0])
    stored = module.take(suffix, ("U8",), (-1,))
    try:
        state = msgspec.json.decode(stored.content(), type=State)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        module.refuse(stored, f"malformed: {error}")
    count = prod(state.shape)
    blocks = ceil_div(count, state.blocksize)
    nested = state.nested_blocksize is not None
    absmax = module.take(".weight.absmax", ("U8",) if nested else ("F32",), (blocks,))
    size = state.nested_blocksize or 0
    return Flat(
        label=f"{state.quant_type}, blocks of {state.blocksize}",
        shape=state.shape,
        indices=module.take(".weight", ("U8",), (ceil_div(count, 2), 1)),
        table=module.take(".weight.quant_map", ("F32",), (16,)),
        absmax=absmax,
        size=state.blocksize,
        codes=module.take(".weight.nested_quant_map", ("F32",), (256,)) if nested else None,
        nested=module.take(".weight.nested_absmax", ("F32",), (ceil_div(blocks, size),)) if nested else None,
        nested_size=size,
        offset=state.nested_offset or 0.0,
        unused=(stored,),
    )
