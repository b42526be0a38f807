"""The tilings of attention that are tried, and the steps that are timed.

Tiles of few queries vary in block sizes and in the splitting of keys, tiles of many queries in block sizes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from msgspec.structs import replace

from infd.kernels.families.attention import FLOAT8, AttentionBatch, KeyValuePages
from infd.kernels.triton.attention import PagedAttention
from infd.kernels.triton.blocks import Blocks, Tiling, fitting
from infd.kernels.triton.tuning import Fixed, Measured, Variations, search
from infd.rounding import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from infd.kernels.triton.blocks import Gpu
    from infd.kernels.triton.tiles import Shape
    from infd.kernels.triton.tuning import Cost, Found

PAGE: Final = 16
FEW: Final = ([(8191, 1)], [(2047, 1)] * 32)  # steps, each a list of spans (start, count)
MANY: Final = ([(0, 2048)],)


def tune(shape: Shape, gpu: Gpu, device: torch.device, timer: Callable[[Callable[[], object]], float]) -> Found[Tiling]:
    """Return the fastest tiling of heads of one shape."""
    return find(shape, gpu, measured(shape, gpu, device, timer))


def find(shape: Shape, gpu: Gpu, cost: Cost[Tiling]) -> Found[Tiling]:
    """Return the fastest tiling by `cost`."""
    blocks = partial(_few, shape=shape, gpu=gpu)
    return search(
        shape.default_tiling(gpu), Variations([blocks, _splits], [partial(_many, shape=shape, gpu=gpu)]), cost
    )


def _few(tiling: Tiling, shape: Shape, gpu: Gpu) -> Iterator[Tiling]:
    for blocks in _fitting([shape.least_rows], (32, 64, 128), (2, 4, 8), (1, 2, 3, 4), shape, gpu):
        yield replace(tiling, few=blocks)


def _splits(tiling: Tiling) -> Iterator[Tiling]:
    for programs in (1, 2, 4, 8):
        for least_keys in (128, 256, 512):
            yield replace(tiling, programs=programs, least_keys=least_keys)


def _many(tiling: Tiling, shape: Shape, gpu: Gpu) -> Iterator[Tiling]:
    rows = sorted({max(shape.least_rows, rows) for rows in (16, 64, 128)})
    for blocks in _fitting(rows, (16, 32, 64, 128), (4, 8), (1, 2, 3), shape, gpu):
        yield replace(tiling, many=blocks)


def _fitting(
    rows: Sequence[int], keys: Sequence[int], warps: Sequence[int], stages: Sequence[int], shape: Shape, gpu: Gpu
) -> Iterator[Blocks]:
    for blocks in (Blocks(*each) for each in ((r, k, w, s) for r in rows for k in keys for w in warps for s in stages)):
        if fitting(blocks, shape.least_rows, shape.block_head, shape.dtype.itemsize, gpu) == blocks:
            yield blocks


def measured(
    shape: Shape,
    gpu: Gpu,
    device: torch.device,
    timer: Callable[[Callable[[], object]], float],
    few: Sequence[Sequence[tuple[int, int]]] = FEW,
    many: Sequence[Sequence[tuple[int, int]]] = MANY,
) -> Measured[Tiling]:
    """Return the cost of tilings.

    timer      measures the seconds that a call takes
    few, many  spans of steps
    """
    cache_dtype = FLOAT8 if shape.narrow else shape.dtype
    count = max(sum(ceil_div(start + count, PAGE) for start, count in spans) for spans in (*few, *many)) + 1

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device).to(shape.dtype)

    k, v = (drawn(count, shape.kv_heads, PAGE, shape.head).to(cache_dtype) for _ in range(2))
    pages = KeyValuePages(k, v, torch.ones(2, shape.kv_heads, device=device) if shape.narrow else None)

    def step(spans: Sequence[tuple[int, int]]) -> Callable[[Tiling], Callable[[], Tensor]]:
        batch = _batch(spans, device)
        q = drawn(len(batch.slots), shape.kv_heads * shape.shared, shape.head)

        def work(tiling: Tiling) -> Callable[[], Tensor]:
            plan = PagedAttention(tilings=Fixed(gpu, tiling)).prepare(batch)
            return partial(plan.run, q, pages, scale=shape.head**-0.5)

        return work

    return Measured(
        timer,
        1e-4 if shape.dtype is torch.float32 else 2e-2,
        shape.default_tiling(gpu),
        [step(spans) for spans in few],
        [step(spans) for spans in many],
    )


def _batch(spans: Sequence[tuple[int, int]], device: torch.device) -> AttentionBatch:
    """Return a step with `spans` (start, count), whose sequences occupy consecutive pages."""
    page_counts = [ceil_div(start + count, PAGE) for start, count in spans]
    table = torch.zeros(len(spans), max(page_counts), dtype=torch.int32)
    offsets, slots, page = [0], [], 1
    for row, ((start, count), pages) in enumerate(zip(spans, page_counts, strict=True)):
        table[row, :pages] = torch.arange(page, page + pages)
        slots.append(page * PAGE + torch.arange(start, start + count))
        offsets.append(offsets[-1] + count)
        page += pages
    return AttentionBatch(
        page_tokens=PAGE,
        window=None,
        starts=[start for start, _ in spans],
        counts=[count for _, count in spans],
        offsets=offsets,
        start=torch.tensor([start for start, _ in spans], dtype=torch.int32, device=device),
        table=table.to(device),
        slots=torch.cat(slots).to(device),
    )
