"""A reserved place in the queue, and what became of it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from infd.engine.admission.deadlines import Deadlines
from infd.engine.admission.prepare import Prepared
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from infd.config import ServerConfig
    from infd.engine.engine import Engine
    from infd.engine.streams.stream import Choices, Stream, Watcher
    from infd.errors import RequestError
    from infd.request import Request
    from infd.scheduler.sequence import Sequence


class ChoiceState(Struct, eq=False):
    """One choice on its way: its sequence, its stream, and when things happened (monotonic seconds)."""

    seq: Sequence
    stream: Stream
    admitted: float
    submitted: float
    prompt_tokens: int  # 0 for siblings, which share the first one's prompt
    started: float | None = None  # first planned
    first: float | None = None  # first token
    last: float = 0.0  # latest token


class Times(Struct, frozen=True):
    """When a ticket's choices, taken together, reached each stage (monotonic seconds). None: not yet."""

    admitted: float
    started: float | None
    first: float | None
    last: float | None


class Ticket:
    """Taken before any work is spent on a request; see `Engine.admit`."""

    def __init__(self, engine: Engine, id: str, choices: int, tokens: int, now: float, server: ServerConfig) -> None:
        self.id = id
        self.client = ""
        self.adapter: str | None = None  # by name
        self.admitted = now
        self.choices: list[ChoiceState] = []
        self.prompt_tokens = 0  # of all its requests; choices share their prompt
        self.cached_tokens = 0  # of these, found in the cache
        self.departure = (
            "disconnect"  # how its reader leaves, where it does not wait for the end: slow_reader if dropped
        )
        self.reserved_choices = choices  # places in the queue held until submitted
        self.reserved_tokens = tokens
        self.deadlines = Deadlines(server, partial(engine.expire, self))
        self.expired: RequestError | None = None  # it ended before it was queued: out of time, or aborted
        self._preparing: asyncio.Timeout | None = None
        self._engine = engine

    async def submit(
        self, *requests: Request, watchers: Many[Watcher | None] | None = None, client: str = ""
    ) -> Choices:
        """Queue the requests and return their choices: an index per choice, request after request.

        watchers  one per choice, or None
        client    who asks, for `infdctl ps`

        Raises InvalidRequest, PromptTooLong, Overloaded (more prompt tokens than the queue takes), NotReady,
        QueueTimeout, RequestTimeout, ModelNotFound, AdapterUnavailable.
        """
        self.client = client
        self.adapter = requests[0].adapter if requests else None
        try:
            async with asyncio.timeout(None) as self._preparing, Prepared(self._engine.adapters, requests) as prepared:
                return self._engine.queue(self, requests, prepared.adapter, watchers)
        except TimeoutError:
            if self.expired is None:
                raise
            raise self.expired from None
        finally:
            self._preparing = None

    def expire(self, error: RequestError) -> None:
        """End it before it is queued, whatever it waits for. What ended it first is what its caller hears."""
        if self.expired is not None:
            return
        self.expired = error
        self._engine.gate.call(self)
        if self._preparing is not None:
            self._preparing.reschedule(0.0)

    @property
    def generated_tokens(self) -> int:
        """Tokens handed to its reader."""
        return sum(flow.stream.delivered for flow in self.choices)

    @property
    def times(self) -> Times:
        begun = [flow for flow in self.choices if flow.first is not None]
        return Times(
            admitted=self.admitted,
            started=min((flow.started for flow in self.choices if flow.started is not None), default=None),
            first=min((flow.first for flow in begun if flow.first is not None), default=None),
            last=max((flow.last for flow in begun), default=None),
        )

    def summary(self) -> dict[str, Any]:
        """Return what the access line tells: tokens, milliseconds, and how the first choice ended."""
        if not self.choices:
            return {"prompt": 0, "cached": 0, "generated": 0}
        times = self.times
        finish = self.choices[0].stream.finish
        return {
            **({} if self.adapter is None else {"adapter": self.adapter}),
            "prompt": self.prompt_tokens,
            "cached": self.cached_tokens,
            "generated": self.generated_tokens,
            "queue_ms": _milliseconds(self.admitted, times.started),
            "ttft_ms": _milliseconds(self.admitted, times.first),
            "total_ms": _milliseconds(self.admitted, self._engine.now()),
            "finish": finish.value if isinstance(finish, FinishReason) else self.departure,
        }


def _milliseconds(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1e3, 1)
