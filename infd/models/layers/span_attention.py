"""Attention of one layer of an encoder, without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from infd.kernels.families.span_attention import WHOLE, Reach, SpanBatch
from infd.models.layers.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from infd.kernels.families.span_attention import SpanAttention as Attention
    from infd.kernels.families.span_attention import SpanPlan
    from infd.models.base import Batch, PassAdapters, SampledBatch
    from infd.models.blueprint import Blueprint
    from infd.models.encoder_dimensions import EncoderDimensions
    from infd.models.layers.distance_bias import DistanceBias
    from infd.models.layers.rope import Rope


class EncoderPass(Struct, frozen=True):
    """What the layers of a pass read.

    plan       of attention within the spans
    positions  [T] int64: rows of rotary tables
    adapters   of all tokens
    sampled    of the last layer alone: the tokens that it computes after its keys and values; None: all tokens
    """

    plan: SpanPlan
    positions: Tensor
    adapters: PassAdapters | None
    sampled: SampledBatch | None = None

    @property
    def adapters_after(self) -> PassAdapters | None:
        """The adapters of the tokens that the layer computes after its keys and values."""
        return self.adapters if self.sampled is None else self.sampled.adapters

    def after(self, x: Tensor) -> Tensor:
        """Return the rows of x [T, ...] that the layer computes after its keys and values."""
        return x if self.sampled is None else x[self.sampled.tokens]


class SpanAttentionDesign(NamedTuple):
    """The properties of attention that all layers of one type share.

    rope   the rotary position embedding; None: none
    reach  the keys that a query sees
    bias   of scores by head and distance; None: none
    """

    rope: Rope | None = None
    reach: Reach = WHOLE
    bias: DistanceBias | None = None


class SpanAttention:
    """Fused product of q, k and v, rope, attention within each span, output projection."""

    def __init__(
        self,
        blueprint: Blueprint,
        qkv: Mapping[str, int],
        output: str,
        dims: EncoderDimensions,
        design: SpanAttentionDesign,
        *,
        bias: bool = True,
        output_bias: bool | None = None,
    ) -> None:
        """Declare the projections.

        qkv          the checkpoint's modules that make q, k and v: number of outputs by name
        output       name of the output projection
        bias         whether q, k and v have biases
        output_bias  whether the output projection has one; None: as `bias`
        """
        self.heads, self.kv_heads, self.size = dims.heads, dims.kv_heads, dims.head
        self._rotate, self.design, self.scale = blueprint.ops.rope, design, dims.head**-0.5
        self.qkv = Linear(blueprint, qkv, dims.hidden, bias=bias, family=blueprint.ops.encoder_linear)
        self.output = Linear(
            blueprint,
            {output: dims.hidden},
            dims.heads * dims.head,
            bias=bias if output_bias is None else output_bias,
            family=blueprint.ops.encoder_linear,
        )

    def __call__(self, x: Tensor, step: EncoderPass) -> Tensor:
        """Return the sublayer's output [T, hidden] for x [T, hidden]; if `step.sampled` is set, [W, hidden]."""
        heads = self.qkv(x, step.adapters).view(x.shape[0], -1, self.size)
        q, k, v = heads.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.design.rope is not None:
            q, k = self._rotate(q, k, step.positions, self.design.rope.table)
        bias = None if self.design.bias is None else self.design.bias.table
        plan = step.plan
        if step.sampled is not None:
            assert step.sampled.spans is not None
            plan = step.sampled.spans
        attended = plan.run(step.after(q), k, v, scale=self.scale, reach=self.design.reach, bias=bias)
        return self.output(attended.flatten(1), step.adapters_after)


def planned(batch: Batch, attention: Attention) -> Batch:
    """Return a batch with its plans of attention without a cache."""
    spans = SpanBatch(tokens=batch.tokens.shape[0], offsets=batch.offsets, device=batch.tokens.device)
    sampled = batch.sampled
    if sampled is not None:
        sampled = replace(sampled, spans=attention.prepare(replace(spans, queries=sampled.indices)))
    return replace(batch, spans=attention.prepare(spans), sampled=sampled)


def separate(
    name: str, dims: EncoderDimensions, *, parts: tuple[str, str, str] = ("query", "key", "value")
) -> dict[str, int]:
    """Return the outputs of modules `name.part` that compute q, k and v each."""
    sizes = (dims.heads, dims.kv_heads, dims.kv_heads)
    return {f"{name}.{part}": heads * dims.head for part, heads in zip(parts, sizes, strict=True)}
