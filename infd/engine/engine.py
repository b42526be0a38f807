"""Admit requests, queue them, and see to it that each ends in exactly one terminal event."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from infd.adapters.registry import Adapters
from infd.engine.admission.gate import Gate
from infd.engine.admission.ticket import Ticket
from infd.engine.core import EngineCore
from infd.engine.lifecycle.control import LifecycleControl
from infd.engine.lifecycle.state import Lifecycle, State
from infd.engine.status import RequestRow, Status, gauges
from infd.engine.streams.stream import Choices
from infd.errors import Aborted, NotReady, RequestFailed, ServerStopped
from infd.request import FinishReason
from infd.telemetry.events import Events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from collections.abc import Sequence as Many

    from infd.config import Config
    from infd.engine.executor import Executor
    from infd.engine.streams.stream import Watcher
    from infd.errors import DeviceLost, RequestError
    from infd.request import Adapter, Request
    from infd.scheduler.layout import Capacity
    from infd.telemetry.metrics import Metrics

log = logging.getLogger("infd.engine")

BYTES_PER_TOKEN = 4  # of a body that is not tokenized yet; its place in the queue is corrected when it is


class Engine:
    """Everything between a request and the device.

    The only way a caller ends work is to leave its `admit` block; the engine
    may end a choice by itself (stop, length, abort, error).
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        metrics: Metrics,
        *,
        names: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """names: what clients call the model itself."""
        self.events = Events()
        self.lifecycle = Lifecycle(self.events)
        self.gate = Gate(config, self.lifecycle)
        self.executor = executor
        self.adapters = Adapters(
            executor.read_adapter,
            self._forget_adapter,
            metrics.forget_adapter,
            self.events,
            host_bytes=config.lora.host_bytes,
            patience=config.scheduler.priority_patience,
            taken=names,
        )
        self.now = clock
        self.accepted = 0  # choices queued so far; equals the terminal events plus those in flight
        self._config = config
        self._metrics = metrics
        self._core: EngineCore | None = None  # until the model is loaded
        self._running: asyncio.Task[None] | None = None
        self.control = LifecycleControl(self, config)
        self._tickets: dict[str, Ticket] = {}
        self._failed = False
        self._empty = asyncio.Event()
        self._empty.set()
        metrics.gauges = partial(gauges, self)

    # Life

    async def load(self) -> Capacity:
        """Load the model; return what the device can hold beside it. Raises StartError."""
        capacity = await self.executor.load(self._lose)
        self._core = EngineCore(self, capacity, self._config, self._metrics)
        return capacity

    def _lose(self, error: DeviceLost) -> None:
        """Have `run` raise: the executor has ended by itself."""
        if self._core is not None:
            self._core.loop.fail(error)

    @property
    def loaded(self) -> bool:
        return self._core is not None

    @property
    def core(self) -> EngineCore:
        """Raises NotReady before the model is loaded."""
        if self._core is None:
            raise NotReady(self.lifecycle.state.value, self.lifecycle.reason)
        return self._core

    async def run(self) -> None:
        """Serve until `stop`. Loads the model first if nobody has. Raises StartError, DeviceLost."""
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
        """Make `run` return. Work left undone stays undone: drain or fail it first."""
        if self._running is not None:
            self._running.cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait until every reader has left; False if the time ran out.

        What is frozen would never finish, and ends at once.
        """
        if self.lifecycle.state is not State.DRAINING:
            self.lifecycle.enter(State.DRAINING)
        if self.control.leave():
            log.warning("requests are cut off", extra={"requests": self._in_flight, "reason": "no step runs"})
            self.fail_all(ServerStopped())
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def fail_all(self, error: Exception) -> None:
        """End every stream with one error event, refuse whatever is still being prepared, and heed no wish any more."""
        self._failed = True
        self.control.leave()
        if self._core is not None:
            self._core.in_flight.fail_all(error)

    async def close(self) -> None:
        """Stop, and free the device."""
        self.stop()
        await self.control.close()
        await self.executor.close()

    # A request

    @asynccontextmanager
    async def admit(self, choices: int, body_bytes: int) -> AsyncIterator[Ticket]:
        """Reserve places in the queue. Leaving the block, for any reason, ends the work done on it.

        Raises NotReady or Overloaded before anything is spent. While the engine rests it may wait here.
        """
        ticket = self._reserve(choices, body_bytes)
        try:
            await self.gate.enter(ticket)
            yield ticket
        finally:
            self._retire(ticket)

    def queue(
        self,
        ticket: Ticket,
        requests: Many[Request],
        adapter: Adapter | None,
        watchers: Many[Watcher | None] | None,
    ) -> Choices:
        """Turn a ticket's requests, which ask for one adapter, into sequences. Called by `Ticket.submit`."""
        serving = self.core
        if self._failed:
            raise NotReady(self.lifecycle.state.value, self.lifecycle.reason)
        if ticket.expired is not None:
            raise ticket.expired
        for request in requests:
            serving.check(request)
        count = sum(request.choices for request in requests)
        assert count <= ticket.reserved_choices, "more choices than reserved, or submitted twice"
        tokens = sum(len(request.prompt) for request in requests)
        self.gate.require_tokens(tokens, self.gate.queued_tokens - ticket.reserved_tokens)
        self.gate.unreserve(ticket)
        choices = Choices(watchers or [None] * count, partial(serving.in_flight.resume, ticket))
        serving.begin(ticket, choices, requests, adapter)
        self.accepted += count
        return choices

    def require_room(self, choices: int = 1, tokens: int = 0) -> None:
        """Raise NotReady or Overloaded where a request of this size would be refused now."""
        self.gate.require(choices, tokens, len(self._core.scheduler.waiting) if self._core else 0)

    def abort(self, request_id: str) -> bool:
        """End a request with "abort". False if there is none of that id."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return False
        self._abort(ticket)
        return True

    def abort_all(self) -> int:
        """End all that came in with "abort"; return how many choices that were."""
        inside = [ticket for ticket in self._tickets.values() if not self.gate.is_outside(ticket)]
        return sum(map(self._abort, inside))

    def _abort(self, ticket: Ticket) -> int:
        if ticket.expired is not None:
            return 0
        if not ticket.choices:
            ticket.expire(Aborted())
            return ticket.reserved_choices
        return self._end(ticket, FinishReason.ABORT)

    def expire(self, ticket: Ticket, error: RequestError) -> None:
        """End what is left of a ticket whose time ran out. Called by its deadlines."""
        if not ticket.choices:
            ticket.expire(error)
        self._end(ticket, FinishReason.ERROR, error)

    def _reserve(self, choices: int, body_bytes: int) -> Ticket:
        tokens = body_bytes // BYTES_PER_TOKEN
        self.require_room(choices, tokens)
        self.control.knock()
        ticket = Ticket(self, secrets.token_hex(12), choices, tokens, self.now(), self._config.server)
        self._tickets[ticket.id] = ticket
        self.gate.reserve(ticket)
        self._empty.clear()
        return ticket

    def _retire(self, ticket: Ticket) -> None:
        """The caller left. What it did not wait for ends here."""
        ticket.deadlines.cancel()
        self.gate.unreserve(ticket)
        self._end(ticket, None)
        if ticket.choices:
            self._metrics.request_choices.observe(ticket.choices[0].seq.request.choices)
            self._metrics.request_longest_tokens.observe(max(flow.seq.generated for flow in ticket.choices))
        del self._tickets[ticket.id]
        self.control.look()
        if not self._tickets:
            self._empty.set()

    def _end(self, ticket: Ticket, finish: FinishReason | None, error: Exception | None = None) -> int:
        return self._core.in_flight.end(ticket, finish, error) if self._core else 0

    def _forget_adapter(self, adapter: Adapter) -> None:
        """Nobody uses an adapter any more: let go of its weights, the device's too."""
        slot = self._core.scheduler.adapters.drop(adapter) if self._core else None
        self.executor.forget_adapter(adapter, slot)

    # What operators ask

    @property
    def busy(self) -> bool:
        """Whether the device has work."""
        return self.control.at_work or (self._core is not None and self._core.loop.in_flight > 0)

    @property
    def tickets(self) -> int:
        """How many requests are at the door, inside, or still read."""
        return len(self._tickets)

    @property
    def unfinished(self) -> int:
        """How many choices have come in and not ended: in the scheduler, or still being prepared."""
        coming = [ticket for ticket in self._tickets.values() if ticket.expired is None]
        return self._in_flight + sum(ticket.reserved_choices for ticket in coming if not self.gate.is_outside(ticket))

    @property
    def _in_flight(self) -> int:
        return len(self._core.in_flight) if self._core else 0

    @property
    def stuck(self) -> bool:
        """Whether a step was stuck when `watch` last looked."""
        return self._core is not None and self._core.record.stuck

    def watch(self) -> bool:
        """Look whether all is well, about once a second. True when a step is found stuck, once for each time."""
        self.control.watch()
        return self._core is not None and self._core.watch(busy=self.busy)

    def status(self) -> Status:
        """Return the state and the load."""
        return Status.of(self, dict(self._metrics.terminal))

    def requests(self) -> list[RequestRow]:
        """Return every request that is being worked on or read, oldest first."""
        now = self.now()
        return [RequestRow.of(ticket, now) for ticket in self._tickets.values()]

    def describe(self) -> dict[str, Any]:
        """Return the executor's facts: device, dtype, memory, kernels."""
        return self.executor.describe()
