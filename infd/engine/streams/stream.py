"""The buffers between the engine and a caller: one stream per choice.

The engine pushes tokens, the caller takes them at its own pace. A slow caller
gets several tokens in one delta and never holds up the engine; for a caller
that has fallen behind (PENDING_BYTES), no further steps are computed. A caller
that waits may take tokens during the push, unbuffered: most tokens go that way.
Each stream ends with exactly one terminal event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Many

    from infd.request import TokenLogprobs


# Pending for one caller, all choices together, before it counts as behind. The step or two committed until then come on
# top, and as much again is in its handler, as Structs and as the bytes of events.
PENDING_BYTES: Final = 64 * 2**10
# Approximate sizes: of a token with its text; of its log-probability; of one alternative to it.
TOKEN_BYTES: Final = 64
LOGPROBS_BYTES: Final = 256
LIKELY_BYTES: Final = 72


class Watcher(Protocol):
    """Reads a choice's tokens as they are pushed, and may end the choice: stop strings."""

    def feed(self, token_ids: list[int]) -> int | None:
        """Return how many of these tokens complete a stop, or None if they complete none.

        The end id that finishes a choice is not fed.
        """


class Taker(Protocol):
    """Called with the new tokens of an unfinished choice while its caller waits for news."""

    def __call__(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Return whether the tokens are taken. If not, they are buffered and the caller is woken."""


class Delta(Struct):
    """What was pushed since the caller last took a delta.

    token_ids        with the end id that finished the choice, if one did
    logprobs         one per token, if asked for
    finish           set in the last delta only
    stop_id          the end id that finished the choice
    error            set where finish is ERROR
    prompt_logprobs  of all prompt tokens but the first, if asked for, in the first delta of the first choice
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None = None
    stop_id: int | None = None
    error: Exception | None = None
    prompt_logprobs: Many[TokenLogprobs] = ()


class Stream:
    """The buffer of one choice."""

    __slots__ = ("_bytes", "_pending", "delivered", "finish", "inbox", "index", "watcher")

    def __init__(self, inbox: Inbox, index: int, watcher: Watcher | None) -> None:
        self.index = index
        self.watcher = watcher
        self.finish: FinishReason | None = None
        self.delivered = 0  # tokens
        self.inbox = inbox
        self._pending: Delta | None = None
        self._bytes = 0  # about the size of the pending delta

    def push(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish: FinishReason | None = None,
        prompt_logprobs: Many[TokenLogprobs] = (),
    ) -> bool:
        """Push new tokens. Return True if the watcher found a stop in them, which ends the stream there.

        prompt_logprobs  in the first push only
        """
        if self.finish is not None:
            return False
        if prompt_logprobs:
            self._append([], [], None, prompt_logprobs=prompt_logprobs)
        stop_id = token_ids[-1] if finish is FinishReason.STOP else None
        if self.watcher is not None:
            used = self.watcher.feed(token_ids if stop_id is None else token_ids[:-1])
            if used is not None:
                self.delivered += used
                self._append(token_ids[:used], logprobs[:used], FinishReason.STOP)
                return True
        self.delivered += len(token_ids)
        if finish is not None or not self.inbox.taken(self.index, token_ids, logprobs):
            self._append(token_ids, logprobs, finish, stop_id=stop_id)
        return False

    def end(self, finish: FinishReason, error: Exception | None = None) -> None:
        """End without further tokens. Does nothing if the stream has ended."""
        if self.finish is None:
            self._append([], [], finish, error=error)

    def take(self) -> Delta:
        """Return and clear the pending delta."""
        delta, self._pending = self._pending, None
        assert delta is not None
        self.inbox.pending_bytes -= self._bytes
        self._bytes = 0
        return delta

    def _append(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish: FinishReason | None,
        *,
        stop_id: int | None = None,
        error: Exception | None = None,
        prompt_logprobs: Many[TokenLogprobs] = (),
    ) -> None:
        self.finish = finish
        added = TOKEN_BYTES * len(token_ids)
        if logprobs or prompt_logprobs:
            added += sum(LOGPROBS_BYTES + LIKELY_BYTES * len(each.top) for each in (*prompt_logprobs, *logprobs))
        self._bytes += added
        self.inbox.pending_bytes += added
        pending = self._pending
        if pending is None:
            self._pending = Delta(token_ids, logprobs, finish, stop_id, error, prompt_logprobs)
            self.inbox.announce(self.index)
        else:
            pending.token_ids = pending.token_ids + token_ids
            pending.logprobs = pending.logprobs + logprobs
            pending.finish, pending.stop_id, pending.error = finish, stop_id, error


class Inbox:
    """How the streams of one ticket notify their caller. Shared by all streams, so that none refers to the others.

    news           indices of the streams with a pending delta, in order
    waiter         resolves with the next news
    taker          takes tokens unbuffered; it refers to all streams, so it is set only within `Choices.offered`
    pending_bytes  about the size of all pending deltas
    """

    __slots__ = ("news", "pending_bytes", "taker", "waiter")

    def __init__(self) -> None:
        self.news: deque[int] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.taker: Taker | None = None
        self.pending_bytes = 0

    @property
    def full(self) -> bool:
        """Whether the caller has fallen behind: a caller that keeps up never leaves as much."""
        return self.pending_bytes > PENDING_BYTES

    def taken(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Offer tokens to the taker if the caller waits; it waits only when all deltas are taken."""
        if self.taker is None or self.waiter is None or self.waiter.done():
            return False
        return self.taker(index, token_ids, logprobs)

    def announce(self, index: int) -> None:
        self.news.append(index)
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Choices:
    """All choices of one ticket, iterated as (index, Delta) until each has ended.

    Indices count choice after choice, request after request, in the order submitted.
    """

    def __init__(self, watchers: Many[Watcher | None], on_relief: Callable[[], None]) -> None:
        """on_relief: called when a caller that had fallen behind has caught up."""
        self._inbox = Inbox()
        self.streams = [Stream(self._inbox, index, watcher) for index, watcher in enumerate(watchers)]
        self._open = len(self.streams)
        self._on_relief = on_relief

    @property
    def too_much(self) -> bool:
        """Whether the caller has fallen behind, so that no further steps are computed for it."""
        return self._inbox.full

    @property
    def ready(self) -> bool:
        """Whether a delta is pending, so that a caller can gather all deltas of one step."""
        return bool(self._inbox.news)

    def __aiter__(self) -> Choices:
        return self

    @contextmanager
    def offered(self, taker: Taker) -> Iterator[None]:
        """Within this block, offer tokens to `taker` before buffering them and waking the caller."""
        self._inbox.taker = taker
        try:
            yield
        finally:
            self._inbox.taker = None

    async def __anext__(self) -> tuple[int, Delta]:
        while not self._inbox.news:
            await self.news()
        return self.take()

    def news(self) -> asyncio.Future[None]:
        """Return a future that resolves with the next delta. Raises StopAsyncIteration once every choice has ended."""
        if not self._open:
            raise StopAsyncIteration
        inbox = self._inbox
        inbox.waiter = asyncio.get_running_loop().create_future()
        if inbox.news:
            inbox.waiter.set_result(None)
        return inbox.waiter

    def take(self) -> tuple[int, Delta]:
        """Return a pending delta, as the iteration does. Call it only while `ready`."""
        stream, behind = self.streams[self._inbox.news.popleft()], self.too_much
        delta = stream.take()
        if behind and not self.too_much:
            self._on_relief()
        if delta.finish is not None:
            self._open -= 1
        return stream.index, delta
