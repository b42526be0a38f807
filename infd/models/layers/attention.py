"""Attention over the paged cache, or without causality within a step's spans; the page groups of a model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from infd.errors import CheckpointError
from infd.kernels.recipe import AttentionRecipe
from infd.models.layers.linear import Linear
from infd.rounding import ceil_div
from infd.scheduler.layout import Chunk, PageGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.families.span_attention import Reach
    from infd.models.base import Batch
    from infd.models.blueprint import Blueprint
    from infd.models.dimensions import Dimensions
    from infd.models.layers.norm import Constant, OverAllHeads, RMSNorm
    from infd.models.layers.rope import Rope

MOST_GROUPS = 8  # each group costs one page table and one attention plan per step


class AttentionDesign(NamedTuple):
    """The properties of attention that all layers of one type share.

    rope         the rotary position embedding
    interleaved  whether adjacent elements are rotated as a pair; see families.rope.Rope
    scale        multiplies q·k; None: head size ** -0.5
    softcap      bounds the scores; see AttentionPlan.run
    fused        whether the checkpoint stores q, k and v as one tensor `qkv_proj`
    sinks        whether each head has a sink; see AttentionPlan.run
    temperature  [positions] float32: multiplies the queries at each position, after rope; None: 1
    """

    rope: Rope
    interleaved: bool = False
    scale: float | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    fused: bool = False
    sinks: bool = False
    temperature: Tensor | None = None


class LayerIndex(NamedTuple):
    """The indices of one layer, and the keys that its queries see.

    layer  index into the batch's caches
    group  index of the layer's page group, into the batch's attention plans
    reach  of a model without causality: the keys of its own span that a query sees; None: the page group says it
    """

    layer: int
    group: int
    reach: Reach | None = None


class HeadNorms(NamedTuple):
    """The norms of q [T, H, D] and k [T, K, D] before rope."""

    q: RMSNorm | Constant | OverAllHeads
    k: RMSNorm | Constant | OverAllHeads


class Attention:
    """Grouped-query attention of one layer.

    In this order: fused qkv projection, optional norms of q and k, rope, cache write unless the layer has a reach,
    attention, output projection.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        name: str,
        dims: Dimensions,
        design: AttentionDesign,
        index: LayerIndex,
        norms: HeadNorms | None = None,
    ) -> None:
        """Declare the projections. Raises CheckpointError."""
        self._heads, self._kv_heads, self._head_size = dims.heads, dims.kv_heads, dims.head
        self._layer, self._group, self._reach = index
        if self._reach is not None and (design.softcap is not None or design.sinks):
            raise CheckpointError("attention without causality is computed only without sinks and caps of its scores")
        self._rotate, self._rope, self._interleaved = blueprint.ops.rope, design.rope, design.interleaved
        self._q_norm = None if norms is None else norms.q
        self._k_norm = None if norms is None else norms.k
        self._scale, self._softcap = dims.head**-0.5 if design.scale is None else design.scale, design.softcap
        q_size, kv_size = dims.heads * dims.head, dims.kv_heads * dims.head
        outputs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        if design.fused:
            outputs = {"qkv_proj": q_size + 2 * kv_size}
        self._qkv = Linear(
            blueprint, {f"{name}.{part}": size for part, size in outputs.items()}, dims.hidden, bias=design.qkv_bias
        )
        self._temperature = design.temperature
        self._output = Linear(blueprint, {f"{name}.o_proj": dims.hidden}, q_size, bias=design.output_bias)
        self._sinks = blueprint.declare({f"{name}.sinks": dims.heads}, dtype=torch.float32) if design.sinks else None

    def recipe(self) -> AttentionRecipe | None:
        if self._reach is not None:
            return None
        return AttentionRecipe(
            layer=self._layer,
            group=self._group,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_size=self._head_size,
            qkv=self._qkv.recipe(),
            q_norm=None if self._q_norm is None else self._q_norm.recipe(),
            k_norm=None if self._k_norm is None else self._k_norm.recipe(),
            rope=self._rope.table,
            interleaved=self._interleaved,
            scale=self._scale,
            softcap=self._softcap,
            sinks=None if self._sinks is None else self._sinks.tensor,
            temperature=self._temperature,
            output=self._output.recipe(),
        )

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the sublayer's output [T, hidden] for x [T, hidden], after writing x's keys and values to the cache.

        If `batch.sampled` is set, returns only the W sampled rows: [W, hidden].
        """
        heads = self._qkv(x, batch.adapters).view(x.shape[0], -1, self._head_size)
        q, k, v = heads.split_with_sizes((self._heads, self._kv_heads, self._kv_heads), dim=1)
        table = self._rope.table if batch.angles is None else batch.angles[self._rope.number]
        if self._reach is not None:
            after = batch.adapters if batch.sampled is None else batch.sampled.adapters
            return self._output(self._within_spans(q, k, v, table, batch).flatten(1), after)
        plan, pages, adapters = batch.attention[self._group], batch.cache[self._layer], batch.adapters
        q = self._rotate.enter(
            q,
            k,
            v,
            batch.positions,
            table,
            plan,
            pages,
            interleaved=self._interleaved,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
        )
        if self._temperature is not None:
            q = (q * self._temperature[batch.positions, None, None]).to(q.dtype)
        if (sampled := batch.sampled) is not None:
            assert sampled.attention is not None
            q, plan, adapters = q[sampled.tokens], sampled.attention, sampled.adapters
        sinks = None if self._sinks is None else self._sinks.tensor
        attended = plan.run(q, pages, scale=self._scale, softcap=self._softcap, sinks=sinks)
        return self._output(attended.flatten(1), adapters)

    def _within_spans(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, batch: Batch) -> Tensor:
        """Return [T, H, D]: each query of q [T, H, D] attends to the keys of its own span that the reach allows.

        If `batch.sampled` is set, only the W sampled rows: [W, H, D].
        """
        plan = batch.spans
        assert self._reach is not None
        q = q if self._q_norm is None else self._q_norm(q)
        k = k if self._k_norm is None else self._k_norm(k)
        q, k = self._rotate(q, k, batch.positions, table, interleaved=self._interleaved)
        if self._temperature is not None:
            q = (q * self._temperature[batch.positions, None, None]).to(q.dtype)
        if batch.sampled is not None:
            q, plan = q[batch.sampled.tokens], batch.sampled.spans
        assert plan is not None
        return plan.run(q, k, v, scale=self._scale, reach=self._reach)


def page_groups(ranges: Sequence[int | Chunk | None], page_tokens: int) -> tuple[PageGroup, ...]:
    """Group layers by the tokens that they cache; the full-attention group comes first.

    ranges  by layer, the extent of attention: a window in tokens, or chunks; None: all tokens

    A page has one slot for each layer of the largest group. Beside a windowed group of many layers, a full-attention
    group of few layers would leave most slots of its pages unused, and sequences keep these pages longest. Windowed
    layers are therefore split into groups no larger than the full-attention group, or than a MOST_GROUPS-th of all
    layers if that is more.
    """
    layers_of: dict[int | Chunk | None, list[int]] = {}
    for layer, visible in enumerate(ranges):
        layers_of.setdefault(visible, []).append(layer)
    full = layers_of.get(None)
    size = max(len(full), ceil_div(len(ranges), MOST_GROUPS)) if full else len(ranges)
    return tuple(
        PageGroup(
            layers=tuple(layers[first : first + size]),
            page_tokens=page_tokens,
            window=visible if isinstance(visible, int) else None,
            chunk=visible.tokens if isinstance(visible, Chunk) else None,
        )
        for visible, layers in sorted(layers_of.items(), key=lambda item: extent(item[0]))
        for first in range(0, len(layers), size)
    )


def extent(visible: int | Chunk | None) -> int:
    """Return the most tokens to which a query attends, 0 for all."""
    return visible.tokens if isinstance(visible, Chunk) else visible or 0
