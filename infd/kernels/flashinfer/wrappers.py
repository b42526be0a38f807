"""FlashInfer's planned kernels: what they are told of a step, and which of their wrappers is free for it.

Lengths come from the host, so its bounds must be the truth: they are, as long as nothing speculates.

Planning copies from pinned memory that belongs to the wrapper, and what was planned lies in the wrapper: one is used
again only when its copy has been made, and by no other group of layers in the same step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch

SOME = (1, 2, 3)  # heads that share one of keys: so few multiply no slower without tensor cores than keys are read


class Wrapper(Protocol):
    """What is used of FlashInfer's wrappers for pages."""

    def plan(self, *args: Any, **named: Any) -> None: ...
    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor: ...


class Asked(NamedTuple):
    """What is planned for; layers that ask for the same share a plan.

    dtype, kept  of queries, and of the cache
    """

    heads: int
    kv_heads: int
    head: int
    scale: float
    softcap: float | None
    dtype: torch.dtype
    kept: torch.dtype

    @property
    def tensor_cores(self) -> bool:
        """Say whether decoding wants them. FlashInfer's kernel without is compiled for few numbers of shared heads."""
        return self.heads // self.kv_heads not in SOME


class Keys(NamedTuple):
    """Of each span, the pages that its queries see.

    first    [S + 1] int32: where they begin, span after span
    last     [S] int32: how many tokens there are on the last of them
    skipped  [S] int32: how many pages lie wholly behind the window, before them
    """

    first: np.ndarray
    last: np.ndarray
    skipped: np.ndarray

    @classmethod
    def of(cls, starts: Sequence[int], counts: Sequence[int], page_tokens: int, window: int | None) -> Keys:
        start = np.array(starts, dtype=np.int64)
        end = start + np.array(counts, dtype=np.int64)
        hidden = np.zeros_like(start) if window is None else np.maximum(start - window + 1, 0)
        skipped = hidden // page_tokens
        held = -(-end // page_tokens) - skipped
        first = np.concatenate(([0], np.cumsum(held)))
        last = end - (skipped + held - 1) * page_tokens
        return cls(first.astype(np.int32), last.astype(np.int32), skipped.astype(np.int32))

    def pages(self, batch: AttentionBatch) -> Tensor:
        """Return their ids, taken from the table on the device."""
        table = batch.table
        held = np.diff(self.first)
        within = np.arange(self.first[-1]) - np.repeat(self.first[:-1], held)
        place = np.repeat(np.arange(len(held)) * table.shape[1] + self.skipped, held) + within
        return table.reshape(-1).index_select(0, batch.up(place))


def plan(
    wrapper: Wrapper,
    asked: Asked,
    keys: Keys,
    pages: Tensor,
    batch: AttentionBatch,
    *queries: Tensor,
    **more: Any,
) -> None:
    """Plan a wrapper for a step. queries: where each span's begin, if the wrapper asks."""
    wrapper.plan(
        *queries,
        torch.from_numpy(keys.first),
        pages,
        torch.from_numpy(keys.last),
        asked.heads,
        asked.kv_heads,
        asked.head,
        batch.page_tokens,
        sm_scale=asked.scale,
        window_left=-1 if batch.window is None else batch.window - 1,
        logits_soft_cap=asked.softcap,
        q_data_type=asked.dtype,
        kv_data_type=asked.kept,
        non_blocking=True,
        **more,
    )


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return what tells when all that was issued so far is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class Lent(NamedTuple):
    """A wrapper, the step's plan it was lent to, and the event behind what was copied for that."""

    wrapper: Wrapper
    borrower: weakref.ref[Any]
    copied: torch.cuda.Event | None


class Wrappers:
    """Those that there are. One is free again once its borrower is gone, all of whose layers are issued by then."""

    def __init__(self, make: Callable[[], Wrapper]) -> None:
        self._make = make
        self._lent: list[Lent] = []

    def take(self) -> Wrapper:
        for i, (wrapper, borrower, copied) in enumerate(self._lent):
            if borrower() is None and (copied is None or copied.query()):
                del self._lent[i]
                return wrapper
        return self._make()

    def lend(self, wrapper: Wrapper, borrower: Any, device: torch.device) -> None:
        """Remember who has a wrapper that has just been planned."""
        self._lent.append(Lent(wrapper, weakref.ref(borrower), recorded(device)))
