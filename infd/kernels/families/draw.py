"""Token sampling: penalties, masks, limits, choice of the token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Drawing(NamedTuple):
    """The rows of a step's logits from which tokens are sampled, and the rows' sampling parameters.

    rows         [n] int64: indices into the logits
    largest      [n] float32: each row's largest logit
    seed         [n, 2] int32: lower half, upper half
    position     [n] int32: the sampled token's position in its sequence
    temperature  [n] float32
    top_k        [n] int32; 0: no limit
    top_p        [n] float32; 1: no limit
    min_p        [n] float32: smallest probability relative to the likeliest token's; 0: no limit
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
    """The known tokens of the sequences of some rows.

    tokens    [S, L] int32, by sequence
    sequence  [n] int64: each row's index into tokens
    prompt    [n] int32: length of the prompt; generated tokens follow
    end       [n] int64: length of prompt and generated tokens
    longest   upper bound of `end`, known to the host
    """

    tokens: Tensor
    sequence: Tensor
    prompt: Tensor
    end: Tensor
    longest: int


class Draw(Protocol):
    """Changes logits, and samples tokens from them.

    Penalties and masks change `rows` [n] int64, ascending, of logits [N, vocab] in place. Penalties need float32
    logits. Masks, `largest` and sampling accept any floating-point dtype; `largest` and sampling return the tokens that
    they would return for the logits converted to float32.
    """

    def forbid(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set the logits of tokens whose bit is 0 to -inf. bits [n, ceil(vocab / 32)] int32, lowest bit first."""

    def penalize_repetition(self, logits: Tensor, rows: Tensor, history: History, penalty: Tensor) -> None:
        """For the tokens of a row's sequence, divide positive logits by penalty [n]; multiply negative logits by it."""

    def penalize_answer(
        self, logits: Tensor, rows: Tensor, history: History, presence: Tensor, frequency: Tensor
    ) -> None:
        """Subtract presence [n] + frequency [n] * (number of occurrences) from the logit of each generated token."""

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's largest logit [N] float32, and the first token [N] int64 with this logit.

        For a row with a NaN, returns NaN and the first token with a NaN.
        """

    def __call__(self, logits: Tensor, drawing: Drawing, *, truncated: bool) -> Tensor:
        """Return a sampled token [n] int64 for each of drawing.rows, from logits [N, vocab].

        Probabilities are proportional to exp(logit / temperature); the noise depends on seed, position and token alone.
        If `truncated`, only tokens within the limits are sampled: min-p removes tokens first, then top-k, then top-p;
        equally likely tokens are kept or removed together. If not `truncated`, the limits are not read.
        """
