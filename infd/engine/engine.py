"""The engine: admits requests, runs the model's steps, and executes operators' commands."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from infd.adapters.registry import Adapters
from infd.drafting.drafter import NO_DRAFTS
from infd.engine.admission.admission import Admission
from infd.engine.admission.budget import QueueBudget
from infd.engine.admission.gate import Gate
from infd.engine.core import EngineCore
from infd.engine.lifecycle.control import LifecycleControl
from infd.engine.lifecycle.memory import ModelMemory
from infd.engine.lifecycle.state import Lifecycle, State
from infd.engine.status import RequestRow, Status, gauges, stage
from infd.engine.telemetry import Telemetry
from infd.errors import RequestFailed, ServerStopped
from infd.request import ANYONE
from infd.telemetry.events import Events
from infd.telemetry.slowest import Slowest
from infd.telemetry.window import Window

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from infd.config import LiveConfig
    from infd.drafting.drafter import Drafting
    from infd.engine.admission.ticket import Ticket
    from infd.engine.executor import Executor
    from infd.grammar.protocol import Grammars
    from infd.request import Adapter, Tenant
    from infd.scheduler.layout import Capacity
    from infd.telemetry.metrics import Gauges, Metrics

log = logging.getLogger("infd.engine")


class Admitted(AbstractAsyncContextManager["Ticket"]):
    """The block of `Engine.admit`: a generator in its place costs a short request several times as much."""

    __slots__ = ("_asked", "_engine", "_ticket")

    def __init__(self, engine: Engine, *asked: Any) -> None:
        """asked: see `Admission.reserve`."""
        self._engine = engine
        self._asked = asked

    async def __aenter__(self) -> Ticket:
        engine = self._engine
        self._ticket = ticket = engine.admission.reserve(*self._asked)
        try:
            engine.control.on_request()
            await engine.admission.enter(ticket)
        except BaseException:
            engine.admission.retire(ticket)
            raise
        return ticket

    async def __aexit__(self, *_: object) -> None:
        self._engine.admission.retire(self._ticket)


class Engine:
    """The interface through which the HTTP and admin servers use the model. The parts do not import this class.

    metrics    counters and histograms
    events     recent events
    window     recent samples of the metrics
    slowest    the slowest of the requests that ended lately
    lifecycle  the current state
    adapters   the served adapters, by name
    core       scheduler, step loop and choices in flight
    admission  the tickets of all requests
    control    pauses, resumes, sleeps and wakes the engine
    """

    def __init__(
        self,
        live: LiveConfig,
        executor: Executor,
        metrics: Metrics,
        *,
        grammars: Grammars | None = None,
        drafting: Drafting = NO_DRAFTS,
        names: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the parts.

        live      settings in force
        grammars  compiles constraints; None: requests with a constraint are refused
        drafting  creates the drafters of choices
        names     model names that clients may send for the model without an adapter
        """
        config = live.now
        self.metrics = metrics
        self.events = Events()
        self.window = Window(metrics, clock)
        self.slowest = Slowest()
        self.lifecycle = Lifecycle(self.events)
        self.executor = executor
        self.adapters = Adapters(
            executor.read_adapter,
            self._forget_adapter,
            metrics.forget_adapter,
            self.events,
            host_bytes=config.lora.host_bytes,
            patience=config.scheduler.priority_patience,
            reserved=names,
        )
        telemetry = Telemetry(self.events, metrics, clock)
        budget = QueueBudget(live, clock)
        gate = Gate(self.lifecycle, live)
        self.core = EngineCore(config, executor, self.adapters, grammars, drafting, budget, telemetry)
        self.admission = Admission(live, self.core, budget, gate, self.adapters, grammars, telemetry)
        memory = ModelMemory(executor, self.core, self.adapters, self.lifecycle)
        self.control = LifecycleControl(live, self.lifecycle, self.core, self.admission, memory, telemetry)
        self._memory = memory
        self._running: asyncio.Task[None] | None = None
        metrics.gauges = self.gauges

    # Start and stop

    async def load(self) -> Capacity:
        """Load the model; return the capacity that remains on the device. Raises StartError."""
        return await self.core.load()

    @property
    def weights_generation(self) -> int:
        """The number of times that operators have replaced the weights; a failed load counts too."""
        return self._memory.weights_generation

    @property
    def loaded(self) -> bool:
        return self.core.loaded

    async def run(self) -> None:
        """Serve until `stop`, after loading the model if it is not loaded yet. Raises StartError, DeviceLost."""
        if not self.loaded:
            await self.load()
        if self.lifecycle.state is State.STARTING:
            self.lifecycle.enter(State.READY)
        self._running = asyncio.ensure_future(self.core.loop.run())
        try:
            await self._running
        except asyncio.CancelledError:
            if not self._running.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
        except Exception as error:
            self.lifecycle.enter(State.FAILED, str(error))
            self.fail_all(RequestFailed("the engine failed"))
            raise

    def stop(self) -> None:
        """Make `run` return, without ending requests: call `drain` or `fail_all` first."""
        if self._running is not None:
            self._running.cancel()

    async def drain(self, timeout_s: float | None) -> bool:
        """Refuse new requests and wait until every reader has left. Return False if `timeout_s` passes first.

        timeout_s  in seconds; None: no limit

        Frozen requests fail at once, because no step would finish them.
        """
        if self.lifecycle.state is not State.DRAINING:
            self.lifecycle.enter(State.DRAINING)
        if self.control.stop():
            self.cut_off(len(self.core.in_flight), "no step runs")
        try:
            async with asyncio.timeout(timeout_s):
                await self.admission.emptied()
        except TimeoutError:
            return False
        return True

    def cut_off(self, requests: int, reason: str, *, after_s: float | None = None) -> None:
        """End every stream because the server stops, and report the number of unfinished requests, if any.

        after_s  the limit that ran out, in seconds; None: another reason
        """
        if requests:
            log.warning("requests are cut off", extra={"requests": requests, "reason": reason})
            self.events.publish("request", "cut off", requests=requests, reason=reason, after_s=after_s)
        self.fail_all(ServerStopped())

    def fail_all(self, error: Exception) -> None:
        """End every stream with one error event, refuse requests not queued yet, and stop lifecycle transitions."""
        self.admission.close(error)
        self.control.stop()
        self.core.in_flight.fail_all(error)

    async def close(self) -> None:
        """Stop, and free the device."""
        self.stop()
        await self.control.close()
        await self.executor.close()

    def _forget_adapter(self, adapter: Adapter) -> None:
        self.core.forget_adapter(adapter)

    # Requests

    def admit(
        self, choices: int, body_bytes: int, within: Ticket | None = None, *, tenant: Tenant = ANYONE
    ) -> AbstractAsyncContextManager[Ticket]:
        """Reserve places in the queue. Leaving the block for any reason ends the request's unfinished choices.

        within  the ticket of `admit_rounds`, if the request is a round; it is admitted while the engine drains too

        Raises NotReady or Overloaded before any work is done, or the error that ended `within`. May wake a sleeping
        engine. Waits while the gate holds new requests; the wait may raise NotReady, QueueTimeout, RequestTimeout or
        Aborted.
        """
        return Admitted(self, choices, body_bytes, within, tenant)

    @asynccontextmanager
    async def admit_rounds(self, tenant: Tenant = ANYONE) -> AsyncIterator[Ticket]:
        """Admit a request that is computed in rounds, between which it waits for others, such as servers of tools.

        The ticket takes no place in the queue, but until it is left, a drain waits, and the engine is not idle. Each
        round is admitted by `admit(..., within=ticket)`. Between rounds, wait within `ticket.interrupt_if_expired`.

        Raises and waits as `admit`.
        """
        async with self.admit(0, 0, tenant=tenant) as ticket:
            ticket.in_rounds = True
            ticket.deadlines.started()
            yield ticket

    def require_room(self, tenant: Tenant = ANYONE) -> None:
        """Raise NotReady or Overloaded if a request of a tenant would be refused now."""
        self.admission.require_room(tenant=tenant)

    def abort(self, request_id: str) -> bool:
        """End a request with "abort"; return False if no request has this id."""
        ticket = self.admission.find(request_id)
        if ticket is None:
            return False
        self.admission.abort(ticket)
        return True

    # For operators

    @property
    def busy(self) -> bool:
        """Whether steps are in flight, memory is being released or restored, or weights are being loaded."""
        return self.control.changing_memory or self.core.loop.in_flight > 0

    @property
    def stuck(self) -> bool:
        """Whether a step was stuck at the last `watch`."""
        return self.core.record.stuck

    def watch(self) -> bool:
        """Start an idle engine's sleep, and check for a stuck step and wrong page counts. Called about once a second.

        Returns True at the first check that finds a step stuck, otherwise False.
        """
        self.control.sleep_if_idle()
        return self.core.watch(busy=self.busy)

    def status(self) -> Status:
        """Return the state and the load."""
        return Status.of(self.lifecycle, self.core, self.admission, self.executor.memory, dict(self.metrics.terminal))

    def gauges(self) -> Gauges:
        """Return the current values of all gauge metrics."""
        return gauges(self.status(), self.core, self.admission, self.adapters, self.control.level)

    def requests(self, most: int | None = None) -> list[RequestRow]:
        """Return the requests whose readers have not left, oldest first: all, or at most `most`."""
        shown = (ticket for ticket in self.admission if ticket.round is None)
        return [RequestRow.of(ticket) for ticket in islice(shown, most)]

    def oldest_waiting_s(self) -> float | None:
        """Return the age of the oldest request of which nothing is computed now; None if no request waits."""
        ages = (ticket.age_s for ticket in self.admission if stage(ticket) in ("admitted", "waiting"))
        return next(ages, None)

    def describe(self) -> dict[str, Any]:
        """Return the executor's facts: device, dtype, memory, kernels."""
        return self.executor.describe()
