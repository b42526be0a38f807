"""An encoder in one native call: `native/encoder.cpp`.

If any product's form is not Addressable, or native code does not round its inputs, the layers run their own code.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from infd.kernels.cpu.library import FLOAT, INT, POINTER, Library
from infd.kernels.cpu.linear import PANEL
from infd.kernels.cpu.pooling import Pooling
from infd.kernels.cpu.product import Addressable, Product, Unaddressable, described
from infd.kernels.cpu.span_attention import Plan, SpanAttention
from infd.kernels.families.span_attention import SpanBatch
from infd.kernels.recipe import LayerNormRecipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.encoder import EncoderInputs
    from infd.kernels.families.span_attention import Reach, SpanPlan
    from infd.kernels.recipe import EmbeddingsRecipe, EncoderLayerRecipe, NormRecipe, ProductRecipe
    from infd.pooling.settings import Reduction

# Before each call the device thread reports progress and can be stopped. A call computes SLICE layers, or more if there
# are so few tokens that no more than SLICE_ROWS rows pass through a layer.
SLICE = 4
SLICE_ROWS = 1024
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # in the order of Activation in `native/encoder.cpp`
GATED = ("none", "gate_up", "up_gate")
REDUCTIONS: Final = ("mean", "cls", "lasttoken")  # that Embedder computes
CPU: Final = torch.device("cpu")


class Norm(ctypes.Structure):
    """The C structure EncoderNorm of `native/encoder.h`."""

    _fields_ = (("weight", POINTER), ("bias", POINTER), ("eps", FLOAT), ("centered", INT))


class Layer(ctypes.Structure):
    """The C structure EncoderLayer of `native/encoder.h`."""

    _fields_ = (
        ("qkv", Product),
        ("output", Product),
        ("up", Product),
        ("down", Product),
        ("attention_norm", Norm),
        ("mlp_norm", Norm),
        ("normed_first", INT),
        ("gated", INT),
        ("activation", INT),
        ("rope", POINTER),
        ("turned", INT),
        ("heads", INT),
        ("kv_heads", INT),
        ("size", INT),
        ("scale", FLOAT),
        ("reach", INT),
        ("bias", POINTER),
        ("furthest", INT),
        ("q", Product),
        ("kv", Product),
    )


class Table(ctypes.Structure):
    """The C structure EncoderTable of `native/encoder.h`."""

    _fields_ = (("numbers", POINTER), ("rows", INT), ("index", POINTER))


class Embeddings(ctypes.Structure):
    """The C structure EncoderEmbeddings of `native/encoder.h`."""

    _fields_ = (("tables", POINTER), ("count", INT), ("norm", Norm))


class EncoderStep(ctypes.Structure):
    """The C structure EncoderStep of `native/encoder.h`."""

    _fields_ = (
        ("tokens", INT),
        ("hidden", INT),
        ("positions", POINTER),
        ("attention", POINTER),
        ("sampled", INT),
        ("sampled_tokens", POINTER),
        ("sampled_attention", POINTER),
    )


class EncoderStack:
    """Implements families.encoder.EncoderStack."""

    def __init__(self, library: Library | None = None) -> None:
        self._library = library or Library()

    def build(self, layers: Sequence[EncoderLayerRecipe], embeddings: EmbeddingsRecipe | None) -> Stacked | None:
        try:
            return Stacked(self._library, layers, embeddings)
        except Unaddressable:
            return None


class Queries(NamedTuple):
    """The tokens whose results are read.

    address  of [rows] int64, ascending, perhaps repeated
    plan     of attention whose queries are these tokens
    """

    rows: int
    address: int
    plan: SpanPlan


class Stacked:
    """An encoder as C structures. Implements families.encoder.StackedEncoder."""

    def __init__(
        self,
        library: Library,
        layers: Sequence[EncoderLayerRecipe],
        embeddings: EmbeddingsRecipe | None,
    ) -> None:
        self._library = library
        self._compute = library.kernel("encoder", INT, POINTER, POINTER, INT, POINTER, POINTER)
        self._recipes = layers, embeddings  # keep alive the weights to which the structures point
        self._reaches: list[Reach] = sorted({each.reach for each in layers}, key=str)
        self._steps = POINTER * len(self._reaches)
        self._layers = (Layer * len(layers))(*(self._layer(each) for each in layers))
        # The layers with biased scores: C structure and recipe of the bias.
        self._biased = [(layer, each.bias) for layer, each in zip(self._layers, layers, strict=True) if each.bias]
        self._tables: list[tuple[Table, str]] = []  # with EncoderTable.rows
        self._embeddings = 0  # address
        if embeddings is not None:
            self._describe(embeddings)

    def __call__(self, inputs: EncoderInputs, x: Tensor | None, plan: SpanPlan, beat: Callable[[], None]) -> Tensor:
        positions, sampled, embeddings = inputs.positions.data_ptr(), inputs.sampled, None
        if x is None:
            types = None if inputs.types is None else inputs.types.data_ptr()
            embeddings = self._look_up(inputs.tokens.data_ptr(), positions, types)
            x = torch.empty((inputs.tokens.shape[0], self.width), dtype=self.dtype)
        x = x.contiguous()
        # Sliced before the layers are computed: afterwards it takes twice as long, as their weights have evicted
        # torch's code from the CPU's cache.
        found, queries = x, None
        if sampled is not None:
            found = x[: sampled.tokens.shape[0]]
            queries = Queries(found.shape[0], sampled.tokens.data_ptr(), sampled.plan)
        self._compute_layers(x, x.shape[0], positions, plan, queries, embeddings, beat)
        return found

    def embed(
        self,
        x: Tensor,
        count: int,
        token_address: int,
        position_address: int,
        plan: SpanPlan,
        queries: Queries | None,
        beat: Callable[[], None],
    ) -> None:
        """Compute the embeddings and all layers of `count` tokens whose types are 0, on x [at least count, width].

        token_address, position_address  of [count] int64
        queries                          the tokens whose results become the first rows of x; None: all
        beat                             called before each few layers
        """
        embeddings = self._look_up(token_address, position_address, None)
        self._compute_layers(x, count, position_address, plan, queries, embeddings, beat)

    def embedder(self, reduction: Reduction, most: int) -> Embedder | None:
        if not self._tables or reduction not in REDUCTIONS:
            return None
        return Embedder(self, self._library, reduction, most)

    @property
    def width(self) -> int:
        """Return the number of elements of a hidden state."""
        return self._words.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of hidden states."""
        return self._words.dtype

    @property
    def _words(self) -> Tensor:
        _, embeddings = self._recipes
        assert embeddings is not None
        return embeddings.tables[0].table

    def _look_up(self, token_address: int, position_address: int, type_address: int | None) -> int:
        """Point the tables of embeddings at the rows of a step's tokens; return the address of the embeddings."""
        rows = {"tokens": token_address, "positions": position_address, "types": type_address, "none": None}
        for table, index in self._tables:
            table.index = rows[index]
        return self._embeddings

    def _compute_layers(
        self,
        x: Tensor,
        count: int,
        position_address: int,
        plan: SpanPlan,
        queries: Queries | None,
        embeddings: int | None,
        beat: Callable[[], None],
    ) -> None:
        """Compute all layers on the first `count` rows of x, which first become `embeddings` unless these are None."""
        steps = self._attention(plan)
        step = EncoderStep(count, x.shape[1], position_address, ctypes.addressof(steps))
        biases: dict[int, Tensor] = {}
        for layer, bias in self._biased:  # computed from weights, which a load of weights may have changed
            if id(bias) not in biases:
                biases[id(bias)] = bias.table
            table = biases[id(bias)]
            layer.bias, layer.furthest = table.data_ptr(), table.shape[1] // 2
        half, address, first, end = x.dtype is torch.bfloat16, x.data_ptr(), 0, len(self._layers)
        most = max(SLICE, SLICE_ROWS // count)
        while True:
            beat()
            layers, together = ctypes.addressof(self._layers) + first * ctypes.sizeof(Layer), min(most, end - first)
            if queries is not None and first + together == end:
                attended = self._attention(queries.plan)
                step.sampled, step.sampled_tokens = queries.rows, queries.address
                step.sampled_attention = ctypes.addressof(attended)
            self._compute(half, embeddings, layers, together, ctypes.addressof(step), address)
            first, embeddings = first + together, None
            if first == end:
                return

    def _attention(self, plan: SpanPlan) -> ctypes.Array[Any]:
        """Return the addresses of a plan's steps, by reach."""
        assert isinstance(plan, Plan)  # `select.py` chooses the native stack only with native attention
        return self._steps(*[ctypes.addressof(plan.step(reach)) for reach in self._reaches])

    def _describe(self, embeddings: EmbeddingsRecipe) -> None:
        tables = (Table * len(embeddings.tables))(
            *(Table(each.table.data_ptr(), each.table.shape[0]) for each in embeddings.tables)
        )
        self._tables = [(table, each.rows) for table, each in zip(tables, embeddings.tables, strict=True)]
        structure = Embeddings(ctypes.addressof(tables), len(tables), _norm(embeddings.norm))
        self._structures = tables, structure
        self._embeddings = ctypes.addressof(structure)

    def _layer(self, recipe: EncoderLayerRecipe) -> Layer:
        layer = Layer(
            qkv=described(recipe.qkv),
            output=described(recipe.output),
            up=described(recipe.up),
            down=described(recipe.down),
            attention_norm=_norm(recipe.attention_norm),
            mlp_norm=_norm(recipe.mlp_norm),
            normed_first=recipe.normed_first,
            gated=GATED.index(recipe.gated),
            activation=ACTIVATIONS.index(recipe.activation),
            heads=recipe.heads,
            kv_heads=recipe.kv_heads,
            size=recipe.head_size,
            scale=recipe.scale,
            reach=self._reaches.index(recipe.reach),
        )
        if recipe.rope is not None:
            layer.rope, layer.turned = recipe.rope.data_ptr(), 2 * recipe.rope.shape[2]
        if (parts := _divided(recipe.qkv, recipe.heads * recipe.head_size)) is not None:
            layer.q, layer.kv = parts
        return layer


class Embedder:
    """An encoder and the pooling of its texts. Implements families.encoder.TextEmbedder.

    After an encoder's layers the CPU's cache holds their weights, and each call of torch takes 20 to 40 us. So inputs
    and hidden states are in persistent memory, and pooling is two calls of ctypes.
    """

    def __init__(self, stacked: Stacked, library: Library, reduction: Reduction, most: int) -> None:
        """Allocate memory for `most` tokens. reduction: one of REDUCTIONS."""
        self.tokens = np.zeros(most, np.int64)
        self.positions = np.zeros(most, np.int64)
        self._addresses = self.tokens.ctypes.data, self.positions.ctypes.data
        self._hidden = torch.empty((most, stacked.width), dtype=stacked.dtype)
        self._stacked, self._reduction = stacked, reduction
        self._attention, self._pooling = SpanAttention(library), Pooling(library)

    def __call__(
        self, offsets: Sequence[int], beat: Callable[[], None]
    ) -> tuple[npt.NDArray[np.float32], Sequence[bool]]:
        tokens, queries = offsets[-1], None
        plan = self._attention.prepare(SpanBatch(tokens=tokens, offsets=offsets, device=CPU))
        if self._reduction == "mean":
            counts = [end - begin for begin, end in pairwise(offsets)]
        else:
            read = offsets[:-1] if self._reduction == "cls" else [end - 1 for end in offsets[1:]]
            counts = [1] * len(read)
            asked = self._attention.prepare(SpanBatch(tokens=tokens, offsets=offsets, device=CPU, queries=read))
            assert asked.query_address is not None
            queries = Queries(len(read), asked.query_address, asked)
        means = self._pooling.prepare(self._hidden, counts)
        self._stacked.embed(self._hidden, tokens, *self._addresses, plan, queries, beat)
        return means()


def _divided(recipe: ProductRecipe, first: int) -> tuple[Product, Product] | None:
    """Describe the products with a matrix's outputs before `first` and from it on; None: panels do not end there.

    Raises Unaddressable.
    """
    before, after, form = described(recipe), described(recipe), recipe.form
    assert isinstance(form, Addressable)
    if form.reordered or first % PANEL:
        return None
    before.outputs, after.outputs = first, after.outputs - first
    after.weights += first // PANEL * form.panel_bytes
    if recipe.bias is not None:
        after.bias += first * recipe.bias.itemsize
    return before, after


def _norm(recipe: LayerNormRecipe | NormRecipe | None) -> Norm:
    if recipe is None:
        return Norm()
    bias = recipe.bias if isinstance(recipe, LayerNormRecipe) else None
    return Norm(
        weight=recipe.weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        eps=recipe.eps,
        centered=isinstance(recipe, LayerNormRecipe),
    )
