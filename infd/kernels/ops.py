"""One Protocol per kernel family, and the set of implementations chosen for this process.

Letters in shapes: T tokens of a step, packed span after span; S spans; H query
heads; K key-value heads (K divides H); D head size; P pages.

`reference/` defines what each family means; every other implementation is
tested against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from msgspec import Struct
from msgspec.structs import astuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.recipe import LayerRecipe, NormRecipe

    Array = npt.NDArray[Any]
    Upload = Callable[[Array], Tensor]  # copies to the device what the host gathered
    Fill = Callable[[Tensor, Array], None]  # the same, to where it lies on the device, [n]


ALIGNED = 8  # numbers: on a GPU, rows of an adapter's matrices begin at multiples of so many
FLOAT8 = torch.float8_e4m3fn  # of the types of 8-bit floats, the one that caches hold


class KeyValuePages(NamedTuple):
    """The cache of one layer: k and v, each [P + 1, K, page_tokens, row], contiguous. Page 0 is scratch.

    What a row is the attention family says: the D numbers of a head, as they are, or in fewer bits.

    scales  [2, K] float32, of a cache of 8-bit floats: by what keys, and values, of each head are divided when they are
            written, bounded by what the type can hold, and multiplied when they are read; None: by nothing
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None


class AttentionBatch(Struct, kw_only=True):
    """Which cached tokens each span of a step attends to, for one page group.

    Span i owns tokens offsets[i]:offsets[i + 1] of the packed step, at positions
    starts[i] and up; its sequence's pages stand in table[i]. The lists are the
    host's upper bounds, for grids and shapes; the tensors are the truth. Tokens
    behind offsets[-1] are padding: they write nowhere that counts, and their
    output is ignored.
    """

    page_tokens: int
    window: int | None  # how many tokens a query sees, itself included
    starts: list[int]  # [S]
    counts: list[int]  # [S]
    offsets: list[int]  # [S + 1]
    start: Tensor  # [S] int32
    table: Tensor  # [S, pages] int32, by page index; 0 where there is none
    slots: Tensor  # [T] int64: page * page_tokens + offset where each token's k and v go; padding goes to page 0
    upload: Callable[[Array], Tensor] | None = None  # copies to the device what a kernel's host side works out

    def up(self, array: Array) -> Tensor:
        """Copy what was worked out for this step to where its tensors are."""
        if self.upload is not None:
            return self.upload(array)
        return torch.from_numpy(array).to(self.table.device, non_blocking=True)


class AttentionPlan(Protocol):
    """What a family prepared for one step and one page group."""

    @property
    def slots(self) -> Tensor:
        """AttentionBatch's."""

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        """Put k and v, each [T, K, D], into the cache."""

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend every query token to the cached keys of its own sequence, at its own position and before.

        q        [T, H, D]
        scale    multiplies q·k before softmax, usually D ** -0.5
        softcap  bounds the scaled scores: softcap * tanh(score / softcap)
        sinks    [H] float32: the score that each head gives to nothing, so that weights add up to less than 1
        ->       [T, H, D] in q's dtype, accumulated in float32; rows of padding hold anything finite
        """


class LastingPlan(AttentionPlan, Protocol):
    """A plan whose batch's tensors are filled anew before each step, so that a captured step can be replayed.

    It takes no number from them but on the device. The batch's lists are bounds that every step keeps to.
    """

    def refill(self, starts: list[int]) -> None:
        """Be told the host's bounds for the next step, outside what is captured, and before that is replayed."""

    def begin(self) -> None:
        """Issue what the layers of a step share, once its batch is filled; this is captured with them.

        What that is, the first step finds out, layer by layer; so it is not captured.
        """


class Attention(Protocol):
    """Paged attention: `prepare` once per step and group, `run` once per layer."""

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return how many numbers of which type hold a head of `size` numbers of `dtype` in the cache."""

    def prepare(self, batch: AttentionBatch) -> AttentionPlan: ...

    def lasting(self, batch: AttentionBatch) -> LastingPlan | None:
        """Prepare for many steps of one size; None where what is prepared depends on the step."""


LEAST_ROWS: Final = 4  # below as many, torch's matrix products take another path


class Form(Protocol):
    """How one weight matrix [out, in] is kept, and what is computed of it.

    shape, dtype  of `kept`, the one tensor that holds it. Only the form knows what its numbers mean;
                  what is never placed may hold anything.
    least_rows    a row of a product may differ in its last bits where there are fewer; see LEAST_ROWS
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def least_rows(self) -> int: ...

    def rows(self, kept: Tensor, first: int, count: int) -> Tensor | None:
        """Return the part of `kept` that holds these rows as a checkpoint does, [count, in], or None."""

    def place(self, kept: Tensor, first: int, rows: Tensor) -> None:
        """Make [n, in], floating-point and contiguous, the matrix's rows from `first` on."""

    def multiply(self, x: Tensor, kept: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        """Return x [T, in] times the matrix, transposed, plus bias: [T, out] in x's dtype, or float32 if `wide`."""

    def look_up(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Return the rows for tokens [T] int64: [T, in] in the dtype of activations."""


class Matrices(Protocol):
    """The forms of one family: `linear`, the weights of layers; `vocabulary`, the embedding and the head."""

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Form:
        """Return the form of a matrix [outputs, inputs] for activations of `dtype`."""


class Norm(Protocol):
    """RMSNorm over the last axis: x / sqrt(mean(x²) + eps) * (weight + offset), in float32, given back in x's dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual). Both x and residual may be used up."""


class HeadNorm(Protocol):
    """What heads [T, H, D] pass through: each by itself if the weight has D numbers, else all of a token's as one."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def recipe(self) -> NormRecipe: ...


class Rope(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Rotate the first R numbers of every head of q [T, H, D] and k [T, K, D]; leave the others as they are.

        positions    [T] int64
        table        [max_len, 2, R / 2] float32: cosines, then sines
        interleaved  pairs are neighbours (GPT-J style), not i and i + R / 2 (GPT-NeoX style)
        """

    def enter(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        table: Tensor,
        plan: AttentionPlan,
        pages: KeyValuePages,
        *,
        interleaved: bool = False,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
    ) -> Tensor:
        """Norm and rotate q and k, put k and v into the cache, and return q: what a layer does before it attends."""
        q = q if q_norm is None else q_norm(q)
        k = k if k_norm is None else k_norm(k)
        q, k = self(q, k, positions, table, interleaved=interleaved)
        plan.write(k, v, pages)
        return q


class Activation(Protocol):
    def silu_mul(self, x: Tensor) -> Tensor:
        """Return silu(x[..., :n]) * x[..., n:] for x [T, 2n]."""

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        """Return gelu(x[..., :n]) * x[..., n:] for x [T, 2n], with the tanh approximation of gelu."""


class Stacked(Protocol):
    """Decoder layers, computed in one go."""

    def __call__(self, x: Tensor, batch: LayersBatch) -> tuple[Tensor, Tensor]:
        """Take the embeddings x [T, hidden], which are used up; return what models/decoder.py Block does.

        That is, after the last layer: what is still to be added to the residual stream, and the stream.
        Both [W, hidden] of the tokens that are wanted, where the batch says so.
        """


class LayersBatch(Protocol):
    """What layers read of a step: models/base.py Batch."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def attention(self) -> Sequence[AttentionPlan]: ...
    @property
    def cache(self) -> Sequence[KeyValuePages]: ...
    @property
    def beat(self) -> Callable[[], None]: ...
    @property
    def wanted(self) -> WantedLayers | None: ...


class WantedLayers(Protocol):
    """models/base.py Wanted."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def attention(self) -> AttentionPlan: ...


class Stack(Protocol):
    def build(self, layers: Sequence[LayerRecipe]) -> Stacked | None:
        """Return these layers as one, or None where each is to be computed by its own code."""


class Drawing(NamedTuple):
    """Which rows of a step's logits choose at random, and how.

    rows         [n] int64: which rows
    largest      [n] float32: the largest logit of each
    seed         [n, 2] int32: its lower half, then its upper one
    position     [n] int32: of the token to choose, in its sequence
    temperature  [n] float32
    top_k        [n] int32, 0: no limit
    top_p        [n] float32, 1: no limit
    min_p        [n] float32: how likely a token must be, as a share of the likeliest; 0: no limit
    """

    rows: Tensor
    largest: Tensor
    seed: Tensor
    position: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Kept(NamedTuple):
    """What is kept of sequences on the device, a row each.

    tokens  [R, L] int32: every known token
    length  [R] int64: how many are known, at least 1
    tables  [R, groups, pages] int32: page ids by group and page index
    """

    tokens: Tensor
    length: Tensor
    tables: Tensor


class Seats(NamedTuple):
    """What a step reads in which each of N rows computes its last token. Its tensors stay where they are.

    row, bound       [N] int64: given; the position of a row's token is at most its bound
    position, token  [N] int64
    start            [N] int32: the position again
    page_tokens      by page group
    tables           by page group, [N, pages] int32: as far as the row has tokens
    slots            by page group, [N] int64: page * page_tokens + offset of the token
    """

    row: Tensor
    bound: Tensor
    position: Tensor
    start: Tensor
    token: Tensor
    page_tokens: Sequence[int]
    tables: Sequence[Tensor]
    slots: Sequence[Tensor]


class RowKernels(Protocol):
    """Reads and writes what is kept, where only the device knows how far a sequence has come."""

    def seat(self, kept: Kept, seats: Seats) -> None:
        """Put in place what a step reads."""

    def append(self, kept: Kept, row: Tensor, end: Tensor, token: Tensor) -> None:
        """Write the tokens sampled for some rows, each at position `end`; all three [N] int64.

        What a row keeps that is named twice is undefined: only padding's is.
        """


class History(NamedTuple):
    """The known tokens of some rows' sequences.

    tokens    [S, L] int32, by sequence
    sequence  [n] int64: whose are each row's
    prompt    [n] int32: how many of them are the prompt's; the answer's stand behind
    end       [n] int64: how many there are
    longest   what bounds `end`, as the host knows it
    """

    tokens: Tensor
    sequence: Tensor
    prompt: Tensor
    end: Tensor
    longest: int


class Draw(Protocol):
    """From logits [N, vocab] float32 to tokens. `rows` [n] int64, ascending, are those that are changed, in place."""

    def forbid(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Make every token impossible whose bit is 0. bits [n, ceil(vocab / 32)] int32, lowest bit first."""

    def penalize_repetition(self, logits: Tensor, rows: Tensor, history: History, penalty: Tensor) -> None:
        """Divide positive logits of tokens of prompt and answer by penalty [n], and multiply negative ones by it."""

    def penalize_answer(
        self, logits: Tensor, rows: Tensor, history: History, presence: Tensor, frequency: Tensor
    ) -> None:
        """Subtract, for each token of the answer, presence [n] once, and frequency [n] as often as it occurs."""

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest of each row [N, vocab] float32, and the first token [N] int64 that has it.

        A row with a NaN gives NaN, and the first token that is one.
        """

    def __call__(self, logits: Tensor, drawing: Drawing, *, truncated: bool) -> Tensor:
        """Return a token [n] int64 for each of some rows of logits [N, vocab] float32.

        A token is chosen in proportion to exp(logit / temperature), by noise that depends on nothing but seed, position
        and token. Where `truncated`, only among those that the limits leave: min-p first, then top-k of the rest, then
        top-p of that; equally likely tokens stay or go together. Otherwise no limit is looked at.
        """


class LowRank(NamedTuple):
    """What one adapter adds to a product, or to a table's rows: x A B, of low rank. Its scale is in B already.

    On a GPU their rows begin at multiples of ALIGNED numbers, with zeros between, so that several are read at once.

    a      [R, in]: the ranks of all parts, stacked; a table's is [in, R], looked up by token
    parts  one for each of the product's modules that the adapter changes
    """

    a: Tensor
    parts: Sequence[LowRankPart]


class LowRankPart(NamedTuple):
    """One module of a product: b [out, r], where its r ranks begin in `a`, and where its outputs begin in y."""

    b: Tensor
    rank: int
    output: int


class Lora(Protocol):
    """Adapters by row. Rows that no group names are left exactly as they are.

    groups  the rows [n] int64 of each adapter, ascending, and what it adds; no row stands in two
    upload  copies to the device what is worked out for a step; without one, it is copied as it lies
    """

    def add(self, y: Tensor, x: Tensor, groups: Sequence[tuple[Tensor, LowRank]], upload: Upload | None = None) -> None:
        """Add x A^T B^T to y [T, out], in place, x [T, in]; accumulated in x's dtype or a better one.

        y is of x's dtype, which is that of A and B, or float32.
        """

    def add_rows(
        self, y: Tensor, tokens: Tensor, groups: Sequence[tuple[Tensor, LowRank]], upload: Upload | None = None
    ) -> None:
        """Add A[token] B^T to y [T, out], in place, tokens [T] int64."""

    def lasting(self, size: int, device: torch.device) -> LastingLora | None:
        """Return what adds to steps of `size` rows that are captured; None where that cannot be."""


class SlotWeights(Protocol):
    """What the slots of a device add to one product, or to a table's rows, where captured steps find it."""

    def hold(self, held: Sequence[LowRank | None], fill: Fill) -> bool:
        """Take in what the slots hold now, in the same memory; False, and nothing, where ranks have outgrown it."""


class LastingLora(Protocol):
    """Adapters by row, of steps of one size whose tensors are filled anew before each."""

    def weigh(
        self, held: Sequence[LowRank | None], outputs: Sequence[int], *, table: bool, upload: Upload
    ) -> SlotWeights:
        """Return what these slots, the first one being 1, add to one product or table.

        held     one of them, at least, adds something
        outputs  of the product's modules
        """

    def refill(self, slots: Sequence[int], fill: Fill) -> None:
        """Be told which slot each row of the next step wants, 0 for none, before what is captured is replayed."""

    def add(self, y: Tensor, x: Tensor, weights: Any) -> None:
        """As Lora's, with what `weigh` returned."""

    def add_rows(self, y: Tensor, tokens: Tensor, weights: Any) -> None:
        """As Lora's, likewise."""


class Selected(Struct, frozen=True):
    """One row of the selection table: which implementation a family uses, and why not the others."""

    family: str
    chosen: str
    refused: dict[str, str]


@runtime_checkable
class Workspace(Protocol):
    """A family whose kernels compute in memory that stays where it is, beside what each step allocates.

    It holds nothing that outlasts a step, but zeros before the first one, and again when it was given back in a sleep.
    """

    @property
    def workspace_bytes(self) -> int: ...

    def work_in(self, memory: Tensor) -> None:
        """Take that memory, [workspace_bytes] uint8, on the device. Called once, before anything is computed."""


class Ops(Struct, frozen=True, kw_only=True):
    """The chosen implementation of each family, passed to whatever computes."""

    attention: Attention
    linear: Matrices
    vocabulary: Matrices
    norm: Norm
    rope: Rope
    activation: Activation
    stack: Stack
    rows: RowKernels
    draw: Draw
    lora: Lora
    selection: Sequence[Selected]

    def describe(self) -> list[dict[str, Any]]:
        return [{"family": s.family, "chosen": s.chosen, "refused": s.refused} for s in self.selection]

    @property
    def workspaces(self) -> list[Workspace]:
        """Those that want memory to compute in."""
        return [family for family in astuple(self) if isinstance(family, Workspace)]
