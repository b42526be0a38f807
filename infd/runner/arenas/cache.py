"""Decide how large the paged cache is, and lay its pages out in the arena."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from infd.errors import OutOfMemory
from infd.kernels.families.attention import FLOAT8, KeyValuePages
from infd.weights.load import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from infd.models.base import PageTensor
    from infd.runner.arenas.arena import Arena
    from infd.runner.start.budget import Room
    from infd.scheduler.layout import CacheLayout


class CacheSize(Struct, frozen=True):
    """How many pages there are, what they cost, and why not more or fewer.

    pages          ids 1..pages; page 0 is scratch and counted in bytes only
    max_model_len  the longest sequence that these pages hold
    """

    pages: int
    bytes: int
    max_model_len: int
    reason: str


def size_cache(
    layout: CacheLayout,
    tensors: Sequence[PageTensor],
    *,
    wanted: int | None,
    room: Room,
    rows: int,
    max_model_len: int,
    step_tokens: int,
) -> CacheSize:
    """Choose the number of pages, and the longest sequence that fits them.

    wanted       bytes asked for, or None to take all of `room`
    step_tokens  bounds a step; groups with a window hold a step's tokens beside it

    Raises OutOfMemory where no prompt and answer fit, of a token each.
    """
    if not layout.groups:
        return CacheSize(0, 0, max_model_len, "the model keeps no cache")
    page = page_bytes(layout, tensors)
    budget, reason = room if wanted is None else (wanted, "as configured")
    pages = (budget - ALIGNMENT * len(tensors) * slots(layout)) // page - 1
    useful = rows * layout.peak_pages(max_model_len, step_tokens)
    if wanted is None and pages > useful:
        pages, reason = useful, f"{rows} sequences of {max_model_len:,} tokens"
    longest = _longest(layout, max(pages, 0), max_model_len, step_tokens)
    if longest < 2:
        raise OutOfMemory(
            f"the cache has room for {max(pages, 0)} pages of {page:,} bytes ({reason}): raise cache.bytes"
        )
    return CacheSize(pages, arena_bytes(layout, tensors, pages), longest, reason)


def slots(layout: CacheLayout) -> int:
    """Return how many layers share a page: those of the largest group."""
    return max((len(group.layers) for group in layout.groups), default=0)


def page_bytes(layout: CacheLayout, tensors: Sequence[PageTensor]) -> int:
    return slots(layout) * sum(tensor.bytes for tensor in tensors)


def arena_bytes(layout: CacheLayout, tensors: Sequence[PageTensor], pages: int) -> int:
    """Return the size of an arena for `pages` pages and the scratch page, alignment included."""
    return (pages + 1) * page_bytes(layout, tensors) + ALIGNMENT * len(tensors) * slots(layout)


def allocate(
    layout: CacheLayout,
    tensors: Sequence[PageTensor],
    pages: int,
    arena: Arena,
    scales: Mapping[int, Tensor] = MappingProxyType({}),
) -> list[KeyValuePages]:
    """Return the cache of every layer, by layer index. The i-th layer of each group uses slot i of a page.

    scales  see `scaled`, by layer
    """
    by_slot = [
        KeyValuePages(**{tensor.name: arena.take((pages + 1, *tensor.shape), tensor.dtype) for tensor in tensors})
        for _ in range(slots(layout))
    ]
    by_layer = {layer: by_slot[i] for group in layout.groups for i, layer in enumerate(group.layers)}
    return [scaled(by_layer[layer], scales.get(layer)) for layer in sorted(by_layer)]


def scaled(pages: KeyValuePages, scales: Tensor | None) -> KeyValuePages:
    """Give pages of 8-bit floats the numbers [2, K] that they are divided by; without any, 1: they are only bounded."""
    if pages.k.dtype is not FLOAT8:
        return pages
    if scales is None:
        scales = torch.ones((2, pages.k.shape[1]), dtype=torch.float32, device=pages.k.device)
    return pages._replace(scales=scales)


def _longest(layout: CacheLayout, pages: int, most: int, step_tokens: int) -> int:
    """Return the length, at most `most`, of the longest sequence that `pages` can hold."""
    fits, too_long = 0, most + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if layout.peak_pages(middle, step_tokens) <= pages:
            fits = middle
        else:
            too_long = middle
    return fits
