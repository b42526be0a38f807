"""Compute a step: gather what its spans need, run the model, sample.

Two halves. `forward` leaves logits on the device; `sample` turns them into
tokens once the mask is known. On a GPU both only issue work, and `read` waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from msgspec import Struct

from infd.errors import Fault, NothingAllowed, RequestFailed
from infd.request import TokenLogprobs
from infd.runner.batch import gather
from infd.runner.faults import diagnose
from infd.runner.graphs import decoding
from infd.runner.sampler import NOTHING_ALLOWED, SOUND, Asking, Sampler
from infd.runner.scoring import Asked, score
from infd.scheduler.plan import StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt
    from torch import Tensor

    from infd.runner.graphs import Graphs
    from infd.runner.instance import Instance
    from infd.runner.sampler import Likeliest, Sampled
    from infd.runner.scoring import Scored
    from infd.runner.staging import Part
    from infd.scheduler.plan import StepPlan

    Array = npt.NDArray[Any]

_NOT_FINITE: Final = Fault.of(RequestFailed("the model's logits are not finite"))
_NOTHING_ALLOWED: Final = Fault.of(NothingAllowed())


class Forwarded(Struct):
    """A step whose logits are on their way, and whose prompts are scored.

    sampling  indices of the spans that sample, into the plan's spans
    appended  see graphs.Computed
    """

    plan: StepPlan
    sampling: Sequence[int]
    logits: Tensor | None = None
    asking: Asking | None = None
    scored: Scored | None = None
    appended: Likeliest | None = None


class Landing(Struct):
    """A step's results on their way to the host, in memory that belongs to this step alone."""

    forwarded: Forwarded
    sampled: Sampled | None = None
    scored: Scored | None = None
    part: Part | None = None


class Runner:
    """One model on one device, with its cache and its rows. Lives on the device thread."""

    def __init__(
        self,
        instance: Instance,
        graphs: Graphs | None = None,
    ) -> None:
        """graphs: captures steps that only decode; without it, all are computed kernel by kernel."""
        self.instance = instance
        self.adapters = instance.adapters
        self._model = instance.model
        self._rows = instance.rows
        self._staging = instance.rows.staging
        self._pulse = instance.pulse
        self._sampler = Sampler(instance.rows, instance.ops.draw)
        self._decoding = None if graphs is None else decoding(graphs, instance, self._sampler.likeliest)

    @property
    def overlaps(self) -> bool:
        """Say whether work is only issued, and so goes on beside the host's."""
        return self._staging.waits

    def active(self) -> AbstractContextManager[Any]:
        """Return the context in which a thread may call the methods below."""
        return torch.inference_mode()

    def forward(self, plan: StepPlan) -> Forwarded:
        """Issue the forward pass."""
        self._staging.begin()
        self.adapters.fill(plan.loads)
        self._rows.stage(plan.joins, plan.grants)
        if self._decoding is not None and (issued := self._decoding.forward(plan.spans)) is not None:
            self._pulse.beat()
            logits, asking, appended = issued
            return Forwarded(plan, range(len(plan.spans)), logits, asking, appended=appended)
        forwarded = Forwarded(plan, [i for i, span in enumerate(plan.spans) if span.samples])
        gathered = gather(plan.spans, self.instance)
        gathered.batch.beat = self._pulse.beat
        hidden = self._model.forward(gathered.batch)
        if forwarded.sampling:
            wanting = [plan.spans[i] for i in forwarded.sampling]
            forwarded.logits = self._model.logits(gathered.choosing(hidden), gathered.choosing_adapters)[: len(wanting)]
            forwarded.asking = Asking(
                gathered.rows,
                gathered.ends,
                np.array([span.row for span in wanting]),
                np.array([span.start + span.count for span in wanting]),
            )
        asked = [
            Asked(i, span.scores, self._rows.asked[span.row].prompt_logprobs)
            for i, span in enumerate(plan.spans)
            if span.scores
        ]
        if asked:
            adapters, targets = gathered.scoring_adapters, gathered.targets
            forwarded.scored = score(self._model, hidden[gathered.scoring], adapters, targets, asked, self._pulse)
        self._pulse.beat()
        return forwarded

    def sample(self, forwarded: Forwarded, mask: Array | None = None) -> Landing:
        """Issue the sampling. mask: int32 [spans of the plan that sample, ceil(vocab / 32)]."""
        logits, asking, scored = forwarded.logits, forwarded.asking, forwarded.scored
        sampled = None
        if logits is not None and asking is not None:
            sampled = self._sampler(logits, asking, mask, forwarded.appended)
        forwarded.logits = forwarded.scored = None
        landing = Landing(forwarded, sampled, scored)
        if self.overlaps:
            landing.sampled = None if sampled is None else sampled.down(self._staging)
            landing.scored = None if scored is None else scored.down(self._staging)
            # Waited for where nothing comes down, too: or a long prompt's steps would all be issued, and queue there.
            landing.part = self._staging.end()
        self._pulse.beat()
        return landing

    def attend(self) -> None:
        """Prepare a thread that is to wait for the device."""
        self._staging.attend()

    def spin(self, seconds: float) -> None:
        """Have waits ask so long whether the device is past a step, before they sleep until it says so."""
        self._staging.spin_s = seconds

    def wait(self, landing: Landing) -> None:
        """Wait until the device is past a step. Any thread may, and need not know torch."""
        if landing.part is not None:
            self._staging.wait(landing.part)

    def read(self, landing: Landing) -> StepResult:
        """Wait for a step's results, and return them."""
        self.wait(landing)
        result = self._result(landing)
        if landing.part is not None:
            self._staging.release(landing.part)
        return result

    def _result(self, landing: Landing) -> StepResult:
        forwarded, sampled = landing.forwarded, landing.sampled
        accepted = [0] * len(forwarded.plan.spans)
        result = StepResult(accepted, [])
        if landing.scored is not None:
            for i, logprobs in landing.scored.read():
                if logprobs is None:
                    result.failed[i] = _NOT_FINITE
                else:
                    result.prompt_logprobs[i] = logprobs
        if sampled is None:
            return result
        for i, token, verdict in zip(
            forwarded.sampling, sampled.tokens.tolist(), sampled.verdict.tolist(), strict=True
        ):
            if i in result.failed:
                continue
            if verdict == SOUND:
                accepted[i] = 1
                result.tokens.append(token)
            else:
                result.failed[i] = _NOTHING_ALLOWED if verdict == NOTHING_ALLOWED else _NOT_FINITE
        if sampled.scores is not None:
            chosen, top, top_ids = (values.tolist() for values in sampled.scores)
            for n, (at, most) in enumerate(sampled.scored):
                i = forwarded.sampling[at]
                if accepted[i]:
                    result.logprobs[i] = [TokenLogprobs(chosen[n], tuple(top_ids[n][:most]), tuple(top[n][:most]))]
        return result

    def begin(self) -> None:
        """Do ahead, before anybody is served, what `idle` would do later, as far as the start can wait for it."""
        if self._decoding is not None:
            self._decoding.begin()

    def idle(self) -> bool:
        """Use a moment in which nothing else is to do; return whether there is more that would take one."""
        return self._decoding is not None and self._decoding.settle()

    def facts(self) -> dict[str, Any]:
        """Return what operators may want to know of how steps are computed."""
        return {} if self._decoding is None else {"graphs": self._decoding.facts()}

    def diagnose(self, error: Exception) -> Exception:
        """Return what a step's error means: itself, StepTooLarge, or DeviceLost if it has left the device unusable."""
        return diagnose(error, self._rows.device)
