"""A simulated device for infd's runner: small CPU tensors replace GPU tensors.

A CPU operation costs about as much as a launch; replaying a graph does nothing; the model is only its head.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from infd.kernels.select import select
from infd.request import Generate, Request, SamplingParams
from infd.runner.adapters import DeviceSlots
from infd.runner.instance import Instance
from infd.runner.pulse import Pulse
from infd.runner.rows import Rows
from infd.runner.runner import Runner
from infd.runner.staging import Pinned
from infd.scheduler.layout import CacheLayout, Capacity, PageGroup
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
VOCABULARY = 32
PROMPT = 24
PAGE = 16


class Pace:
    """Models when the device finishes its queue, with steps of `step_s`."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.free = 0.0

    def work(self) -> None:
        """Enqueue a step."""
        self.free = max(self.free, time.perf_counter()) + self.step_s

    def event(self) -> Event:
        return Event(self)


class Event:
    """An event that completes after all work enqueued before it was recorded."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._due = 0.0

    def record(self) -> None:
        if self._pace.step_s:
            self._due = self._pace.free = max(self._pace.free, time.perf_counter())

    def query(self) -> bool:
        return not self._due or self._due <= time.perf_counter()

    def synchronize(self) -> None:
        while self._due and (left := self._due - time.perf_counter()) > 0:
            time.sleep(left)


class Copied(Pinned):
    """Transfers between host and device as on a GPU, with real copies."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(CPU, lambda size: torch.empty(size, dtype=torch.uint8), pace.event)

    def up(self, array: Any) -> Any:
        return super().up(array).clone()  # on one device `to` would not copy


class FixedPlan:
    slots = None

    def refill(self, _: list[int]) -> None: ...

    def begin(self) -> None: ...


class Attention:
    def prepare(self, _: Any) -> FixedPlan:
        return FixedPlan()

    def captured(self, _: Any) -> FixedPlan:
        return FixedPlan()


class Model:
    vocab_size = VOCABULARY
    least_rows = 1
    skips_unsampled = False
    logits_dtype = torch.float32

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._head = torch.randn(VOCABULARY, 4)

    def forward(self, batch: Any) -> Any:
        self._pace.work()
        return torch.ones(len(batch.tokens), 4)

    def logits(self, hidden: Any, adapters: Any = None) -> Any:
        return hidden @ self._head.T

    def fused(self, memory: Any, buffers: Any) -> None:
        return None


class Draw:
    """The host's work around a Triton kernel, with one torch operation in place of the kernel."""

    def largest(self, logits: Any) -> Any:
        return logits.max(-1)

    def __call__(self, logits: Any, drawing: Any, *, truncated: bool) -> Any:
        tokens = torch.empty_like(drawing.rows)
        floats = (drawing.largest, drawing.temperature, drawing.top_p, drawing.min_p.log().abs())
        drawing.seed.contiguous(), torch.stack(floats, 1), drawing.top_k.contiguous()
        return tokens.fill_(7)


class Captured:
    """Captures a step as its duration only."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return self._pace.work


def assembled(streams: int, steps: int, pace: Pace) -> tuple[Runner, Capacity]:
    """Return a runner for the given number of streams and tokens, with all sizes captured."""
    length = PROMPT + steps + 8
    layout = CacheLayout((PageGroup(layers=(0,), page_tokens=PAGE),))
    capacity = Capacity(
        layout=layout,
        pages=streams * (length // PAGE + 2),
        rows=streams,
        step_tokens=streams * PROMPT,
        max_model_len=length + 8,
        vocab_size=VOCABULARY,
    )
    rows = Rows(
        rows=streams,
        max_len=length + 8,
        page_tokens=[PAGE],
        vocab_size=VOCABULARY,
        staging=Copied(pace),
    )
    ops = select(CPU, torch.float32).replace(attention=Attention(), draw=Draw())
    adapters = DeviceSlots(None, rows.staging)
    instance = Instance(Model(pace), ops, layout, cache=[None], rows=rows, adapters=adapters, pulse=Pulse())
    runner = Runner(instance, Captured(pace))
    with runner.active():
        while runner.idle():
            pass
    return runner, capacity


def scheduled(capacity: Capacity, streams: int, steps: int, way: dict[str, Any]) -> Scheduler:
    """Return a scheduler that holds these streams."""
    scheduler = Scheduler(capacity)
    for number in range(streams):
        prompt = tuple((number + i) % VOCABULARY for i in range(PROMPT))
        sampling = SamplingParams(max_tokens=steps, **way)
        scheduler.add(Sequence(Request(id=str(number), prompt=prompt, wants=(Generate(sampling),))))
    return scheduler
