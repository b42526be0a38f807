"""A request's reserved place in the queue, its choices, and its times."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from infd.engine.admission.deadlines import Deadlines
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from collections.abc import Sequence as Many

    from infd.config import ServerConfig
    from infd.engine.admission.budget import Reservation
    from infd.engine.streams.choice import ChoiceState
    from infd.engine.streams.stream import Choices, Stream, Watcher
    from infd.errors import RequestError
    from infd.request import Request

    Watchers = Many[Watcher | None] | None
    Submit = Callable[["Ticket", Many[Request], Watchers, bool], Awaitable[Choices]]
    Expire = Callable[["Ticket", RequestError], None]


class Times(Struct, frozen=True):
    """When the first of a ticket's choices reached each stage, and when the latest token was delivered.

    Times are monotonic seconds; None until a choice reaches the stage.
    """

    admitted: float
    started: float | None
    first: float | None
    last: float | None


class Ticket:
    """A request's reserved place in the queue, from `Engine.admit` until its reader leaves.

    client         the API key's name, for `infdctl ps`
    adapter        the adapter's name; None: the model itself
    choices        those of the last submission; empty before the first
    streams        the answer's streams
    prompt_tokens  tokens of all requests' prompts; a prompt counts once for all its choices
    cached_tokens  prompt tokens found in the prefix cache
    departure      metrics label of a reader that leaves early: disconnect, or slow_reader if dropped
    held           whether the request waits at the gate
    within         ticket of the request of which this one is a round; None: it is no round
    in_rounds      whether the request is computed in rounds: it queues nothing itself, and ends with its last round
    round          ticket of the present round; None: between two rounds
    expired        the error that ended the request, or its round, before it was queued: a timeout, an abort, a stop
    """

    def __init__(
        self,
        id: str,
        reservation: Reservation,
        server: ServerConfig,
        clock: Callable[[], float],
        submit: Submit,
        expire: Expire,
        within: Ticket | None = None,
    ) -> None:
        """Start the deadlines.

        submit  queues the ticket's requests
        expire  ends the request; called by the deadlines
        """
        self.id = id
        self.reservation = reservation
        self.admitted = clock()
        self.client = ""
        self.adapter: str | None = None
        self.choices: list[ChoiceState] = []
        self.streams: list[Stream] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.departure = "disconnect"
        self.held = False
        self.within = within
        self.in_rounds = False
        self.round: Ticket | None = None
        self.expired: Exception | None = None
        self.deadlines = Deadlines(server, partial(expire, self))
        self._waiting: asyncio.Timeout | None = None
        self._began: tuple[float | None, float | None] = None, None  # first step and token of earlier submissions
        self._clock = clock
        self._submit = submit

    async def submit(
        self, *requests: Request, watchers: Watchers = None, client: str = "", last: bool = True
    ) -> Choices:
        """Queue the requests; return their choices. Indices count the choices of the first request, then of the next.

        watchers  one per choice, or None
        client    the API key's name, for `infdctl ps`
        last      whether this is the only submission. If not, the ticket keeps its reservation, and once all choices
                  have ended, more requests may be submitted: at most as many choices as reserved. They take the places
                  of the first in the queue

        Raises InvalidRequest, PromptTooLong, Overloaded (too many prompt tokens for the queue), NotReady,
        QueueTimeout, RequestTimeout, Aborted, ModelNotFound, AdapterUnavailable, GrammarFailed, Unsupported.
        """
        self.client = client
        self.adapter = requests[0].adapter if requests else None
        return await self._submit(self, requests, watchers, last)

    def begin_again(self) -> None:
        """Forget the choices of an earlier submission, all of which have ended, but for the times of their first."""
        if self.choices:
            times = self.times
            self._began = times.started, times.first
            self.choices.clear()
            self.streams.clear()

    def answer(self, streams: list[Stream], prompt_tokens: int, cached_tokens: int) -> None:
        """Report the answer's streams and counts, where those of the submissions are only steps to the answer."""
        self.streams, self.prompt_tokens, self.cached_tokens = streams, prompt_tokens, cached_tokens

    @asynccontextmanager
    async def interrupt_if_expired(self) -> AsyncIterator[None]:
        """Run a block that waits before the requests are queued, or between two rounds.

        `expire(error)` makes the block raise `error`.
        """
        if self.expired is not None:
            raise self.expired
        try:
            async with asyncio.timeout(None) as self._waiting:
                yield
        except TimeoutError:
            if self.expired is None:
                raise
            raise self.expired from None
        finally:
            self._waiting = None

    def expire(self, error: Exception) -> None:
        """End the request before it is queued, or between two rounds.

        `interrupt_if_expired` raises the error of the first call.
        """
        if self.expired is not None:
            return
        self.expired = error
        if self._waiting is not None:
            self._waiting.reschedule(0.0)

    @property
    def age_s(self) -> float:
        return self._clock() - self.admitted

    @property
    def generated_tokens(self) -> int:
        """Tokens delivered to the reader."""
        return sum([stream.delivered for stream in self.streams])

    @property
    def drafted_tokens(self) -> int:
        """Drafts that steps verified, see `drafting/`."""
        return sum(choice.seq.drafted for choice in self.choices)

    @property
    def kept_drafts(self) -> int:
        """Drafts that the answers contain."""
        return sum(choice.seq.kept_drafts for choice in self.choices)

    @property
    def times(self) -> Times:
        started = first = last = None
        for choice in self.choices:
            if choice.started is not None and (started is None or choice.started < started):
                started = choice.started
            if choice.first is not None:
                first = choice.first if first is None else min(first, choice.first)
                last = choice.last if last is None else max(last, choice.last)
        before, first_before = self._began
        return Times(
            admitted=self.admitted,
            started=started if before is None else before,
            first=first if first_before is None else first_before,
            last=last,
        )

    @property
    def preemptions(self) -> int:
        return sum([choice.seq.preemptions for choice in self.choices])

    def stages(self) -> dict[str, float]:
        """Return the milliseconds of each stage up to now: preparing, waiting, prefill, decoding, sending."""
        times, now = self.times, self._clock()
        submitted = min((choice.submitted for choice in self.choices), default=now)
        ends = [min(submitted, times.started or now), times.started or now, times.first or now, times.last or now, now]
        names = ("prepare_ms", "queue_ms", "prefill_ms", "decode_ms", "send_ms")
        return {
            name: round((end - start) * 1e3, 1)
            for name, (start, end) in zip(names, pairwise((self.admitted, *ends)), strict=True)
        }

    def summary(self) -> dict[str, Any]:
        """Return the access log's fields: tokens, milliseconds, and how the first choice ended."""
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
            "total_ms": round(self.age_s * 1e3, 1),
            "finish": finish.value if isinstance(finish, FinishReason) else self.departure,
        }


def _milliseconds(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1e3, 1)
