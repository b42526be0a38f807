"""Attention over the paged cache, and how a model's layers share pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.layers.linear import Linear
from infd.scheduler.layout import PageGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.models.base import Batch
    from infd.models.layers.norm import RMSNorm
    from infd.models.parameter import Blueprint


class Attention:
    """Grouped-query attention of one layer: fused q, k and v, rotary positions, the cache, the output projection."""

    def __init__(
        self,
        blueprint: Blueprint,
        name: str,
        *,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        rope: Tensor,
        layer: int,
        group: int,
        qkv_bias: bool = False,
        output_bias: bool = False,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        """Declare the projections.

        layer  which of the batch's caches is this layer's
        group  which of the batch's attention plans: the page group that the layer is in
        """
        self._heads, self._kv_heads, self._head_size = heads, kv_heads, head_size
        self._layer, self._group = layer, group
        self._rotate, self._rope = blueprint.ops.rope, rope
        self._q_norm, self._k_norm = q_norm, k_norm
        self._scale: float = head_size**-0.5
        outputs = {"q_proj": heads * head_size, "k_proj": kv_heads * head_size, "v_proj": kv_heads * head_size}
        self._qkv = Linear(
            blueprint, {f"{name}.{part}": size for part, size in outputs.items()}, hidden_size, bias=qkv_bias
        )
        self._output = Linear(blueprint, {f"{name}.o_proj": hidden_size}, heads * head_size, bias=output_bias)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Return [T, hidden] of x [T, hidden], having put the keys and values of x into the cache."""
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        q, k, v = heads.split_with_sizes((self._heads, self._kv_heads, self._kv_heads), dim=1)
        if self._q_norm is not None:
            q = self._q_norm(q)
        if self._k_norm is not None:
            k = self._k_norm(k)
        q, k = self._rotate(q, k, batch.positions, self._rope)
        plan, pages = batch.attention[self._group], batch.cache[self._layer]
        plan.write(k, v, pages)
        return self._output(plan.run(q, pages, scale=self._scale).flatten(1))


def page_groups(windows: Sequence[int | None], page_tokens: int) -> tuple[PageGroup, ...]:
    """Group layers, given as the window of each, that keep the same tokens: those that keep all first."""
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    return tuple(
        PageGroup(
            layers=tuple(layer for layer, window in enumerate(windows) if window == kind),
            page_tokens=page_tokens,
            window=kind,
        )
        for kind in kinds
    )
