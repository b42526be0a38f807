"""Paged attention by FlashInfer's kernel for prompts, which takes any mix of query lengths.

FlashInfer is told lengths by the host, so the host's bounds must be the truth: they are, as long as nothing speculates.
What it does not take goes to Triton: heads of unusual sizes, sinks, a cache with a scale for each head, and steps that
are captured, whose lengths the host does not know.

Planning copies from pinned memory that belongs to the wrapper, and what was planned lies in the wrapper: one is used
again only when its copy has been made, and by no other group of layers in the same step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from infd.kernels.triton.attention import PagedAttention as Other

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.kernels.ops import AttentionBatch, KeyValuePages, LastingPlan
    from infd.kernels.triton.attention import Plan as OtherPlan

HEADS = (64, 128, 256)  # sizes of a head that all of its kernels take
WORKSPACE = 128 * 2**20  # bytes for partial results; wrappers share them, since steps follow one another


class Wrapper(Protocol):
    """What is used of flashinfer.BatchPrefillWithPagedKVCacheWrapper."""

    def plan(self, *args: Any, **named: Any) -> None: ...
    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor: ...


def flashinfers(device: torch.device) -> Callable[[], Wrapper]:
    """Return what makes wrappers that share their space."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    space = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    return lambda: BatchPrefillWithPagedKVCacheWrapper(space, kv_layout="HND", backend="auto")


class Lent(NamedTuple):
    """A wrapper, the plan it was lent to, and the event behind what was copied for that."""

    wrapper: Wrapper
    plan: weakref.ref[Plan]
    copied: torch.cuda.Event | None


class Wrappers:
    """Those that there are. One is free again once its plan is gone, all of whose layers are issued by then."""

    def __init__(self, make: Callable[[], Wrapper]) -> None:
        self._make = make
        self._lent: list[Lent] = []

    def take(self) -> Wrapper:
        for i, (wrapper, plan, copied) in enumerate(self._lent):
            if plan() is None and (copied is None or copied.query()):
                del self._lent[i]
                return wrapper
        return self._make()

    def lend(self, wrapper: Wrapper, plan: Plan, device: torch.device) -> None:
        """Remember who has a wrapper that has just been planned."""
        copied = None
        if device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        self._lent.append(Lent(wrapper, weakref.ref(plan), copied))


class PagedAttention:
    """The attention family."""

    def __init__(self, make: Callable[[torch.device], Callable[[], Wrapper]] = flashinfers, other: Other | None = None):
        """make: given the device, what makes wrappers; other: takes what FlashInfer does not."""
        self._make = make
        self._wrappers: Wrappers | None = None
        self._other = other or Other()

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, dtype

    def prepare(self, batch: AttentionBatch) -> Plan:
        if self._wrappers is None:
            self._wrappers = Wrappers(self._make(batch.table.device))
        return Plan(batch, self._wrappers, self._other.prepare(batch))

    def lasting(self, batch: AttentionBatch) -> LastingPlan:
        return self._other.lasting(batch)


class Asked(NamedTuple):
    """What a wrapper is planned for; layers that ask for the same share one."""

    heads: int
    kv_heads: int
    head: int
    scale: float
    softcap: float | None


class Plan:
    """One step of one page group. Wrappers are planned at the first layer, which knows the heads."""

    def __init__(self, batch: AttentionBatch, wrappers: Wrappers, other: OtherPlan) -> None:
        self._batch = batch
        self._wrappers = wrappers
        self._other = other
        self._planned: dict[Asked, Wrapper] = {}

    @property
    def slots(self) -> Tensor:
        return self._batch.slots

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        self._other.write(k, v, pages)

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if q.shape[2] not in HEADS or sinks is not None or pages.scales is not None:
            return self._other.run(q, pages, scale=scale, softcap=softcap, sinks=sinks)
        asked = Asked(q.shape[1], pages.k.shape[1], q.shape[2], scale, softcap)
        wrapper = self._planned.get(asked)
        if wrapper is None:
            wrapper = self._planned[asked] = self._plan(asked, q.dtype)
        known = self._batch.offsets[-1]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[known:].zero_()  # padding
        wrapper.run(q[:known], (pages.k, pages.v), out=out[:known])
        return out

    def _plan(self, asked: Asked, dtype: torch.dtype) -> Wrapper:
        batch, size = self._batch, self._batch.page_tokens
        lengths = np.array(batch.starts, dtype=np.int64) + np.array(batch.counts, dtype=np.int64)
        held = -(-lengths // size)
        first = np.concatenate(([0], np.cumsum(held)))
        # Of each span, the pages that its keys lie in. Behind a window the first of them are page 0, which nobody sees.
        within = np.arange(first[-1]) - np.repeat(first[:-1], held)
        place = np.repeat(np.arange(len(held)) * batch.table.shape[1], held) + within
        where = torch.from_numpy(place).to(batch.table.device, non_blocking=True)
        wrapper = self._wrappers.take()
        wrapper.plan(
            torch.tensor(batch.offsets, dtype=torch.int32),
            torch.from_numpy(first.astype(np.int32)),
            batch.table.reshape(-1).index_select(0, where),
            torch.from_numpy((lengths - (held - 1) * size).astype(np.int32)),
            asked.heads,
            asked.kv_heads,
            asked.head,
            size,
            causal=True,
            sm_scale=asked.scale,
            window_left=-1 if batch.window is None else batch.window - 1,
            logits_soft_cap=asked.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
            non_blocking=True,
        )
        self._wrappers.lend(wrapper, self, batch.table.device)
        return wrapper
