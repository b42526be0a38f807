"""Compute decoding steps padded to one size, captured or kernel by kernel.

The graph of a small step includes the output head, and appends each row's likeliest token to `Rows`, so that an
all-greedy step needs no further launch. In other steps the sampler overwrites the tokens. The head of a larger step is
not captured, because its logits would occupy much memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from infd.models.base import Batch
from infd.runner.readouts.sampling import Computed
from infd.runner.sampled import SampledPositions

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.attention import CapturedPlan
    from infd.runner.adapters import CapturedRows
    from infd.runner.cuda_graphs.buffers import Buffers
    from infd.runner.cuda_graphs.capture import Graphs
    from infd.runner.instance import Instance
    from infd.runner.sampled import Likeliest

    Array = npt.NDArray[Any]

PATIENCE = 8  # after this many uncaptured steps of a size, the next step captures the size first
RETRY = 4096  # number of uncaptured steps between a failed capture and the next attempt
GROWTH = 4  # factor by which each further failure increases RETRY


class PaddedStep:
    """Computes decoding steps of up to `size` rows, padded to `size`, captured or kernel by kernel."""

    def __init__(
        self,
        size: int,
        instance: Instance,
        buffers: Buffers,
        plans: list[CapturedPlan],
        likeliest: Callable[[Tensor], Likeliest],
        adapters: CapturedRows | None = None,
    ) -> None:
        rows = instance.rows
        self.size = size
        self._find_likeliest = likeliest
        self._plans = plans
        self._adapters = adapters
        self._rows = rows
        self._cache = instance.cache
        self._model = instance.model
        self._beat = instance.pulse.beat
        self._shift = instance.layout.regimes.outgrown
        self._sent = buffers.sent[: (2 if self._shift is None else 3) * size]
        self._inputs = buffers.inputs(size)
        self._padding = np.array([rows.scratch] * size + [0] * (len(self._sent) - size))
        self._logits = buffers.logits[:size] if size <= len(buffers.logits) else None
        self._hidden: Tensor | None = None
        self._ends: Tensor | None = None
        self._likeliest: Likeliest | None = None
        self._replay: Callable[[], None] | None = None
        self._waiting = 0  # steps computed kernel by kernel since `release` was last called
        self._failures = 0

    @property
    def captured(self) -> bool:
        return self._replay is not None

    @property
    def failed(self) -> bool:
        """Whether a failure was recorded since the last capture of this size."""
        return self._failures > 0

    @property
    def overdue(self) -> bool:
        """Whether so many steps were computed uncaptured that the size is captured before the next step."""
        patience = RETRY * GROWTH ** (self._failures - 1) if self._failures else PATIENCE
        return not self.captured and self._waiting >= patience

    def compute(self, row_ids: Array, starts: list[int]) -> Computed:
        """Issue a step. starts: upper bound of the position of each row's last known token."""
        bounds = self._fill(row_ids, starts)
        if self._replay is None:
            self._waiting += 1
            self._work()
        else:
            self._replay()
        assert self._hidden is not None
        assert self._ends is not None
        count = len(starts)
        positions = SampledPositions(self._inputs.row[:count], self._ends[:count], row_ids, bounds + 1)
        if self._logits is None:
            return Computed(self._model.logits(self._hidden, self._adapters)[:count], positions)
        assert self._likeliest is not None
        return Computed(self._logits[:count], positions, self._likeliest.first(count))

    def capture(self, graphs: Graphs) -> None:
        """Capture the work of a step in which every row is the scratch row."""
        self._fill(np.empty(0, np.int64), [])
        self._replay = graphs.capture(self._work)
        self._failures = 0

    def release(self) -> None:
        """Free the graph, and the memory of its outputs."""
        self._replay = self._hidden = self._ends = self._likeliest = None
        self._waiting = 0

    def record_failure(self) -> None:
        """Free the graph, and record that the capture of this or of a similar size failed.

        Each failure delays the next attempt; see `overdue`.
        """
        self.release()
        self._failures += 1

    def _fill(self, row_ids: Array, starts: list[int]) -> Array:
        """Upload a step's inputs; return `starts` as an array."""
        count, padding = len(starts), [0] * (self.size - len(starts))
        sent = self._padding.copy()
        sent[:count] = row_ids
        bounds = sent[self.size : self.size + count]
        bounds[:] = starts
        if self._shift is not None:
            sent[2 * self.size : 2 * self.size + count] = self._rows.regimes[row_ids] * self._shift
        self._rows.staging.fill(self._sent, sent)
        for plan in self._plans:
            plan.refill(starts + padding)
        if self._adapters is not None:
            self._adapters.refill(self._rows.slots[row_ids].tolist() + padding)
        return bounds

    def _work(self) -> None:
        """Issue a step's work. A graph repeats the work, so the work must not depend on host values that change."""
        self._rows.gather_inputs(self._inputs)
        for plan in self._plans:
            plan.begin()
        positions = self._inputs.position
        if self._shift is not None:
            positions = positions + self._sent[2 * self.size :]
        batch = Batch(
            tokens=self._inputs.token,
            positions=positions,
            attention=self._plans,
            cache=self._cache,
            beat=self._beat,
            adapters=self._adapters,
        )
        self._hidden = self._model.forward(batch)
        self._ends = self._inputs.position + 1
        if self._logits is not None:
            self._logits.copy_(self._model.logits(self._hidden, self._adapters))
            self._likeliest = self._find_likeliest(self._logits)
            self._rows.append(self._inputs.row, self._ends, self._likeliest.tokens)
