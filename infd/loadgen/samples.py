"""Measurements of one request: times, token counts, finish reason."""

from __future__ import annotations

from msgspec import Struct


class Sample(Struct, kw_only=True):
    """One completed request.

    due_s    seconds from the run's begin to the request's due time: its arrival, or its admission by `concurrency`
    queued_s seconds from the due time until the request was sent: a limit on requests in flight held it back
    ttft_s   seconds from the due time to the first text chunk
    e2e_s    seconds from the due time to the end of the stream
    gaps_s   seconds between consecutive text chunks
    counted  whether the token counts are those of the server's usage; otherwise output_tokens counts text chunks
    cached_tokens  input tokens found in the server's prefix cache; None: the server does not report it
    finish   the answer's finish reason; "": the server does not report it
    schema   whether the answer had to be JSON or fit a schema
    valid    whether the answer is JSON or fits its schema; None: no schema, or the length cut the answer
    """

    ttft_s: float
    e2e_s: float
    gaps_s: list[float]
    input_tokens: int
    output_tokens: int
    counted: bool
    due_s: float = 0.0
    queued_s: float = 0.0
    model: str = ""
    cached_tokens: int | None = None
    finish: str = ""
    schema: bool = False
    valid: bool | None = None

    @property
    def per_token_s(self) -> float | None:
        """(e2e - ttft) / (output tokens - 1); None for an answer of one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Failure(Struct, kw_only=True):
    """One failed request: its kind, its due time, and the seconds from then to the failure."""

    kind: str
    due_s: float
    e2e_s: float
    model: str = ""
