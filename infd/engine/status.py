"""What operators see of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct

from infd.telemetry.metrics import Gauges

if TYPE_CHECKING:
    from infd.adapters.registry import Adapters
    from infd.engine.state import Lifecycle
    from infd.engine.ticket import Ticket
    from infd.scheduler.layout import Capacity
    from infd.scheduler.scheduler import Scheduler


class Status(Struct, kw_only=True):
    """What an operator sees at a glance."""

    state: str
    reason: str
    since: float  # Unix time
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    held: int = 0  # requests, of those that wait, until the engine goes on
    weights: str = "loaded"  # or released, invalid
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
    def of(
        cls, life: Lifecycle, scheduler: Scheduler | None, capacity: Capacity | None, *, preparing: int, **counts: Any
    ) -> Self:
        """Return the engine's own counts beside what the scheduler and the device can tell, once there are any.

        preparing  choices with a place in the queue whose prompt is not encoded yet
        """
        status = cls(state=life.state.value, reason=life.reason, since=life.since, **counts)
        if scheduler is not None and capacity is not None:
            status.running, status.waiting = len(scheduler.running), len(scheduler.waiting) + preparing
            status.pages, status.pages_referenced = scheduler.cache.pool.total, scheduler.cache.pool.referenced
            status.pages_cached = scheduler.cache.pool.cached
            status.preemptions = scheduler.preemptions
            status.prefix_queries, status.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits
            status.max_model_len, status.step_tokens = capacity.max_model_len, capacity.step_tokens
            status.rows = capacity.rows
        return status

    def gauges(self, preparing: int, last_step_timestamp: float) -> Gauges:
        """Return what of it the metrics tell."""
        return Gauges(
            state=self.state,
            running=self.running,
            waiting=self.waiting,
            held=self.held,
            preparing=preparing,
            pages=self.pages,
            pages_referenced=self.pages_referenced,
            pages_cached=self.pages_cached,
            last_step_timestamp=last_step_timestamp,
        )


def tell_of_adapters(gauges: Gauges, adapters: Adapters, scheduler: Scheduler) -> None:
    """Add what the metrics tell of adapters."""
    gauges.max_adapters = scheduler.adapters.per_step
    gauges.adapters_bytes = adapters.bytes
    gauges.adapters_running = tuple(sorted({adapter.name for adapter in scheduler.adapters.running}))
    waiting = {seq.adapter.name for seq in scheduler.waiting if seq.adapter is not None}
    gauges.adapters_waiting = tuple(sorted(waiting))


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
            choices=len(ticket.flows) or ticket.reserved_choices,
            age_s=now - ticket.admitted,
            priority=ticket.flows[0].seq.request.priority if ticket.flows else 0,
            adapter=ticket.adapter,
        )


def _stage(ticket: Ticket) -> str:
    if not ticket.flows:
        return "admitted"
    if any(flow.seq.row is not None for flow in ticket.flows):
        return "running"
    return "waiting" if any(flow.stream.finish is None for flow in ticket.flows) else "done"
