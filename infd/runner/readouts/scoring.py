"""The readout that scores prompt tokens.

The logits of a whole prompt would occupy gigabytes, so logits are computed and scored in blocks of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from msgspec import Struct

from infd.errors import Fault, RequestFailed
from infd.kernels.families.matrices import LEAST_ROWS
from infd.request import Score, TokenLogprobs, pick
from infd.runner.readouts.readout import Reading, Readout
from infd.runner.sampling import scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.runner.instance import Instance
    from infd.runner.readouts.readout import Selection
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Join, Span, StepResult

    Array = npt.NDArray[Any]

BLOCK = 256  # rows of logits computed at once: about 150 MiB of float32 for a vocabulary of 150,000 tokens
NOT_FINITE: Final = Fault.of(RequestFailed("the model's logits are not finite"))


class ScoredSpan(Struct, frozen=True):
    """A span with scored prompt tokens.

    span    index in the plan
    tokens  number of scored tokens; the successor of each of the span's first `tokens` tokens is scored
    top     number of likeliest tokens to report for each scored token
    """

    span: int
    tokens: int
    top: int


class Scored(Reading):
    """The scores of M tokens of one step, span after span.

    finite  [M] bool: whether the row's largest logit is finite
    rank    [M] int64: the token's rank by probability; the likeliest token's rank is 1
    """

    def __init__(self, spans: Sequence[ScoredSpan], finite: Tensor, rank: Tensor, values: scores.Scores) -> None:
        self._spans = spans
        self._finite = finite
        self._rank = rank
        self._scores = values

    def sample(self, mask: Array | None) -> None:
        """No-op: scores do not depend on the mask."""

    def download(self, staging: Staging) -> None:
        self._finite, self._rank = staging.down(self._finite), staging.down(self._rank)
        self._scores = scores.Scores(*map(staging.down, self._scores))

    def read(self, result: StepResult) -> None:
        finite, rank = self._finite.tolist(), self._rank.tolist()
        chosen, top, top_ids = (values.tolist() for values in self._scores)
        end = 0
        for scored in self._spans:
            begin, end = end, end + scored.tokens
            if not all(finite[begin:end]):
                result.failed[scored.span] = NOT_FINITE
                continue
            result.prompt_logprobs[scored.span] = [
                TokenLogprobs(chosen[n], tuple(top_ids[n][: scored.top]), tuple(top[n][: scored.top]), rank[n])
                for n in range(begin, end)
            ]


class Scoring(Readout):
    """Computes `request.Score`."""

    narrows = False

    def __init__(self, instance: Instance) -> None:
        self._model = instance.model
        self._rows = instance.rows
        self._pulse = instance.pulse
        self._top = [0] * (instance.rows.scratch + 1)  # by row: top of the sequence's Score

    def stage(self, joins: Sequence[Join]) -> None:
        for join in joins:
            score = pick(Score, join.wants)
            self._top[join.row] = 0 if score is None else score.top

    def select(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[int]:
        return [token for i, span in enumerate(spans) for token in range(offsets[i], offsets[i] + span.scores)]

    def compute(self, spans: Sequence[Span], selection: Selection, hidden: Tensor) -> Scored:
        scored = [ScoredSpan(i, span.scores, self._top[span.row]) for i, span in enumerate(spans) if span.scores]
        targets = self._rows.tokens[selection.rows, selection.positions + 1].to(torch.int64)
        most = min(max(each.top for each in scored), self._model.vocab_size)
        needed = self._model.least_rows if selection.adapters is None else LEAST_ROWS
        finite, rank, parts = [], [], []
        blocks = zip(torch.split(selection.of(hidden), BLOCK), torch.split(targets, BLOCK), strict=True)
        for number, (block, target) in enumerate(blocks):
            count = len(block)
            padding = block[:1].expand(max(0, needed - count), -1)
            adapters = selection.adapters
            adapted = None if adapters is None else adapters.at(number * BLOCK + np.arange(count))
            logits = self._model.logits(torch.cat((block, padding)), adapted)[:count].float()
            finite.append(logits.amax(-1).isfinite())
            rank.append(scores.rank(logits, target))
            parts.append(scores.score(logits, target, most))
            self._pulse.beat()
        values = scores.Scores(*map(torch.cat, zip(*parts, strict=True)))
        return Scored(scored, torch.cat(finite), torch.cat(rank), values)
