"""GGUF: the tensors of a checkpoint. Rows of quantized matrices consist of blocks that contain their own scales."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from infd.errors import CheckpointError
from infd.gguf.config import read_config, renamed
from infd.groups import Groups
from infd.weights.stored import EncodedTensor, FileRows, StoredTensor

if TYPE_CHECKING:
    from infd.gguf.config import Renamed
    from infd.gguf.file import Checkpoint, Part, Tensor

PLAIN: Final = ("F64", "F32", "F16", "BF16")  # the types that need no decoding
# The integers and scales of the other types. Integers of 2, 3 and 5 bits are represented as 4 or 6 bits.
GROUPS: Final = MappingProxyType(
    {
        "Q4_0": Groups(4, 32, "F16"),
        "Q4_1": Groups(4, 32, "F16", minima=True),
        "Q5_0": Groups(6, 32, "F16"),
        "Q5_1": Groups(6, 32, "F16", minima=True),
        "Q8_0": Groups(8, 32, "F16"),
        "Q2_K": Groups(4, 16, "I8", minima=True),
        "Q3_K": Groups(4, 16, "I8"),
        "Q4_K": Groups(4, 32, "I8", minima=True),
        "Q5_K": Groups(6, 32, "I8", minima=True),
        "Q6_K": Groups(6, 16, "I8"),
        "IQ4_NL": Groups(4, 32, "F16", table="iq4_nl"),
        "IQ4_XS": Groups(4, 32, "I8", table="iq4_nl"),
        "MXFP4": Groups(4, 32, "BF16", table="e2m1"),
    }
)


class Blocks(Struct, frozen=True):
    """A tensor of blocks. Implements `Encoding`.

    stored        its dtype is the GGUF type of the blocks
    elements      numbers in a block
    head, offset  see `gguf.config.Renamed`
    """

    stored: StoredTensor
    elements: int
    block_bytes: int
    head: int = 0
    offset: float = 0.0

    @property
    def label(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.stored,)

    @property
    def unused(self) -> tuple[StoredTensor, ...]:
        return ()

    @property
    def inputs(self) -> None:
        """None: GGUF's types quantize no inputs."""

    def rows(self, first: int, count: int) -> FileRows | None:
        """See `Encoding`. Native code subtracts no offset, and reads whole heads."""
        if self.offset or (self.head and (first % self.head or count % self.head)):
            return None
        stored, inputs = self.stored, self.shape[-1]
        width = inputs // self.elements * self.block_bytes
        place = stored.offset + first * width
        return FileRows(replace(stored, shape=(count, inputs), offset=place, bytes=count * width), self.head)

    def packed(self) -> Groups | str:
        """See `Encoding`."""
        if len(self.shape) not in (2, 3):  # 3: the matrices of all experts, stacked
            return "it is no matrix"
        return GROUPS.get(self.stored.dtype, f"its numbers are {self.stored.dtype}")


def contents(file: Checkpoint) -> tuple[dict[str, Any], list[StoredTensor | EncodedTensor]]:
    """Return config.json's content, and the tensors under transformers' names, in stored order.

    Raises CheckpointError, which names the file.
    """
    config = read_config(file)
    names = renamed(file, config)
    found = [
        _tensor(part, tensor, names[tensor.name])
        for part in file.parts
        for tensor in part.tensors
        if tensor.name in names
    ]
    taken = set()
    for tensor in found:
        if tensor.name in taken:
            raise CheckpointError(f"{file.path}: {tensor.name} occurs twice, once under transformers' name")
        taken.add(tensor.name)
    return config, found


def _tensor(part: Part, tensor: Tensor, renamed: Renamed) -> StoredTensor | EncodedTensor:
    shape = (1, *tensor.shape) if renamed.row and len(tensor.shape) == 1 else tensor.shape
    stored = StoredTensor(renamed.name, tensor.kind.name, shape, tensor.offset, tensor.bytes, part)
    if tensor.kind.name in PLAIN and not renamed.head and not renamed.offset:
        return stored
    if renamed.head and (tensor.shape[0] % renamed.head or renamed.head % 2):
        raise CheckpointError(
            f"{part.path}: {tensor.name}: {tensor.shape[0]} rows are no whole number of heads of {renamed.head}"
        )
    return EncodedTensor(
        renamed.name, Blocks(stored, tensor.kind.elements, tensor.kind.bytes, renamed.head, renamed.offset)
    )
