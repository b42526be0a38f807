"""The positions that a step samples, and the tokens sampled there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct

from infd.runner.sampling.scores import Scores

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from infd.runner.staging import Staging

    Array = npt.NDArray[Any]

SOUND, NOT_FINITE, NOTHING_ALLOWED = range(3)  # verdicts


class SampledPositions(Struct):
    """The N sampled positions of a step, in the plan's order.

    rows, ends          [N] int64 on the device: row and position of the token to sample
    row_ids, positions  [N] on the host: row, and upper bound of the position, of the token to sample
    """

    rows: Tensor
    ends: Tensor
    row_ids: Array
    positions: Array

    def select(self, subset: Array, index: Tensor) -> SampledPositions:
        """Select sampled positions.

        subset  [n] indices, on the host
        index   a copy of `subset` on the device
        """
        rows, ends = self.rows.index_select(0, index), self.ends.index_select(0, index)
        return SampledPositions(rows, ends, self.row_ids[subset], self.positions[subset])


class Likeliest(NamedTuple):
    """The likeliest token of each of N rows of logits.

    largest  [N] float32: the token's logit
    tokens   [N] int64
    verdict  [N] int64: SOUND or NOT_FINITE; after masking also NOTHING_ALLOWED
    """

    largest: Tensor
    tokens: Tensor
    verdict: Tensor

    def first(self, count: int) -> Likeliest:
        """Return the likeliest tokens of the first `count` rows."""
        return Likeliest(*(values[:count] for values in self))


class Adapted(NamedTuple):
    """The new states of the rows with mirostat.

    at  [m] indices into the sampled positions, on the host
    mu  [m] float32
    """

    at: list[int]
    mu: Tensor


class Sampled(Struct):
    """A step's sampled tokens.

    tokens   [N] int64
    verdict  [N] int64: SOUND, NOT_FINITE or NOTHING_ALLOWED; the token is valid only if SOUND
    kept     [S] int64: number of samples kept of each span, the first ones; None: one of each span. On the host if the
             host has chosen the tokens
    scored   positions with requested log-probabilities: (index into N, number of likeliest tokens to report)
    scores   log-probabilities, one row per entry of `scored`; None if `scored` is empty
    adapted  None: no row has mirostat
    """

    tokens: Tensor
    verdict: Tensor
    kept: Tensor | Array | None
    scored: list[tuple[int, int]]
    scores: Scores | None
    adapted: Adapted | None = None

    def download(self, staging: Staging) -> Sampled:
        """Start copies to the host; return the samples with the copies."""
        values = None if self.scores is None else Scores(*map(staging.down, self.scores))
        kept = self.kept if self.kept is None or isinstance(self.kept, np.ndarray) else staging.down(self.kept)
        adapted = None if self.adapted is None else Adapted(self.adapted.at, staging.down(self.adapted.mu))
        return Sampled(staging.down(self.tokens), staging.down(self.verdict), kept, self.scored, values, adapted)
