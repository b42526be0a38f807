"""Compute a step: gather what its spans need, run the model, read out what is wanted.

Two halves. `forward` leaves logits on the device; `sample` turns them into
tokens once the mask is known. On a GPU both only issue work, and `read` waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from infd.runner.batch import gather
from infd.runner.faults import diagnose
from infd.runner.graphs import decoding
from infd.runner.readouts.sampling import Sampling
from infd.runner.readouts.scoring import Scoring
from infd.runner.sampler import Sampler
from infd.scheduler.plan import StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from infd.runner.graphs import Graphs
    from infd.runner.instance import Instance
    from infd.runner.readouts.readout import Reading, Readout
    from infd.runner.staging import Part
    from infd.scheduler.plan import StepPlan

    Array = npt.NDArray[Any]


class Forwarded(Struct):
    """A step whose forward pass is issued, and what its readouts compute."""

    plan: StepPlan
    readings: Sequence[Reading]


class Landing(Struct):
    """A step of which all is issued: its results are on their way to the host, in memory of this step alone."""

    plan: StepPlan
    readings: Sequence[Reading]
    part: Part | None = None


class Runner:
    """One model on one device, with its cache and its rows. Lives on the device thread.

    decoding  computes steps that only decode; None: they are computed like any other
    """

    def __init__(
        self,
        instance: Instance,
        graphs: Graphs | None = None,
    ) -> None:
        """graphs: captures steps that only decode; without it, every step is computed kernel by kernel."""
        self.instance = instance
        self.adapters = instance.adapters
        self._model = instance.model
        self._rows = instance.rows
        self._staging = instance.rows.staging
        self._pulse = instance.pulse
        sampler = Sampler(instance.rows, instance.ops.draw)
        self._sampling = Sampling(instance.model, sampler)
        self.decoding = None if graphs is None else decoding(graphs, instance, sampler.likeliest)
        # Sampling is last: it yields no token of a span that another readout has failed.
        self._readouts: tuple[Readout, ...] = (Scoring(instance), self._sampling)

    @property
    def overlaps(self) -> bool:
        """Whether work is only issued, and runs while the host goes on."""
        return self._staging.waits

    def active(self) -> AbstractContextManager[Any]:
        """Return the context in which a thread may call the methods below."""
        return torch.inference_mode()

    def forward(self, plan: StepPlan) -> Forwarded:
        """Issue the forward pass."""
        self._staging.begin()
        self.adapters.fill(plan.loads)
        self._rows.stage(plan.joins, plan.grants)
        for readout in self._readouts:
            readout.stage(plan.joins)
        if self.decoding is not None and (computed := self.decoding.forward(plan.spans)) is not None:
            readings: list[Reading] = [self._sampling.captured(computed, len(plan.spans))]
        else:
            readings = self._compute(plan)
        self._pulse.beat()
        return Forwarded(plan, readings)

    def _compute(self, plan: StepPlan) -> list[Reading]:
        """Issue a forward pass kernel by kernel, and all readouts."""
        gathered = gather(plan.spans, self.instance, self._readouts)
        gathered.batch.beat = self._pulse.beat
        hidden = self._model.forward(gathered.batch)
        return [
            readout.compute(plan.spans, selection, hidden)
            for readout, selection in zip(self._readouts, gathered.selections, strict=True)
            if selection is not None
        ]

    def sample(self, forwarded: Forwarded, mask: Array | None = None) -> Landing:
        """Issue the sampling. mask: int32 [spans of the plan that sample, ceil(vocab / 32)]."""
        for reading in forwarded.readings:
            reading.sample(mask)
        landing = Landing(forwarded.plan, forwarded.readings)
        if self.overlaps:
            for reading in landing.readings:
                reading.download(self._staging)
            # Waited for even if nothing is downloaded: or all steps of a long prompt would be issued, and queue there.
            landing.part = self._staging.end()
        self._pulse.beat()
        return landing

    def attend(self) -> None:
        """Prepare a thread that is to wait for the device."""
        self._staging.attend()

    def spin(self, seconds: float) -> None:
        """Have waits poll the device for so long before they sleep until its interrupt."""
        self._staging.spin_s = seconds

    def wait(self, landing: Landing) -> None:
        """Wait until the device has computed a step. Any thread may call this; torch is not needed."""
        if landing.part is not None:
            self._staging.wait(landing.part)

    def read(self, landing: Landing) -> StepResult:
        """Wait for a step's results, and return them."""
        self.wait(landing)
        result = StepResult([0] * len(landing.plan.spans), [])
        for reading in landing.readings:
            reading.read(result)
        if landing.part is not None:
            self._staging.release(landing.part)
        return result

    def begin(self) -> None:
        """Do ahead, before anybody is served, what `idle` would do later, as far as the start can wait for it."""
        if self.decoding is not None:
            self.decoding.begin()

    def idle(self) -> bool:
        """Use a moment in which nothing else is to do; return whether there is more that would take one."""
        return self.decoding is not None and self.decoding.settle()

    def facts(self) -> dict[str, Any]:
        """Return what operators may want to know of how steps are computed."""
        return {} if self.decoding is None else {"graphs": self.decoding.facts()}

    def diagnose(self, error: Exception) -> Exception:
        """Return what a step's error means: itself, StepTooLarge, or DeviceLost if it has left the device unusable."""
        return diagnose(error, self._rows.device)
