"""Allocate the pages of the cache in an arena."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from infd.kernels.families.attention import FLOAT8, KeyValuePages
from infd.weights.load import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from infd.models.base import PageTensor
    from infd.runner.arenas.arena import Arena
    from infd.scheduler.layout import CacheLayout


def slots(layout: CacheLayout) -> int:
    """Return the slots of a page: the number of layers of the largest group."""
    return max((len(group.layers) for group in layout.groups), default=0)


def page_bytes(layout: CacheLayout, tensors: Sequence[PageTensor]) -> int:
    """Return the bytes of a page. tensors: a slot's tensors"""
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

    tensors  a slot's tensors
    scales   see `scaled`, by layer

    Raises OutOfMemory if the arena is smaller than `arena_bytes`.
    """
    by_slot = [
        KeyValuePages(**{tensor.name: arena.take((pages + 1, *tensor.shape), tensor.dtype) for tensor in tensors})
        for _ in range(slots(layout))
    ]
    by_layer = {layer: by_slot[i] for group in layout.groups for i, layer in enumerate(group.layers)}
    return [scaled(by_layer[layer], scales.get(layer)) for layer in sorted(by_layer)]


def scaled(pages: KeyValuePages, scales: Tensor | None) -> KeyValuePages:
    """Set the scales of an fp8 cache: keys and values are divided by them before they are rounded.

    scales  [2, K] float32: scale of keys and scale of values, by head; None: all scales are 1
    """
    if pages.k.dtype is not FLOAT8:
        return pages
    if scales is None:
        scales = torch.ones((2, pages.k.shape[1]), dtype=torch.float32, device=pages.k.device)
    return pages._replace(scales=scales)
