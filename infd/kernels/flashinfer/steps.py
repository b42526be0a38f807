"""Choose each layer's kernel, in captured and uncaptured steps.

The choice depends on the layer, the step and the cache; unsupported cases are delegated to Triton and recorded. An fp8
cache has two scales for each key head: queries are multiplied by the keys' scale, the result by the values' scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from infd.kernels.flashinfer.support import cannot_write, layer_params

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch, AttentionPlan, KeyValuePages
    from infd.kernels.flashinfer.device_state import DeviceState
    from infd.kernels.flashinfer.wrappers import LayerParams, Wrapper


class Steps(ABC):
    """Implements families.attention.AttentionPlan."""

    def __init__(self, batch: AttentionBatch, state: DeviceState, other: AttentionPlan) -> None:
        self._batch = batch
        self._state = state
        self._other = other
        self._decodes = all(count == 1 for count in batch.counts)

    @property
    def slots(self) -> Tensor:
        return self._batch.slots

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        reason = cannot_write(k, v, pages)
        if reason is not None:
            self._state.delegation.note(reason)
            self._other.write(k, v, pages)
            return
        self._state.append(k, v, pages, *self._places())

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        batch, state = self._batch, self._state
        params = layer_params(q, pages, scale, softcap)
        unplanned = not isinstance(params, str) and self._decodes and state.needs_no_plan(params, batch.page_tokens)
        if sinks is not None and not unplanned and not isinstance(params, str):
            params = "sinks where decoding is planned" if self._decodes else "sinks of prompts"
        if isinstance(params, str):
            state.delegation.note(params)
            return self._other.run(q, pages, scale=scale, softcap=softcap, sinks=sinks)
        q = q.contiguous() if pages.scales is None else _by_head(q, pages.scales[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        known = batch.offsets[-1]
        out[known:].zero_()  # rows of padding must be finite
        if unplanned:
            table = batch.table.contiguous()
            state.decode(q[:known], pages, table, self._lengths(), params, batch.window, sinks, out[:known])
        else:
            self._wrapper(params).run(q[:known], (pages.k, pages.v), out=out[:known])
        return out if pages.scales is None else _by_head(out, pages.scales[1])

    @abstractmethod
    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the tokens' slots, and zeros, both [T] int32."""

    @abstractmethod
    def _lengths(self) -> Tensor:
        """Return each sequence's number of keys, [S] uint32. Called only if every span has one token."""

    @abstractmethod
    def _wrapper(self, params: LayerParams) -> Wrapper:
        """Return a wrapper planned for this step and for layers with these parameters."""


def _by_head(x: Tensor, scales: Tensor) -> Tensor:
    """Return x [T, H, D] times the scales [K] float32 of each head's key head, rounded once."""
    by_head = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shared = (len(scales), -1)
    torch.mul(x.unflatten(1, shared), scales[:, None, None], out=by_head.unflatten(1, shared))
    return by_head
