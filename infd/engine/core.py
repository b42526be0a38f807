"""What there is once a model is loaded: the queue, the steps, and the choices in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.engine.prefix_roots import PrefixRoots
from infd.engine.steps.loop import StepLoop
from infd.engine.steps.record import StepRecord
from infd.engine.streams.in_flight import InFlight
from infd.engine.streams.request_metrics import RequestMetrics
from infd.errors import InvalidRequest, PromptTooLong
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from infd.config import Config
    from infd.engine.admission.ticket import Ticket
    from infd.engine.engine import Engine
    from infd.engine.steps.loop import Issued
    from infd.engine.streams.stream import Choices
    from infd.request import Adapter, Request
    from infd.scheduler.layout import Capacity
    from infd.scheduler.scheduler import Outcome
    from infd.telemetry.metrics import Metrics


class EngineCore:
    """One model at work, from its loading to the engine's end.

    capacity   what the device can hold
    scheduler  who is computed next, and where
    flows      every choice in flight
    loop       runs the steps
    record     what the steps were
    """

    def __init__(self, engine: Engine, capacity: Capacity, config: Config, metrics: Metrics) -> None:
        measure = RequestMetrics(metrics)
        self.capacity = capacity
        self.scheduler = Scheduler(
            capacity,
            priority_patience=config.scheduler.priority_patience,
            prefix_caching=config.cache.prefix_caching,
            max_adapters=config.lora.max_adapters,
            max_adapters_per_step=config.lora.max_adapters_per_step,
        )
        self.in_flight = InFlight(engine, self.scheduler, measure, self.wake)
        self.loop = StepLoop(
            self.scheduler, engine.executor, engine.events, engine.now, self.in_flight.planned, self._committed
        )
        self.record = StepRecord(engine.executor.pulse, measure, engine.now)
        self._roots = PrefixRoots(config)

    def wake(self) -> None:
        """There may be something to plan."""
        self.loop.wake()

    def check(self, request: Request) -> None:
        """Refuse what could never be computed. Raises InvalidRequest, PromptTooLong."""
        tokens, limit = len(request.prompt), self.capacity.max_model_len
        if not tokens:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        if tokens >= limit:
            raise PromptTooLong(tokens, limit - 1)
        if min(request.prompt) < 0 or max(request.prompt) >= self.capacity.vocab_size:
            raise InvalidRequest(f"token ids are 0 to {self.capacity.vocab_size - 1}", param="prompt")

    def begin(self, ticket: Ticket, choices: Choices, requests: Many[Request], adapter: Adapter | None) -> None:
        """Queue a sequence for each choice of these requests, which ask for one adapter."""
        streams = iter(choices.streams)
        for request in requests:
            root = self._roots.of(request, adapter)
            first = None
            for choice in range(request.choices):
                seq = Sequence(request, choice, prefix_root=root, adapter=adapter, first=first)
                first = first or seq
                # Siblings find the first one's prompt in the cache: it goes first, and leaves them no room before.
                self.in_flight.begin(seq, next(streams), ticket, prompt_tokens=0 if choice else len(request.prompt))
        self.wake()

    def forget_prefixes(self, *, preempting: bool) -> tuple[int, int]:
        """Empty the prefix cache; return how many pages stood there, and how many sequences were preempted.

        preempting  what runs is computed anew; else it goes on with what it holds
        """
        self._roots.renew()
        preempted = len(self.scheduler.running) if preempting else 0
        pages = self.scheduler.forget_prefixes(
            lambda seq: self._roots.of(seq.request, seq.adapter), preempting=preempting
        )
        self.wake()
        return pages, preempted

    def watch(self, *, busy: bool) -> bool:
        """Look whether all is well, about once a second. True when a step is found stuck, once for each time."""
        if not self.in_flight:
            self.record.verify(self.scheduler)
        return self.record.look(busy=busy)

    def _committed(self, issued: Issued, outcomes: list[Outcome]) -> None:
        self.record.committed(issued, outcomes, self.scheduler)
        self.in_flight.committed(outcomes)
