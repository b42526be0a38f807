"""Compute steps of which every token is sampled, with drafts and without, by one call for the whole model.

Inputs and results are in persistent buffers, so a step allocates nothing; views of the results are made once for each
number of tokens. The runner computes all other steps from batches, with equal results.

Behind a step the processor's caches hold weights, so each line of Python takes several times as long as in a loop. So
what can be prepared is prepared before the call, and the samples of rows that ask for no more than the likeliest token
are chosen by a second call.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from infd.kernels.families.stack import StepBuffers, StepMemory
from infd.runner.readouts.readout import Reading
from infd.runner.readouts.sampling import Computed, failure
from infd.runner.sampled import SOUND, Likeliest, SampledPositions

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infd.kernels.families.stack import FusedDecoder
    from infd.runner.expert_loads import LoadSampler
    from infd.runner.instance import Instance
    from infd.runner.readouts.sampling import Sampling
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Span, StepResult

    Array = npt.NDArray[Any]

LOGITS_BYTES: Final = 2**25  # most bytes of logits that are kept; steps with more logits allocate them


def fused_steps(instance: Instance, sampling: Sampling, loads: LoadSampler) -> FusedSteps | None:
    """Return the steps of a model with loaded weights as one call each; None if no kernel computes the whole model."""
    rows, layout = instance.rows, instance.layout
    most = LOGITS_BYTES // (4 * rows.vocab_size)
    # A chunk's pages and positions begin with the chunk, not with the sequence.
    if not most or not instance.model.generates or any(group.chunk is not None for group in layout.groups):
        return None
    buffers = StepBuffers.allocate(most, rows.vocab_size)
    memory = StepMemory(
        rows.state,
        [(group.page_tokens, group.window) for group in layout.groups],
        instance.cache,
        ctypes.addressof(instance.pulse.memory),
    )
    fused = instance.model.fused(memory, buffers)
    return None if fused is None else FusedSteps(instance, fused, buffers, sampling, loads)


class FusedSteps:
    """Computes steps of up to as many tokens as the buffers have."""

    def __init__(
        self, instance: Instance, fused: FusedDecoder, buffers: StepBuffers, sampling: Sampling, loads: LoadSampler
    ) -> None:
        self.rows, self.buffers = instance.rows, buffers
        self._fused, self._sampling, self._loads = fused, sampling, loads
        self._slots, self._regimes, self._params = self.rows.slots, self.rows.regimes, self.rows.sampling
        # As memory views: a call of torch releases the interpreter's lock to another thread, and then waits for it.
        self._tokens, self._length, self._least = self.rows.on_host.cells
        self._outgrown = instance.layout.regimes.outgrown
        self._most = len(buffers.row)
        self._row, self._bound, self._counts, self._shift = (each.numpy().data for each in buffers[:4])
        self._token, self._verdict, self._kept = (each.numpy().data for each in buffers[-3:])
        self._computed: dict[int, Computed] = {}  # by number of tokens

    def forward(self, spans: Sequence[Span]) -> list[Reading] | None:
        """Compute a step; None if it has too many tokens, adapters, or an output other than sampled tokens.

        A step that was issued before the ends of all its sequences were known has no output, and is not computed.
        """
        if len(spans) > self._most:
            return None
        if all(self._ended(span.row) for span in spans):
            return []
        tokens = stages = 0
        for i, span in enumerate(spans):
            row, count = span.row, span.count
            if span.samples != count or span.scores or span.routes or self._slots[row]:
                return None
            tokens += count
            stages |= self._params[row].stages
            self._row[i], self._bound[i], self._counts[i] = row, span.start, count
            if self._outgrown is not None:
                self._shift[i] = self._regimes[row] * self._outgrown
        if tokens > self._most:
            return None
        loads = self._loads.take(tokens)
        samples: Reading = LikeliestSamples(self, spans)
        if stages:
            samples = self._sampling.computed(self._computed.get(tokens) or self._refer(tokens), spans)
        self._fused(len(spans), tokens, None if loads is None else loads.routes)
        return [samples] if loads is None else [samples, loads]

    def keep(self, spans: Sequence[Span], mask: Array | None) -> None:
        """Choose the samples of the last step."""
        self._fused.keep(mask)
        for span in spans:
            self._least[span.row] += 1  # of a span's samples at least the first is kept

    def read(self, spans: Sequence[Span], result: StepResult) -> None:
        """Write the samples of the last step."""
        first = 0
        for i, span in enumerate(spans):
            if (verdict := self._verdict[first]) == SOUND:
                kept = result.accepted[i] = self._kept[i]
                result.tokens += self._token[first : first + kept].tolist()
            else:
                result.failed[i] = failure(verdict)
            first += span.samples

    def _ended(self, row: int) -> bool:
        """Return whether the last known token ends the row's sequence."""
        params, length = self._params[row], self._length[row]
        return length > params.floor and self._tokens[row, length - 1] in params.ends

    def _refer(self, tokens: int) -> Computed:
        """Return the results of steps of that many tokens."""
        row, end, logits, *likeliest = (each[:tokens] for each in self.buffers[4:-1])
        positions = SampledPositions(row, end, row.numpy(), end.numpy())
        found = self._computed[tokens] = Computed(logits, positions, Likeliest(*likeliest))
        return found


class LikeliestSamples(Reading):
    """The samples of a step whose rows have no stages of the sampler: the likeliest tokens that are allowed."""

    def __init__(self, steps: FusedSteps, spans: Sequence[Span]) -> None:
        self._steps = steps
        self._spans = spans

    def sample(self, mask: Array | None) -> None:
        self._steps.keep(self._spans, mask)

    def download(self, staging: Staging) -> None:
        """No-op: the results are on the host."""

    def read(self, result: StepResult) -> None:
        self._steps.read(self._spans, result)
