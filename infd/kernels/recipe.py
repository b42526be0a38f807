"""Decoder layers as data, for kernels that compute whole layers in one call.

A layer's own code defines its result; kernels that compute recipes return equal results. Layers that a recipe cannot
express run their own code. A recipe references the weights' tensors, so it is made after loading, and is valid only
while the tensors keep their addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.inputs import Rounding
    from infd.kernels.families.matrices import Form
    from infd.kernels.families.span_attention import Reach
    from infd.kernels.router import Gating, Router


class NormRecipe(NamedTuple):
    """RMSNorm. In q_norm and k_norm, a weight [D] norms each head alone, a weight [H * D] a token's heads together."""

    weight: Tensor
    eps: float
    offset: float


class LayerNormRecipe(NamedTuple):
    """LayerNorm, of a row."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class ProductRecipe(NamedTuple):
    """x W^T + bias. `storage` is the tensor that stores W, in the layout of `form`.

    rounded  how x is rounded before the product; None: x is not rounded
    """

    form: Form
    storage: Tensor
    bias: Tensor | None
    rounded: Rounding | None = None


# The transform of a sublayer's output before the residual addition: a norm, a factor, or none.
OutputTransform = NormRecipe | float | None


class AttentionRecipe(Struct, frozen=True, kw_only=True):
    """Attention; fields as in models/layers/attention.py.

    rope                the `table` of families.rope.Rope, [rows, 2, R / 2]
    sinks, temperature  [H] and [positions] float32, or None
    """

    layer: int
    group: int
    heads: int
    kv_heads: int
    head_size: int
    qkv: ProductRecipe
    q_norm: NormRecipe | None
    k_norm: NormRecipe | None
    rope: Tensor
    interleaved: bool
    scale: float
    softcap: float | None
    sinks: Tensor | None
    temperature: Tensor | None
    output: ProductRecipe
    output_transform: OutputTransform = None


class GatedRecipe(Struct, frozen=True, kw_only=True):
    """The feed-forward network down(activation(gate) * up). gate_up: the matrices of gate and up, stacked."""

    gate_up: ProductRecipe
    activation: str  # config.json's name: silu or gelu_pytorch_tanh
    down: ProductRecipe
    output_transform: OutputTransform = None


class RouterRecipe(NamedTuple):
    """A router with its tensors, all float32: weight [E, hidden], bias [E] of logits, correction [E] of choices."""

    design: Router
    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None


class StackRecipe(NamedTuple):
    """x W^T + bias for each expert. `storage[e]` stores expert e's matrix in the layout of `form`; bias [E, out]."""

    form: Form
    storage: Tensor
    bias: Tensor | None


class SharedRecipe(NamedTuple):
    """The experts that all tokens share, as one network. gate [1, hidden]: sigmoid(gate x) multiplies the output."""

    mlp: GatedRecipe
    gate: ProductRecipe | None


class ExpertsRecipe(Struct, frozen=True, kw_only=True):
    """Experts, plus optional shared experts.

    number   of the layer, among those with experts
    gate_up  an expert's matrices of gate and up, stacked
    """

    router: RouterRecipe
    gate_up: StackRecipe
    gating: Gating
    down: StackRecipe
    shared: SharedRecipe | None = None
    output_transform: OutputTransform = None
    number: int = 0


class LayerRecipe(Struct, frozen=True, kw_only=True):
    """Attention, then the feed-forward network, each preceded by an optional norm and added to the residual stream."""

    input_norm: NormRecipe | LayerNormRecipe | None
    attention: AttentionRecipe
    post_norm: NormRecipe | LayerNormRecipe | None
    mlp: GatedRecipe | ExpertsRecipe


class TableRecipe(NamedTuple):
    """Embeddings: rows of the matrix that `storage` stores in the layout of `form`, multiplied by `scale`."""

    form: Form
    storage: Tensor
    scale: float


class HeadRecipe(NamedTuple):
    """Logits: a product, float32, multiplied by `scale`."""

    product: ProductRecipe
    scale: float


class DecoderRecipe(NamedTuple):
    """The parts of a decoder before and after its layers. norm: of the last layer's output."""

    embedding: TableRecipe
    norm: NormRecipe | LayerNormRecipe
    head: HeadRecipe


class BiasTable(Protocol):
    """Biases of attention scores by head and distance."""

    @property
    def table(self) -> Tensor:
        """See families.span_attention.SpanPlan.run, argument `bias`; computed from the present weights."""


class EncoderTable(NamedTuple):
    """A table of embeddings [N, hidden]. rows: the integers that select a token's row; "none": row 0 for all."""

    table: Tensor
    rows: Literal["tokens", "positions", "types", "none"]


class EmbeddingsRecipe(NamedTuple):
    """The sum of a row of each table, in order, normed. The first table's rows are tokens. Each addition is rounded."""

    tables: tuple[EncoderTable, ...]
    norm: LayerNormRecipe | None


class EncoderLayerRecipe(Struct, frozen=True, kw_only=True):
    """A layer of an encoder, without a cache.

    normed_first  whether norms precede the sublayers, whose outputs are added to the residual stream; if not, norms
                  follow the additions
    rope          the `table` of families.rope.Rope, or None
    bias          or None
    up            of the feed-forward network; if `gated` is not "none", the stacked matrices of gate and up, in the
                  order that it states
    activation    "gelu", "gelu_tanh", "relu" or "silu"
    """

    attention_norm: LayerNormRecipe | NormRecipe | None
    mlp_norm: LayerNormRecipe | NormRecipe
    normed_first: bool
    heads: int
    kv_heads: int
    head_size: int
    qkv: ProductRecipe
    rope: Tensor | None
    reach: Reach
    bias: BiasTable | None
    scale: float
    output: ProductRecipe
    up: ProductRecipe
    gated: Literal["none", "gate_up", "up_gate"]
    activation: str
    down: ProductRecipe
