"""Attention among the tokens of a step, without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class SpanBatch(Struct, frozen=True, kw_only=True):
    """The spans of a step of T tokens: span i is tokens offsets[i]:offsets[i + 1]; later tokens are padding.

    queries  [Q] tokens of spans, ascending, perhaps repeated: q and the results have rows of these tokens alone. On a
             CPU a row has the bits that it has if all tokens are queries. None: all T tokens are
    """

    tokens: int
    offsets: Sequence[int]  # [S + 1]
    device: torch.device
    queries: Sequence[int] | None = None


class Reach(NamedTuple):
    """The keys that a query sees: of its own span, those at most `before` tokens before and `after` tokens after it.

    None  any number. So Reach() is bidirectional attention, Reach(w, w) a window on both sides, Reach(after=0) causal
          attention
    """

    before: int | None = None
    after: int | None = None

    def keys(self, query: int, first: int, end: int) -> tuple[int, int]:
        """Return the first visible key, and the end of the visible keys, of a query of the span [first, end)."""
        begin = first if self.before is None else max(first, query - self.before)
        return begin, end if self.after is None else min(end, query + self.after + 1)


WHOLE: Final = Reach()


def packed(x: Tensor) -> Tensor:
    """Return x [T, heads, D] with each token's elements contiguous, copied only if necessary."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


class SpanPlan(Protocol):
    """A step's attention without a cache, prepared by an implementation."""

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, reach: Reach = WHOLE, bias: Tensor | None = None
    ) -> Tensor:
        """Attend every query to the keys of its own span that `reach` allows.

        q      [Q, H, D]: of SpanBatch.queries, or of all T tokens
        k, v   [T, K, D]; K divides H
        scale  multiplies q·k before softmax, usually D ** -0.5
        bias   [H, 2 * R + 1] float32, added to the scaled score of a key d tokens after the query: bias[h, R + d], with
               d bounded by -R and R
        ->     [Q, H, D] in q's dtype, accumulated in float32; rows of padding are finite, otherwise arbitrary
        """


class SpanAttention(Protocol):
    """Attention without a cache: `prepare` once per step, `run` once per layer."""

    def prepare(self, batch: SpanBatch) -> SpanPlan:
        """Prepare one step."""
