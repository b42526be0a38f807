"""Select the padded size of each decoding step, and capture sizes before serving and while the device is idle.

Size 1 is captured first, then the largest size, then all others in descending order, so that smaller sizes reuse the
memory of the largest. Sizes are captured before serving for START_S seconds, and then while the device is idle. A
frequent size is captured without waiting for idle time. A size whose capture failed is computed kernel by kernel; after
many steps its capture is tried again, because memory may be free by then.

Steps with adapters launch additional kernels, so they have separate graphs, which are captured after the first adapter
is loaded. A later adapter makes these graphs invalid if it changes a weight matrix that no adapter has changed before,
or if its rank exceeds the rank for which the graphs have room.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import numpy as np

from infd.runner.cuda_graphs.buffers import Buffers, sizes
from infd.runner.cuda_graphs.padded_step import PaddedStep
from infd.runner.faults import free_tensors, lacks_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.runner.cuda_graphs.capture import Graphs
    from infd.runner.instance import Instance
    from infd.runner.readouts.sampling import Computed
    from infd.runner.sampled import Likeliest
    from infd.scheduler.plan import Span

log = logging.getLogger("infd.runner")

START_S = 2.0  # time limit of captures before serving


def decoding(graphs: Graphs, instance: Instance, likeliest: Callable[[Tensor], Likeliest]) -> Decoding | None:
    """Return a Decoding for all sizes; None if the attention kernel cannot be captured."""
    most = instance.rows.scratch
    buffers = Buffers(instance, most)
    plain, adapted = [], []
    for size in sizes(most):
        plans = buffers.plans(size)
        if plans is None:
            log.warning("decoding steps are not captured: CUDA graphs do not support this attention kernel")
            return None
        plain.append(PaddedStep(size, instance, buffers, plans, likeliest))
        if (wanting := instance.adapters.captured(size)) is not None:
            adapted.append(PaddedStep(size, instance, buffers, plans, likeliest, wanting))
    return Decoding(graphs, instance, plain, adapted)


class Decoding:
    """Issues decoding steps, each padded to the next size, and captures sizes."""

    def __init__(
        self,
        graphs: Graphs,
        instance: Instance,
        plain: list[PaddedStep],
        adapted: list[PaddedStep],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without captured sizes.

        plain    steps without adapters, by ascending size
        adapted  steps with adapters, by ascending size; empty if adapters cannot be captured
        """
        self._graphs = graphs
        self._clock = clock
        self._capture_s = 0.0  # seconds spent on all captures
        self._plain, self._adapted = plain, adapted
        self._rows = instance.rows
        self._slots = instance.adapters
        self._generation = self._slots.update_weights()
        self._uncaptured = [plain[0], *plain[:0:-1]]

    def forward(self, spans: Sequence[Span]) -> Computed | None:
        """Issue a step.

        Returns None if a span does not decode or reports experts, or has an adapter that cannot be captured.
        """
        for span in spans:
            if span.count != 1 or span.scores or span.routes or span.samples != 1:
                return None
        row_ids = np.array([span.row for span in spans])
        adapted = self._rows.slots[row_ids].any()
        if adapted and not self._adapted:
            return None
        self._renew()
        by_size = self._adapted if adapted else self._plain
        step = by_size[bisect_left(by_size, len(spans), key=lambda step: step.size)]
        if step.overdue:
            self._capture(step)
        return step.compute(row_ids, [span.start for span in spans])

    def begin(self) -> None:
        """Capture sizes until all are captured, or START_S seconds have passed."""
        began = self._clock()
        while self.capture_next() and self._clock() - began < START_S:
            pass
        captured = sum(step.captured for step in self._plain)
        log.info(
            "decoding steps: %d sizes captured in %.1f s, %d to be captured while idle",
            captured,
            self._clock() - began,
            len(self._uncaptured),
        )

    def capture_next(self) -> bool:
        """Capture the next size; return whether uncaptured sizes remain."""
        self._renew()
        if self._uncaptured:
            self._capture(self._uncaptured[0])
        return bool(self._uncaptured)

    def facts(self) -> dict[str, Any]:
        return {
            "captured": [step.size for step in self._plain if step.captured],
            "with_adapters": [step.size for step in self._adapted if step.captured],
            "to_come": len(self._uncaptured),
            "failed": [step.size for step in self._plain if step.failed],
            "capture_s": round(self._capture_s, 3),
        }

    def _renew(self) -> None:
        """If the graphs with adapters became invalid, free them, and queue their sizes for capture."""
        generation = self._slots.update_weights()
        if generation == self._generation:
            return
        self._generation = generation
        for step in self._adapted:
            step.release()
        plain = [step for step in self._uncaptured if step in self._plain]
        self._uncaptured = plain + [step for step in self._adapted[::-1] if not step.failed]

    def _capture(self, step: PaddedStep) -> None:
        began = self._clock()
        try:
            step.capture(self._graphs)
        except Exception as error:  # of CUDA, torch or a library; steps are then computed without graphs
            # Captured sizes stay valid. If memory ran out, captures of larger sizes would fail too; after any other
            # error, captures of all other sizes would probably fail.
            short, by_size = lacks_memory(error), self._adapted if step in self._adapted else self._plain
            others = [each for each in by_size if not each.captured and (each.size > step.size or not short)]
            for each in {step, *others}:
                each.record_failure()
            free_tensors(error)
            larger = "larger" if short else "other"
            log.warning("steps of %d sequences are not captured, nor are %s steps: %s", step.size, larger, error)
        finally:
            self._capture_s += self._clock() - began
        self._uncaptured = [each for each in self._uncaptured if not (each.captured or each.failed)]
