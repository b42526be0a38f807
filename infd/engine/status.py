"""The engine's state and load, for operators and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from msgspec import Struct

from infd.telemetry.metrics import Gauges

if TYPE_CHECKING:
    from infd.adapters.registry import Adapters
    from infd.engine.admission.admission import Admission
    from infd.engine.admission.ticket import Ticket
    from infd.engine.core import EngineCore
    from infd.engine.lifecycle.state import Lifecycle
    from infd.memory import Memory


class Status(Struct, kw_only=True):
    """The answer to `infdctl status`."""

    state: str
    reason: str
    since: float  # Unix time at which the state began
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    held: int = 0  # requests that wait at the gate; `waiting` includes their choices
    weights: str = "loaded"  # loaded, released, parked or invalid
    kv_cache: str = "loaded"
    tickets: int = 0
    pages: int = 0
    pages_referenced: int = 0
    pages_cached: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    accepted_drafts: tuple[int, ...] = ()
    steps: int = 0
    last_step_age_s: float | None = None
    accepted: int = 0  # choices queued so far
    terminal: dict[str, int] = {}
    max_model_len: int = 0
    step_tokens: int = 0
    rows: int = 0

    @classmethod
    def of(
        cls, lifecycle: Lifecycle, core: EngineCore, admission: Admission, memory: Memory, terminal: dict[str, int]
    ) -> Self:
        """Return the state and the load. Before the model is loaded, nothing runs and there are no pages."""
        scheduler, capacity, pool = core.scheduler, core.capacity, core.scheduler.cache.pool
        return cls(
            state=lifecycle.state.value,
            reason=lifecycle.reason,
            since=lifecycle.since,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + admission.budget.reserved_choices,
            waiting_tokens=admission.budget.queued_tokens,
            held=admission.gate.waiting,
            weights=memory.weights.value,
            kv_cache=memory.cache.value,
            tickets=len(admission),
            pages=pool.total,
            pages_referenced=pool.referenced,
            pages_cached=pool.cached,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            drafts=scheduler.speculation.drafts,
            accepted_drafts=tuple(scheduler.speculation.accepted),
            steps=core.record.steps,
            last_step_age_s=core.record.age_s,
            accepted=core.in_flight.accepted,
            terminal=terminal,
            max_model_len=capacity.max_model_len,
            step_tokens=capacity.step_tokens,
            rows=capacity.rows,
        )


def gauges(status: Status, core: EngineCore, admission: Admission, adapters: Adapters, sleep_level: int) -> Gauges:
    """Return the current values of all gauge metrics."""
    read = Gauges(
        state=status.state,
        running=status.running,
        waiting=status.waiting,
        held=status.held,
        preparing=admission.budget.reserved_choices,
        sleep_level=sleep_level,
        pages=status.pages,
        pages_referenced=status.pages_referenced,
        pages_cached=status.pages_cached,
    )
    if core.loaded:
        scheduler = core.scheduler
        read.last_step_timestamp = core.record.last_time
        read.max_adapters = scheduler.adapters.per_step
        read.adapters_bytes = adapters.bytes
        read.adapters_running = tuple(sorted({adapter.name for adapter in scheduler.adapters.running}))
        waiting = {seq.adapter.name for seq in scheduler.waiting if seq.adapter is not None}
        read.adapters_waiting = tuple(sorted(waiting))
    return read


class RequestRow(Struct, kw_only=True):
    """One line of `infdctl ps`."""

    id: str
    state: str  # admitted, waiting, running, between rounds, or done: finished, but the reader has not left
    client: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    choices: int
    age_s: float
    priority: int
    adapter: str | None = None
    tenant: str = ""

    @classmethod
    def of(cls, ticket: Ticket) -> Self:
        return cls(
            id=ticket.id,
            state=stage(ticket),
            client=ticket.client,
            prompt_tokens=ticket.prompt_tokens,
            cached_tokens=ticket.cached_tokens,
            generated_tokens=ticket.generated_tokens,
            choices=len(ticket.choices) or ticket.reservation.choices,
            age_s=ticket.age_s,
            priority=ticket.choices[0].seq.request.priority if ticket.choices else 0,
            adapter=ticket.adapter,
            tenant=ticket.reservation.tenant.name,
        )


def stage(ticket: Ticket) -> str:
    """Return `RequestRow.state`."""
    if not ticket.choices:
        return "between rounds" if ticket.in_rounds else "admitted"
    if any(choice.seq.row is not None for choice in ticket.choices):
        return "running"
    return "waiting" if any(choice.stream.finish is None for choice in ticket.choices) else "done"
