"""How much of attention a program has in hand at once, and whether that fits into a GPU. This does not import triton.

What fits is estimated from above: `tests/kernels/triton/test_compiling.py` compares it with what compilers ask for.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

KIB: Final = 1024
LEAST: Final = 16  # of rows and keys: matrix products want as many
SHARED: Final[Mapping[str, int]] = MappingProxyType(  # bytes of shared memory that a program may have, by GPU
    {
        **{f"sm_{arch}": 163 * KIB for arch in (80, 87)},
        **{f"sm_{arch}": 99 * KIB for arch in (86, 89, 120, 121)},
        **{f"sm_{arch}": 227 * KIB for arch in (90, 100, 103)},
        "gfx950": 160 * KIB,
    }
)
SHARED_BY_AMD: Final = 64 * KIB


class Gpu(NamedTuple):
    """What tiles are cut for.

    name             as its driver calls it; empty where it is not here
    multiprocessors  how many
    shared           bytes of shared memory that a program may have
    amd              whether it is one of AMD's, which keep queries in registers
    """

    name: str = ""
    multiprocessors: int = 128
    shared: int = 227 * KIB
    amd: bool = False


class Blocks(NamedTuple):
    """How much of a tile is in hand at once."""

    rows: int
    keys: int
    warps: int
    stages: int


class Tiling(Struct, frozen=True):
    """How attention over heads of one shape is cut.

    few, many   blocks of tiles for few queries, and for many
    programs    to each multiprocessor, at which the device counts as full
    least_keys  of a part: a shorter one is not worth its share of the merge
    """

    few: Blocks
    many: Blocks
    programs: int = 2
    least_keys: int = 256


def gpu(device: torch.device) -> Gpu:
    """Return what is known of a device; where it is none of a GPU that is here, a large one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Gpu()
    told = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Gpu(told.name, told.multi_processor_count, told.shared_memory_per_block, amd=True)
    shared = getattr(told, "shared_memory_per_block_optin", absent(f"sm_{told.major}{told.minor}").shared)
    return Gpu(told.name, told.multi_processor_count, shared)


def absent(name: str) -> Gpu:
    """Return what is known of a GPU that is not here, by what its compiler calls it."""
    if amd := name.startswith("gfx"):
        return Gpu(shared=SHARED.get(name, SHARED_BY_AMD), amd=amd)
    return Gpu(shared=SHARED.get(name, Gpu().shared))


def needed(blocks: Blocks, block_head: int, itemsize: int, gpu: Gpu) -> int:
    """Return how many bytes of shared memory a program takes at most, with queries of `itemsize` bytes."""
    queries = 0 if gpu.amd else blocks.rows * block_head * itemsize
    weights = blocks.rows * blocks.keys * itemsize
    # Products of 64 rows or more read keys and values from there while the next ones arrive.
    copies = 2 if blocks.rows >= 64 and not gpu.amd and gpu.shared >= SHARED["sm_90"] else 1
    return queries + weights + 2 * copies * blocks.keys * block_head * itemsize + KIB


def fitting(blocks: Blocks, least_rows: int, block_head: int, itemsize: int, gpu: Gpu) -> Blocks | None:
    """Return these blocks, or the largest of the smaller ones that fit: fewer keys, then fewer rows. None: none do."""
    while needed(blocks, block_head, itemsize, gpu) > gpu.shared:
        if blocks.keys > LEAST:
            blocks = blocks._replace(keys=blocks.keys // 2)
        elif blocks.rows > least_rows:
            blocks = blocks._replace(rows=blocks.rows // 2)
        else:
            return None
    return blocks


def too_large(head: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why heads of this size cannot be computed, or None."""
    block_head = max(LEAST, 1 << (head - 1).bit_length())
    known = gpu(device)
    least = Blocks(LEAST, LEAST, 4, 1)
    if fitting(least, LEAST, block_head, dtype.itemsize, known) is not None:
        return None
    wants = needed(least, block_head, dtype.itemsize, known) // KIB
    called = str(dtype).removeprefix("torch.")
    return f"heads of {head} {called} want {wants} KiB of shared memory; this GPU has {known.shared // KIB}"
