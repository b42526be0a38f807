"""Compute steps of which every token is sampled, with drafts and without, by one call for the whole model.

Inputs and results are in persistent buffers, so a step allocates nothing; views of the results are made once for each
number of tokens. The runner computes all other steps from batches, with equal results.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from infd.kernels.families.stack import StepBuffers, StepMemory
from infd.runner.readouts.sampling import Computed
from infd.runner.sampled import Likeliest, SampledPositions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.kernels.families.stack import FusedDecoder
    from infd.runner.expert_loads import LoadSampler
    from infd.runner.instance import Instance
    from infd.runner.readouts.readout import Reading
    from infd.runner.readouts.sampling import Sampling
    from infd.scheduler.plan import Span

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
        self._fused, self._buffers, self._sampling, self._loads = fused, buffers, sampling, loads
        rows = instance.rows
        self._slots, self._regimes, self._params = rows.slots, rows.regimes, rows.sampling
        # As arrays: a call of torch releases the interpreter's lock to another thread, and then waits for it.
        self._tokens, self._length = rows.tokens.numpy(), rows.length.numpy()
        self._outgrown = instance.layout.regimes.outgrown
        self._most = len(buffers.row)
        self._row, self._bound, self._counts, self._shift = (each.numpy() for each in buffers[:4])
        self._computed: dict[int, Computed] = {}  # by number of tokens

    def forward(self, spans: Sequence[Span]) -> list[Reading] | None:
        """Compute a step; None if it has too many tokens, adapters, or an output other than sampled tokens.

        A step that was issued before the ends of all its sequences were known has no output, and is not computed.
        """
        if len(spans) > self._most:
            return None
        if all(self._ended(span.row) for span in spans):
            return []
        tokens = 0
        for i, span in enumerate(spans):
            row, count = span.row, span.count
            if span.samples != count or span.scores or span.routes or self._slots[row]:
                return None
            tokens += count
            self._row[i], self._bound[i], self._counts[i] = row, span.start, count
            if self._outgrown is not None:
                self._shift[i] = self._regimes[row] * self._outgrown
        if tokens > self._most:
            return None
        loads = self._loads.take(tokens)
        self._fused(len(spans), tokens, None if loads is None else loads.routes)
        computed = self._computed.get(tokens) or self._refer(tokens)
        samples = self._sampling.computed(computed, spans)
        return [samples] if loads is None else [samples, loads]

    def _ended(self, row: int) -> bool:
        """Return whether the last known token ends the row's sequence."""
        params, length = self._params[row], self._length[row]
        return length > params.floor and int(self._tokens[row, length - 1]) in params.ends

    def _refer(self, tokens: int) -> Computed:
        """Return the results of steps of that many tokens."""
        row, end, logits, *likeliest = (each[:tokens] for each in self._buffers[4:])
        positions = SampledPositions(row, end, row.numpy(), end.numpy())
        found = self._computed[tokens] = Computed(logits, positions, Likeliest(*likeliest))
        return found
