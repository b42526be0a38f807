"""The buffers between the engine and a caller: one stream per choice.

The engine pushes tokens; the caller reads deltas at its own pace. A slow caller
receives several tokens in one delta and never blocks the engine. A caller with more
than PENDING_BYTES unread is paused: no further steps are computed for the caller.
Most callers wait for the next tokens; such a caller may consume tokens during the
push, without buffering. Each stream ends with exactly one terminal event.
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

    from infd.request import Pooled, RoutedExperts, TokenLogprobs
    from infd.scheduler.routing import Routing


# A caller is paused if its choices have more unread bytes. Steps in flight at the pause add further bytes, and the
# request's handler buffers about PENDING_BYTES more, as Structs and encoded events.
PENDING_BYTES: Final = 64 * 2**10
# Approximate sizes: a token with its text; its log-probability; an alternative token with its log-probability.
TOKEN_BYTES: Final = 64
LOGPROB_BYTES: Final = 256
TOP_LOGPROB_BYTES: Final = 72


class Watcher(Protocol):
    """Reads a choice's tokens as they are pushed, and ends the choice at a stop string."""

    def feed(self, token_ids: list[int]) -> int | None:
        """Return the number of tokens up to the end of a stop string; None if no stop string ends in these tokens.

        The end id that finishes a choice is not fed.
        """


class Consumer(Protocol):
    """Called with the new tokens of an unfinished choice while its caller waits for a delta."""

    def __call__(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Return whether the tokens were consumed. If not, they are buffered and the caller is woken."""


class Delta(Struct):
    """The tokens pushed since the caller read the previous delta, and the choice's end.

    token_ids        tokens; if an end id finished the choice, the last is this end id
    logprobs         one per token, if requested
    finish           set in the last delta only
    stop_id          the end id that finished the choice; None: another reason
    error            set if finish is ERROR
    prompt_logprobs  log-probabilities of all prompt tokens but the first, if requested; in the first delta of
                     a request's first choice
    pooled           the numbers of the prompt, if requested; in the choice's only delta
    routed           the experts of all tokens but the last, if requested; in the last delta only
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None = None
    stop_id: int | None = None
    error: Exception | None = None
    prompt_logprobs: Many[TokenLogprobs] = ()
    pooled: Pooled | None = None
    routed: RoutedExperts | None = None


class Stream:
    """The buffer of one choice.

    routing  the experts of the choice's tokens, which the scheduler gathers; None: not requested
    """

    __slots__ = ("_bytes", "_pending", "delivered", "finish", "inbox", "index", "routing", "watcher")

    def __init__(self, inbox: Inbox, index: int, watcher: Watcher | None) -> None:
        self.index = index
        self.watcher = watcher
        self.routing: Routing | None = None
        self.finish: FinishReason | None = None
        self.delivered = 0  # tokens delivered so far
        self.inbox = inbox
        self._pending: Delta | None = None
        self._bytes = 0  # approximate size of the pending delta

    def push(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish: FinishReason | None = None,
        prompt_logprobs: Many[TokenLogprobs] = (),
    ) -> bool:
        """Push new tokens. Return True if the watcher ended the stream at a stop string.

        prompt_logprobs  in the first push only
        """
        if self.finish is not None:
            return False
        if prompt_logprobs:
            self._append([], [], None, prompt_logprobs=prompt_logprobs)
        stop_id = token_ids[-1] if finish is FinishReason.STOP and token_ids else None
        if self.watcher is not None:
            used = self.watcher.feed(token_ids if stop_id is None else token_ids[:-1])
            if used is not None:
                self.delivered += used
                self._append(token_ids[:used], logprobs[:used], FinishReason.STOP)
                return True
        self.delivered += len(token_ids)
        if finish is not None or not self.inbox.consume(self.index, token_ids, logprobs):
            self._append(token_ids, logprobs, finish, stop_id=stop_id)
        return False

    def end(self, finish: FinishReason, error: Exception | None = None) -> None:
        """End without further tokens. Does nothing if the stream has ended."""
        if self.finish is None:
            self._append([], [], finish, error=error)

    def push_pooled(self, pooled: Pooled) -> None:
        """Push the numbers of the prompt, which end the stream. Does nothing if the stream has ended."""
        if self.finish is None:
            self._append([], [], FinishReason.STOP, pooled=pooled)

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
        pooled: Pooled | None = None,
    ) -> None:
        self.finish = finish
        added = TOKEN_BYTES * len(token_ids)
        if logprobs or prompt_logprobs:
            added += sum(LOGPROB_BYTES + TOP_LOGPROB_BYTES * len(token.top) for token in (*prompt_logprobs, *logprobs))
        if pooled is not None:
            added += len(pooled.values)
        routed = self.routing.report(self.delivered) if self.routing is not None and finish is not None else None
        if routed is not None:
            added += len(routed.values)
        self._bytes += added
        self.inbox.pending_bytes += added
        pending = self._pending
        if pending is None:
            self._pending = Delta(token_ids, logprobs, finish, stop_id, error, prompt_logprobs, pooled, routed)
            self.inbox.announce(self.index)
        else:
            pending.token_ids = pending.token_ids + token_ids
            pending.logprobs = pending.logprobs + logprobs
            pending.finish, pending.stop_id, pending.error, pending.routed = finish, stop_id, error, routed


class Inbox:
    """Notifies the caller of one ticket's streams. Streams share the inbox, not references to each other.

    pending        indices of the streams with a pending delta, longest pending first
    waiter         resolved when a stream has a delta
    consumer       receives tokens before they are buffered; set only within `Choices.consumed_by`, because the
                   consumer refers to all streams
    pending_bytes  approximate size of all pending deltas
    """

    __slots__ = ("consumer", "pending", "pending_bytes", "waiter")

    def __init__(self) -> None:
        self.pending: deque[int] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.consumer: Consumer | None = None
        self.pending_bytes = 0

    @property
    def full(self) -> bool:
        """Whether more than PENDING_BYTES are unread."""
        return self.pending_bytes > PENDING_BYTES

    def consume(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Offer tokens to the consumer, if the caller waits; return whether they were consumed.

        A caller waits only while no delta is pending.
        """
        if self.consumer is None or self.waiter is None or self.waiter.done():
            return False
        return self.consumer(index, token_ids, logprobs)

    def announce(self, index: int) -> None:
        self.pending.append(index)
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Choices:
    """All choices of one ticket, iterated as (index, Delta) until each has ended.

    Indices count the choices of the first request, then of the next request, in the order submitted.
    """

    def __init__(self, watchers: Many[Watcher | None], on_resume: Callable[[], None]) -> None:
        """on_resume: called when a paused caller has read enough to continue."""
        self._inbox = Inbox()
        self.streams = [Stream(self._inbox, index, watcher) for index, watcher in enumerate(watchers)]
        self._open = len(self.streams)
        self._on_resume = on_resume

    @property
    def paused(self) -> bool:
        """Whether the caller is paused: more than PENDING_BYTES are unread."""
        return self._inbox.full

    @property
    def ready(self) -> bool:
        """Whether a delta is pending. A caller can thus read all deltas of one step without waiting."""
        return bool(self._inbox.pending)

    def __aiter__(self) -> Choices:
        return self

    @contextmanager
    def consumed_by(self, consumer: Consumer) -> Iterator[None]:
        """Within this block, offer tokens to `consumer` before buffering them and waking the caller."""
        self._inbox.consumer = consumer
        try:
            yield
        finally:
            self._inbox.consumer = None

    async def __anext__(self) -> tuple[int, Delta]:
        while not self._inbox.pending:
            await self.next_delta()
        return self.take()

    def next_delta(self) -> asyncio.Future[None]:
        """Return a future that resolves once a delta is pending. Raises StopAsyncIteration once all choices ended."""
        if not self._open:
            raise StopAsyncIteration
        inbox = self._inbox
        inbox.waiter = asyncio.get_running_loop().create_future()
        if inbox.pending:
            inbox.waiter.set_result(None)
        return inbox.waiter

    def take(self) -> tuple[int, Delta]:
        """Return the index and delta of the stream that has waited longest. Call only while `ready`."""
        stream, was_paused = self.streams[self._inbox.pending.popleft()], self.paused
        delta = stream.take()
        if was_paused and not self.paused:
            self._on_resume()
        if delta.finish is not None:
            self._open -= 1
        return stream.index, delta
