"""The readout that samples tokens: the token after a span, and with drafts the tokens that they anticipate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from infd.errors import Fault, NothingAllowed
from infd.request import TokenLogprobs
from infd.runner.readouts.readout import Reading, Readout
from infd.runner.readouts.scoring import NOT_FINITE
from infd.runner.sampled import NOTHING_ALLOWED, SOUND, SampledPositions

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.models.base import Model
    from infd.runner.readouts.readout import Selection
    from infd.runner.sampled import Likeliest, Sampled
    from infd.runner.sampler import Sampler
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Join, Span, StepResult

    Array = npt.NDArray[Any]

_NOTHING_ALLOWED: Final = Fault.of(NothingAllowed())


def failure(verdict: int) -> Fault:
    """Return why a row whose verdict is not SOUND fails."""
    return _NOTHING_ALLOWED if verdict == NOTHING_ALLOWED else NOT_FINITE


class Computed(NamedTuple):
    """An issued step of which every token is sampled.

    logits     [N, vocab]
    positions  the N sampled positions
    likeliest  the rows' likeliest tokens, appended to `Rows` if each span has one token; None: neither is done
    """

    logits: Tensor
    positions: SampledPositions
    likeliest: Likeliest | None = None


class Samples(Reading):
    """The samples of one step.

    spans      indices of the S spans that sample, into the plan's spans
    samples    [S] number of sampled positions of each of these spans, N together; None: one of each
    logits     [N, vocab]; freed by `sample`
    likeliest  see Computed
    """

    def __init__(
        self,
        sampler: Sampler,
        spans: Sequence[int],
        logits: Tensor,
        positions: SampledPositions,
        likeliest: Likeliest | None = None,
        samples: Array | None = None,
    ) -> None:
        self._sampler = sampler
        self._spans = spans
        self._samples = samples
        self._unsampled: tuple[Tensor, SampledPositions, Likeliest | None] | None = logits, positions, likeliest
        self._sampled: Sampled | None = None

    def sample(self, mask: Array | None) -> None:
        """Sample the tokens.

        mask  int32 [N, ceil(vocab / 32)] bitmask of the allowed tokens; None: all tokens
        """
        assert self._unsampled is not None
        (logits, positions, likeliest), self._unsampled = self._unsampled, None
        self._sampled = self._sampler(logits, positions, mask, likeliest, self._samples)

    def download(self, staging: Staging) -> None:
        assert self._sampled is not None
        self._sampled = self._sampled.download(staging)

    def read(self, result: StepResult) -> None:
        """Write the tokens, except those of spans for which another readout has recorded a failure."""
        sampled = self._sampled
        assert sampled is not None
        tokens, verdicts = sampled.tokens.tolist(), sampled.verdict.tolist()
        samples = [1] * len(self._spans) if self._samples is None else self._samples.tolist()
        kept = samples if sampled.kept is None else sampled.kept.tolist()
        end, first = 0, {}
        for i, most, count in zip(self._spans, samples, kept, strict=True):
            at, end = end, end + most
            first[i] = at
            if i in result.failed:
                continue
            if verdicts[at] == SOUND:
                result.accepted[i] = count
                result.tokens += tokens[at : at + count]
            else:
                result.failed[i] = failure(verdicts[at])
        if sampled.adapted is not None:
            owner = np.repeat(self._spans, samples)
            for at, mu in zip(sampled.adapted.at, sampled.adapted.mu.tolist(), strict=True):
                result.mu[int(owner[at])] = mu
        if sampled.scores is not None:
            chosen, top, top_ids = (values.tolist() for values in sampled.scores)
            owner = np.repeat(self._spans, samples)
            for n, (at, most) in enumerate(sampled.scored):
                i = int(owner[at])
                if at - first[i] < result.accepted[i]:
                    likely = TokenLogprobs(chosen[n], tuple(top_ids[n][:most]), tuple(top[n][:most]))
                    result.logprobs.setdefault(i, []).append(likely)


class Sampling(Readout):
    """Computes `request.Generate`. `Rows` stores the sampling parameters on the device."""

    narrows = True

    def __init__(self, model: Model, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler

    def stage(self, joins: Sequence[Join]) -> None:
        """No-op: `Rows.stage` has already stored the parameters."""

    def select(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[int]:
        return [at for i, span in enumerate(spans) for at in range(offsets[i + 1] - span.samples, offsets[i + 1])]

    def compute(self, spans: Sequence[Span], selection: Selection, hidden: Tensor) -> Samples:
        sampling = [i for i, span in enumerate(spans) if span.samples]
        samples = np.array([spans[i].samples for i in sampling])
        first = [spans[i].start + spans[i].count - spans[i].samples + 1 for i in sampling]
        count, before = int(samples.sum()), np.cumsum(samples) - samples
        positions = SampledPositions(
            selection.rows[:count],
            selection.positions[:count] + 1,
            np.repeat([spans[i].row for i in sampling], samples),
            np.repeat(first - before, samples) + np.arange(count),
        )
        logits = self._model.logits(selection.of(hidden), selection.adapters)[:count]
        single = count == len(sampling)
        return Samples(self._sampler, sampling, logits, positions, samples=None if single else samples)

    def computed(self, computed: Computed, spans: Sequence[Span]) -> Samples:
        """Return the Samples of a step that `cuda_graphs.decoding` or `fused` issued."""
        single = len(computed.positions.row_ids) == len(spans)
        samples = None if single else np.array([span.samples for span in spans])
        return Samples(self._sampler, range(len(spans)), *computed, samples=samples)
