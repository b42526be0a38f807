"""Block sizes of attention, and whether they fit a GPU's shared memory. Imports no triton.

`needed` returns an upper bound, which `tests/kernels/triton/test_compiling.py` compares with the compilers' figures.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

KIB: Final = 1024
LEAST: Final = 16  # fewest rows and keys of a matrix product
SHARED: Final[Mapping[str, int]] = MappingProxyType(  # bytes of shared memory available to one program, by GPU
    {
        **{f"sm_{arch}": 163 * KIB for arch in (80, 87)},
        **{f"sm_{arch}": 99 * KIB for arch in (86, 89, 120, 121)},
        **{f"sm_{arch}": 227 * KIB for arch in (90, 100, 103)},
        "gfx950": 160 * KIB,
    }
)
SHARED_BY_AMD: Final = 64 * KIB


class Gpu(NamedTuple):
    """The properties of a GPU that decide the sizes of tiles.

    name             the driver's name for the GPU; empty if the GPU is not installed
    multiprocessors  number of multiprocessors
    shared           bytes of shared memory available to one program
    amd              whether this is an AMD GPU, whose kernels keep queries in registers
    """

    name: str = ""
    multiprocessors: int = 128
    shared: int = 227 * KIB
    amd: bool = False


class Blocks(NamedTuple):
    """The block sizes of one kind of tile, and the launch parameters of its programs.

    rows    rows of the matrix products: queries times the query heads of a key head
    keys    keys in a block
    warps   warps of a program
    stages  stages of Triton's software pipeline, which loads blocks of keys ahead
    """

    rows: int
    keys: int
    warps: int
    stages: int


class Tiling(Struct, frozen=True):
    """Block sizes and key splitting of attention for one head shape.

    few, many   block sizes of tiles with few queries, and of tiles with many
    programs    programs per multiprocessor that fill the device
    least_keys  fewest keys per split; merging smaller splits costs more than it saves
    """

    few: Blocks
    many: Blocks
    programs: int = 2
    least_keys: int = 256


def gpu(device: torch.device) -> Gpu:
    """Return the properties of `device`, or of a large GPU if `device` is not an installed GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Gpu()
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Gpu(properties.name, properties.multi_processor_count, properties.shared_memory_per_block, amd=True)
    shared = getattr(
        properties, "shared_memory_per_block_optin", absent(f"sm_{properties.major}{properties.minor}").shared
    )
    return Gpu(properties.name, properties.multi_processor_count, shared)


def absent(name: str) -> Gpu:
    """Return the properties of a GPU that need not be installed. name: as the GPU's compiler calls it."""
    if amd := name.startswith("gfx"):
        return Gpu(shared=SHARED.get(name, SHARED_BY_AMD), amd=amd)
    return Gpu(shared=SHARED.get(name, Gpu().shared))


def needed(blocks: Blocks, block_head: int, itemsize: int, gpu: Gpu) -> int:
    """Return an upper bound of a program's bytes of shared memory, for queries whose elements have `itemsize` bytes."""
    queries = 0 if gpu.amd else blocks.rows * block_head * itemsize
    weights = blocks.rows * blocks.keys * itemsize
    # From 64 rows on, products read keys and values from shared memory while the next keys and values are copied there.
    copies = 2 if blocks.rows >= 64 and not gpu.amd and gpu.shared >= SHARED["sm_90"] else 1
    return queries + weights + 2 * copies * blocks.keys * block_head * itemsize + KIB


def fitting(blocks: Blocks, least_rows: int, block_head: int, itemsize: int, gpu: Gpu) -> Blocks | None:
    """Return `blocks`, reduced until they fit: first fewer keys, then fewer rows. None: no blocks fit."""
    while needed(blocks, block_head, itemsize, gpu) > gpu.shared:
        if blocks.keys > LEAST:
            blocks = blocks._replace(keys=blocks.keys // 2)
        elif blocks.rows > least_rows:
            blocks = blocks._replace(rows=blocks.rows // 2)
        else:
            return None
    return blocks


def too_large(head: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why heads of this size cannot be computed, or None."""
    block_head = max(LEAST, 1 << (head - 1).bit_length())
    known = gpu(device)
    least = Blocks(LEAST, LEAST, 4, 1)
    if fitting(least, LEAST, block_head, dtype.itemsize, known) is not None:
        return None
    wants = needed(least, block_head, dtype.itemsize, known) // KIB
    called = str(dtype).removeprefix("torch.")
    return f"heads of {head} {called} want {wants} KiB of shared memory; this GPU has {known.shared // KIB}"
