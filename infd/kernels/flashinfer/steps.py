"""Steps of one page group, whether they are captured or not: each layer by the kernel that takes it.

Which one that is depends on what the layer asks, on the step, and on the cache; what none of FlashInfer's takes is
Triton's, and noted. A cache of 8-bit floats is divided by a number for each head: that of keys comes to the queries,
that of values to the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from infd.kernels.flashinfer.fits import asks, cannot_write

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch, AttentionPlan, KeyValuePages
    from infd.kernels.flashinfer.space import Space
    from infd.kernels.flashinfer.wrappers import Asked, Wrapper


class Steps(ABC):
    """Implements `ops.AttentionPlan`."""

    def __init__(self, batch: AttentionBatch, space: Space, other: AttentionPlan) -> None:
        self._batch = batch
        self._space = space
        self._other = other
        self._decodes = all(count == 1 for count in batch.counts)

    @property
    def slots(self) -> Tensor:
        return self._batch.slots

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        reason = cannot_write(k, v, pages)
        if reason is not None:
            self._space.left.note(reason)
            self._other.write(k, v, pages)
            return
        self._space.append(k, v, pages, *self._places())

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        batch, space = self._batch, self._space
        asked = asks(q, pages, scale, softcap)
        unplanned = not isinstance(asked, str) and self._decodes and space.needs_no_plan(asked, batch.page_tokens)
        if sinks is not None and not unplanned and not isinstance(asked, str):
            asked = "sinks where decoding is planned" if self._decodes else "sinks of prompts"
        if isinstance(asked, str):
            space.left.note(asked)
            return self._other.run(q, pages, scale=scale, softcap=softcap, sinks=sinks)
        q = q.contiguous() if pages.scales is None else _by_head(q, pages.scales[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        known = batch.offsets[-1]
        out[known:].zero_()  # padding
        if unplanned:
            table = batch.table.contiguous()
            space.decode(q[:known], pages, table, self._lengths(), asked, batch.window, sinks, out[:known])
        else:
            self._wrapper(asked).run(q[:known], (pages.k, pages.v), out=out[:known])
        return out if pages.scales is None else _by_head(out, pages.scales[1])

    @abstractmethod
    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the slots of all tokens, and zeros, both [T] int32."""

    @abstractmethod
    def _lengths(self) -> Tensor:
        """Return how many keys each sequence has, [S] uint32. Only asked where every span is one token."""

    @abstractmethod
    def _wrapper(self, asked: Asked) -> Wrapper:
        """Return a wrapper that is planned for this step, and for such layers."""


def _by_head(x: Tensor, scales: Tensor) -> Tensor:
    """Return x [T, H, D] times the number of each head's keys, [K] float32, rounded once."""
    by_head = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shared = (len(scales), -1)
    torch.mul(x.unflatten(1, shared), scales[:, None, None], out=by_head.unflatten(1, shared))
    return by_head
