"""What operators see of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from msgspec import Struct

from infd.telemetry.metrics import Gauges

if TYPE_CHECKING:
    from infd.engine.admission.ticket import Ticket
    from infd.engine.core import EngineCore
    from infd.engine.engine import Engine


class Status(Struct, kw_only=True):
    """What an operator sees at a glance."""

    state: str
    reason: str
    since: float  # Unix time
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    held: int = 0  # requests, of those that wait, until the engine goes on
    weights: str = "loaded"  # or released, parked, invalid
    kv_cache: str = "loaded"
    tickets: int = 0
    pages: int = 0
    pages_referenced: int = 0
    pages_cached: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    steps: int = 0
    last_step_age_s: float | None = None
    accepted: int = 0  # choices
    terminal: dict[str, int] = {}
    max_model_len: int = 0
    step_tokens: int = 0
    rows: int = 0

    @classmethod
    def of(cls, engine: Engine, terminal: dict[str, int]) -> Self:
        """Return what the engine counts, with what only its model can tell once there is one."""
        life, door, memory = engine.lifecycle, engine.gate, engine.executor.memory
        status = cls(
            state=life.state.value,
            reason=life.reason,
            since=life.since,
            waiting_tokens=door.queued_tokens,
            held=door.outside,
            weights=memory.weights.value,
            kv_cache=memory.cache.value,
            tickets=engine.tickets,
            accepted=engine.accepted,
            terminal=terminal,
        )
        if engine.loaded:
            status._tell_of(engine.core)
            status.waiting += door.reserved_choices  # whose prompts are not encoded yet
        return status

    def _tell_of(self, serving: EngineCore) -> None:
        scheduler, capacity, record = serving.scheduler, serving.capacity, serving.record
        self.running, self.waiting = len(scheduler.running), len(scheduler.waiting)
        pool = scheduler.cache.pool
        self.pages, self.pages_referenced, self.pages_cached = pool.total, pool.referenced, pool.cached
        self.preemptions = scheduler.preemptions
        self.prefix_queries, self.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits
        self.steps, self.last_step_age_s = record.steps, record.age_s
        self.max_model_len, self.step_tokens, self.rows = capacity.max_model_len, capacity.step_tokens, capacity.rows


def gauges(engine: Engine) -> Gauges:
    """Return what the metrics tell of the engine's state."""
    now = engine.status()
    told = Gauges(
        state=now.state,
        running=now.running,
        waiting=now.waiting,
        held=now.held,
        preparing=engine.gate.reserved_choices,
        sleep_level=engine.control.level,
        pages=now.pages,
        pages_referenced=now.pages_referenced,
        pages_cached=now.pages_cached,
    )
    if engine.loaded:
        scheduler = engine.core.scheduler
        told.last_step_timestamp = engine.core.record.last_time
        told.max_adapters = scheduler.adapters.per_step
        told.adapters_bytes = engine.adapters.bytes
        told.adapters_running = tuple(sorted({adapter.name for adapter in scheduler.adapters.running}))
        waiting = {seq.adapter.name for seq in scheduler.waiting if seq.adapter is not None}
        told.adapters_waiting = tuple(sorted(waiting))
    return told


class RequestRow(Struct, kw_only=True):
    """One line of `infdctl ps`."""

    id: str
    state: str  # admitted, waiting, running, done (its reader has not left yet)
    client: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    choices: int
    age_s: float
    priority: int
    adapter: str | None = None

    @classmethod
    def of(cls, ticket: Ticket, now: float) -> Self:
        return cls(
            id=ticket.id,
            state=_stage(ticket),
            client=ticket.client,
            prompt_tokens=ticket.prompt_tokens,
            cached_tokens=ticket.cached_tokens,
            generated_tokens=ticket.generated_tokens,
            choices=len(ticket.choices) or ticket.reserved_choices,
            age_s=now - ticket.admitted,
            priority=ticket.choices[0].seq.request.priority if ticket.choices else 0,
            adapter=ticket.adapter,
        )


def _stage(ticket: Ticket) -> str:
    if not ticket.choices:
        return "admitted"
    if any(flow.seq.row is not None for flow in ticket.choices):
        return "running"
    return "waiting" if any(flow.stream.finish is None for flow in ticket.choices) else "done"
