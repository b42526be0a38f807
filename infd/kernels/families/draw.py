"""From logits to tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


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
