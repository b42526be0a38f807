"""Compute a step: gather its batch, run the model, compute the readouts.

A step is issued in two halves. `forward` computes logits on the device; `sample` samples tokens, once the mask is
known. On a GPU both halves only launch kernels, and `read` waits for the result.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from infd.runner.batch import RowBatches
from infd.runner.cuda_graphs.decoding import decoding
from infd.runner.expert_loads import LoadSampler
from infd.runner.faults import diagnose
from infd.runner.fused import fused_steps
from infd.runner.fused_texts import fused_texts
from infd.runner.readouts.pooling import TextPooling, TokenPooling
from infd.runner.readouts.routing import Routing
from infd.runner.readouts.sampling import Sampling
from infd.runner.readouts.scoring import Scoring
from infd.runner.sampler import Sampler
from infd.runner.texts import Texts
from infd.scheduler.plan import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from infd.runner.batch import Batches
    from infd.runner.cuda_graphs.capture import Graphs
    from infd.runner.fused import FusedSteps
    from infd.runner.fused_texts import FusedTexts
    from infd.runner.instance import Instance
    from infd.runner.readouts.readout import Reading, Readout
    from infd.runner.staging import StagingBuffer
    from infd.scheduler.plan import Span, StepPlan

    Array = npt.NDArray[Any]


class Forwarded(Struct):
    """A step whose forward pass is issued, and the output of each of its readouts."""

    plan: StepPlan
    readings: Sequence[Reading]


class PendingResult(Struct):
    """An issued step, whose result the device computes and copies to the host.

    buffer  pinned memory to which the results are copied; None if nothing is copied
    """

    plan: StepPlan
    readings: Sequence[Reading]
    buffer: StagingBuffer | None = None


class Runner:
    """Computes the steps of one model on one device. Used on the device thread only.

    decoding  computes decoding steps with CUDA graphs; None: decoding steps are computed like other steps
    """

    def __init__(
        self,
        instance: Instance,
        graphs: Graphs | None = None,
    ) -> None:
        """Build the readouts. graphs: captures decoding steps; None: no step is captured."""
        self.instance = instance
        self.adapters = instance.adapters
        self._model = instance.model
        self._rows = instance.rows
        self._staging = instance.rows.staging
        self._pulse = instance.pulse
        sampler = Sampler(instance.rows, instance.ops.draw)
        self._sampling = Sampling(instance.model, sampler)
        self.decoding = None
        if graphs is not None and instance.model.generates:
            self.decoding = decoding(graphs, instance, sampler.likeliest)
        self._readouts = _readouts(instance, self._sampling)
        self._loads = LoadSampler(instance.model.experts)
        self._batches: Batches
        self._fuse: Callable[[], FusedSteps | FusedTexts | None]
        if instance.layout.groups:
            self._batches = RowBatches(instance)
            self._fuse = partial(fused_steps, instance, self._sampling, self._loads)
        else:
            texts = self._batches = Texts(instance)
            self._fuse = partial(fused_texts, instance, texts)

    @property
    def overlaps(self) -> bool:
        """Whether `forward` and `sample` return while the device still computes."""
        return self._staging.waits

    def active(self) -> AbstractContextManager[Any]:
        """Return the context in which the device thread calls this object's other methods."""
        return torch.inference_mode()

    def forward(self, plan: StepPlan) -> Forwarded:
        """Load the plan's adapters, write its rows, and issue its forward pass."""
        self._staging.begin()
        self.adapters.fill(plan.loads)
        self._batches.stage(plan)
        for readout in self._readouts:
            readout.stage(plan.joins)
        readings = self._compute_at_once(plan.spans)
        if readings is None:
            readings = self._compute(plan)
        self._pulse.beat()
        return Forwarded(plan, readings)

    @cached_property
    def fused(self) -> FusedSteps | FusedTexts | None:
        """Made by the first step, because it needs loaded weights."""
        return self._fuse()

    def _compute_at_once(self, spans: Sequence[Span]) -> list[Reading] | None:
        """Issue a step by a graph, or by few native calls; None if neither computes it."""
        if self.decoding is None:
            return None if self.fused is None else self.fused.forward(spans)
        computed = self.decoding.forward(spans)
        return None if computed is None else [self._sampling.computed(computed, spans)]

    def _compute(self, plan: StepPlan) -> list[Reading]:
        """Issue a step's batch, and its readouts."""
        gathered = self._batches.gather(plan.spans, self._readouts)
        gathered.batch.beat = self._pulse.beat
        reading = [
            (readout, selection)
            for readout, selection in zip(self._readouts, gathered.selections, strict=True)
            if selection is not None
        ]
        for readout, _ in reading:
            readout.tap(gathered.batch)
        loads = self._loads.tap(gathered.batch, plan.tokens)
        hidden = self._model.forward(gathered.batch)
        return [*(readout.compute(plan.spans, selection, hidden) for readout, selection in reading), *loads]

    def sample(self, forwarded: Forwarded, mask: Array | None = None) -> PendingResult:
        """Issue the sampling, and the copies of the results to the host.

        mask  int32 [sampled positions, ceil(vocab / 32)] bitmask of the allowed tokens; None: all tokens
        """
        for reading in forwarded.readings:
            reading.sample(mask)
        pending = PendingResult(forwarded.plan, forwarded.readings)
        if self.overlaps:
            for reading in pending.readings:
                reading.download(self._staging)
            # The host waits even for a step without results: the steps of a long prompt must not queue on the device.
            pending.buffer = self._staging.end()
        self._pulse.beat()
        return pending

    def prepare_to_wait(self) -> None:
        """Set the calling thread's device and timer slack. Called before the thread's first wait."""
        self._staging.prepare_to_wait()

    def spin(self, seconds: float) -> None:
        """Make `wait` poll the device for `seconds`, before the thread sleeps until the device's interrupt."""
        self._staging.spin_s = seconds

    def wait(self, pending: PendingResult) -> None:
        """Wait until the device has computed a step. May be called on any thread."""
        if pending.buffer is not None:
            self._staging.wait(pending.buffer)

    def read(self, pending: PendingResult) -> StepResult:
        """Wait for a step, and return its result."""
        self.wait(pending)
        result = StepResult([0] * len(pending.plan.spans), [])
        for reading in pending.readings:
            reading.read(result)
        if pending.buffer is not None:
            self._staging.release(pending.buffer)
        return result

    def begin(self) -> None:
        """Capture decoding steps before serving, within the time limit of `Decoding.begin`."""
        if self.decoding is not None:
            self.decoding.begin()

    def idle(self) -> bool:
        """Capture one more size of decoding steps; return whether uncaptured sizes remain."""
        return self.decoding is not None and self.decoding.capture_next()

    def facts(self) -> dict[str, Any]:
        """Return facts about captured steps, for Executor.describe."""
        return {} if self.decoding is None else {"graphs": self.decoding.facts()}

    def diagnose(self, error: Exception) -> Exception:
        """Return StepTooLarge if memory ran out, DeviceLost if the device became unusable, else `error`."""
        return diagnose(error, self._rows.device)


def _readouts(instance: Instance, sampling: Sampling) -> tuple[Readout, ...]:
    """Return the readouts of the wants that the model supports.

    Sampling is last, because it skips spans for which another readout has recorded a failure.
    """
    pools = (TokenPooling(instance), TextPooling(instance)) if instance.pooling.tasks else ()
    if not instance.model.generates:
        return pools
    experts = instance.model.experts
    routing = () if experts is None else (Routing(experts),)
    return (*pools, *routing, Scoring(instance), sampling)
