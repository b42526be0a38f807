"""The size of a cache, and the allocation of its pages in an arena."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from infd.kernels.families.attention import FLOAT8, KeyValuePages
from infd.weights.load import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from infd.models.base import PageTensor
    from infd.runner.arenas.arena import Arena
    from infd.scheduler.layout import CacheLayout


class CacheSpec(Struct, frozen=True):
    """The layout and tensors of a model's cache, without the number of pages.

    layout   the page groups; the i-th layer of each group uses slot i of a page
    tensors  the tensors of one slot of a page
    """

    layout: CacheLayout
    tensors: Sequence[PageTensor]

    @property
    def slots(self) -> int:
        """Number of slots of a page: the number of layers of the largest group."""
        return max((len(group.layers) for group in self.layout.groups), default=0)

    @property
    def page_bytes(self) -> int:
        return self.slots * sum(tensor.bytes for tensor in self.tensors)

    @property
    def alignment_bytes(self) -> int:
        """Upper bound of the bytes of an arena that are unused because tensors are aligned."""
        return ALIGNMENT * len(self.tensors) * self.slots

    def arena_bytes(self, pages: int) -> int:
        """Return the bytes of an arena for `pages` pages and the scratch page, alignment included."""
        return (pages + 1) * self.page_bytes + self.alignment_bytes

    def allocate(
        self, pages: int, arena: Arena, scales: Mapping[int, Tensor] = MappingProxyType({})
    ) -> list[KeyValuePages]:
        """Return the cache of every layer, by layer index. Raises OutOfMemory if the arena is too small.

        scales  by layer, see `scaled`
        """
        by_slot = [
            KeyValuePages(
                **{tensor.name: arena.take((pages + 1, *tensor.shape), tensor.dtype) for tensor in self.tensors}
            )
            for _ in range(self.slots)
        ]
        by_layer = {layer: by_slot[i] for group in self.layout.groups for i, layer in enumerate(group.layers)}
        return [scaled(by_layer[layer], scales.get(layer)) for layer in sorted(by_layer)]


def scaled(pages: KeyValuePages, scales: Tensor | None) -> KeyValuePages:
    """Return `pages`; if their dtype is fp8, with scales by which a write divides keys and values before it rounds.

    scales  [2, K] float32: the scales of keys, then of values, by head; None: all scales are 1
    """
    if pages.k.dtype is not FLOAT8:
        return pages
    if scales is None:
        scales = torch.ones((2, pages.k.shape[1]), dtype=torch.float32, device=pages.k.device)
    return pages._replace(scales=scales)
