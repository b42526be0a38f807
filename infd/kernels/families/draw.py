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


LONGEST_REPETITION = 1024  # tokens beyond the allowed length that a DRY penalty counts


class Repeats(NamedTuple):
    """The DRY penalties of some rows that have the same sequence breakers.

    multiplier, base  [n] float32
    allowed           [n] int32: least number of repeated tokens for a penalty
    window            [n] int32: number of latest tokens in which repetitions are searched
    heads             [vocab] int32: bit 0 of a token: it is a breaker; bit g + 1: followed by tails[g] it is
    tails             [G, L] int32, -1 after the end of each tail
    """

    multiplier: Tensor
    base: Tensor
    allowed: Tensor
    window: Tensor
    heads: Tensor
    tails: Tensor


class Narrowing(NamedTuple):
    """The rows of a step's logits that are limited and cooled in place, and the rows' sampling parameters.

    rows             [n] int64, ascending: indices into the logits
    largest          [n] float32: each row's largest logit
    seed, position   see Drawing
    temperature      [n] float32: divides the logits before the limits, or after them if `late`
    late             [n] bool: whether the limits are applied to logits that are not divided by the temperature
    top_n_sigma      [n] float32: largest distance from the likeliest token, in standard deviations of the finite
                     logits; 0: no limit
    top_k, top_p, min_p  see Drawing
    typical_p        [n] float32: probability mass of the tokens to keep, those first whose surprisal is nearest to the
                     entropy; 1: no limit
    xtc_probability  [n] float32: chance, by the noise of seed and position, that all tokens but the least likely of
                     those whose probability is at least xtc_threshold are dropped; 0: none is
    xtc_threshold    [n] float32; above 0.5: no token is dropped
    range, exponent  [n] float32: if `late`, the temperature is between temperature - range and temperature + range; the
                     entropy of the kept tokens, relative to the largest possible, to the power `exponent` says where
    """

    rows: Tensor
    largest: Tensor
    seed: Tensor
    position: Tensor
    temperature: Tensor
    late: Tensor
    top_n_sigma: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor
    xtc_probability: Tensor
    xtc_threshold: Tensor
    range: Tensor
    exponent: Tensor


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

    def penalize_repeats(self, logits: Tensor, rows: Tensor, history: History, repeats: Repeats) -> None:
        """Subtract multiplier * base ** (n - allowed) from a token that would continue a repetition of n tokens.

        n is the number of a sequence's last tokens that also precede an earlier occurrence of the token, at most
        allowed + LONGEST_REPETITION, and ends at the last breaker; only n of at least `allowed` are penalized, breakers
        of a single token never.
        """

    def narrow(self, logits: Tensor, narrowing: Narrowing) -> Tensor:
        """Replace float32 logits by (logit - largest) / temperature, or -inf outside the limits; return temperatures.

        Order: temperature unless `late`, top-n-sigma, min-p unless `late`, top-k, typical-p, top-p, min-p if `late`,
        XTC, temperature if `late`. A limit sees only the tokens that the limits before it keep, except that top-p
        precedes typical-p unless `late`. Equally likely tokens are kept or dropped together. A row without a finite
        logit, or with NaN, becomes undefined.

        ->  [n] float32: the temperatures; they differ from narrowing.temperature where `range` is positive
        """

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
