"""What operators see of an engine."""

from __future__ import annotations

from msgspec import Struct


class Status(Struct, kw_only=True):
    """What an operator sees at a glance."""

    state: str
    reason: str
    since: float  # Unix time
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
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
