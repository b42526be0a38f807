"""Compute requests with the model's scheduler and step loop, and keep the choices in flight."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from infd.engine.prefix_roots import PrefixRoots
from infd.engine.steps.constraints import Constraints
from infd.engine.steps.loop import StepLoop
from infd.engine.steps.record import StepRecord
from infd.engine.streams.in_flight import InFlight
from infd.errors import InvalidRequest, PromptTooLong, Unsupported
from infd.request import Pool, Route, pick
from infd.scheduler.layout import CacheLayout, Capacity
from infd.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from infd.adapters.registry import Adapters
    from infd.config import Config
    from infd.drafting.drafter import Drafting
    from infd.engine.admission.budget import QueueBudget
    from infd.engine.executor import Executor
    from infd.engine.steps.loop import Issued
    from infd.engine.telemetry import Telemetry
    from infd.errors import DeviceLost
    from infd.grammar.protocol import Grammars
    from infd.request import Adapter, Request
    from infd.scheduler.scheduler import Outcome

NOTHING: Final = Capacity(
    layout=CacheLayout(()), pages=0, rows=0, step_tokens=0, max_model_len=0, vocab_size=0
)  # the capacity before a model is loaded


class EngineCore:
    """Computes requests. `load` rebuilds all parts for the loaded model.

    loaded     whether a model is loaded; until then the scheduler admits no sequence
    capacity   the executor's limits: pages, rows, tokens of a step
    scheduler  decides what each step computes
    in_flight  every choice that is queued and has not ended
    loop       issues and commits the steps
    record     counts and times the committed steps
    ended      set when a choice is queued, resumed or ended, a ticket is retired, or a target is set
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        adapters: Adapters,
        grammars: Grammars | None,
        drafting: Drafting,
        budget: QueueBudget,
        telemetry: Telemetry,
    ) -> None:
        self.loaded = False
        self.ended = asyncio.Event()
        self._config = config
        self._executor = executor
        self._adapters = adapters
        self._grammars = grammars
        self._drafting = drafting
        self._budget = budget
        self._telemetry = telemetry
        self._roots = PrefixRoots(config)
        self._assemble(NOTHING)

    def _assemble(self, capacity: Capacity) -> None:
        config, telemetry = self._config, self._telemetry
        self.capacity = capacity
        self.scheduler = Scheduler(
            capacity,
            priority_patience=config.scheduler.priority_patience,
            prefix_caching=config.cache.prefix_caching,
            max_adapters=config.lora.max_adapters,
            max_adapters_per_step=config.lora.max_adapters_per_step,
            max_drafts=self._drafting.most,
        )
        constraints = Constraints(
            capacity.vocab_size,
            self._grammars,
            telemetry,
            self._drafting.most,
            self.scheduler.speculation.pays_alone,
        )
        self.in_flight = InFlight(
            self.scheduler,
            self._roots,
            self._adapters,
            self._budget,
            constraints,
            self._drafting,
            telemetry,
            self._on_change,
        )
        self.loop = StepLoop(
            self.scheduler,
            self._executor,
            constraints,
            telemetry.events,
            telemetry.now,
            self.in_flight.planned,
            self._on_commit,
            self.in_flight.committed,
        )
        self.record = StepRecord(self.scheduler, self._executor.pulse, telemetry)

    async def load(self) -> Capacity:
        """Load the model; return the capacity that remains on the device. Raises StartError."""
        capacity = await self._executor.load(self._on_device_lost)
        self._assemble(capacity)
        self.loaded = True
        return capacity

    def check(self, request: Request) -> None:
        """Check the wants of a request, and the length and the token ids of its prompt.

        Raises Unsupported, InvalidRequest, PromptTooLong.
        """
        pool = pick(Pool, request.wants)
        if pool is None and request.wants and not self.capacity.generates:
            raise Unsupported("generation by this model, which only pools,")
        if pool is not None and pool.task not in self.capacity.pools:
            raise Unsupported(f"the task {pool.task} with this model")
        if pick(Route, request.wants) is not None and self.capacity.experts is None:
            raise Unsupported(
                "return_routed_experts with this model, which has no experts that infd's own code routes,",
                param="return_routed_experts",
            )
        answered = pool is None
        tokens, most = len(request.prompt), self.capacity.max_model_len - answered
        if not tokens:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        if tokens > most:
            raise PromptTooLong(tokens, most, answered=answered)
        if pool is not None and not 0 <= pool.skip < tokens:
            raise InvalidRequest(
                f"pooling skips {pool.skip} of {tokens} tokens; at least one must remain", param="prompt"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= self.capacity.vocab_size:
            raise InvalidRequest(f"token ids are 0 to {self.capacity.vocab_size - 1}", param="prompt")

    def forget_prefixes(self, *, preempting: bool) -> tuple[int, int]:
        """Empty the prefix cache; return the numbers of pages forgotten and of sequences preempted.

        preempting  whether running sequences are recomputed; otherwise they continue with their pages
        """
        self._roots.renew()
        preempted = len(self.scheduler.running) if preempting else 0
        pages = self.scheduler.forget_prefixes(
            lambda seq: self._roots.of(seq.request, seq.adapter), preempting=preempting
        )
        self.loop.wake()
        return pages, preempted

    def forget_adapter(self, adapter: Adapter) -> None:
        """Free the weights of an unused adapter, in host memory and on the device."""
        self._executor.forget_adapter(adapter, self.scheduler.adapters.drop(adapter))

    def watch(self, *, busy: bool) -> bool:
        """Check for a stuck step and, while no choice is in flight, verify the page counts. Called about once a second.

        busy  whether the device has work, see `Engine.busy`

        Returns True at the first check that finds a step stuck, otherwise False. Wrong page counts are only logged.
        """
        if not self.in_flight:
            self.record.verify_idle()
        return self.record.check(busy=busy)

    def _on_change(self) -> None:
        if self.scheduler.running or self.scheduler.waiting:
            self.loop.wake()
        self.ended.set()

    def _on_commit(self, issued: Issued, outcomes: list[Outcome]) -> None:
        self.record.committed(issued, outcomes)
        self.in_flight.committed(outcomes)

    def _on_device_lost(self, error: DeviceLost) -> None:
        self.loop.fail(error)
