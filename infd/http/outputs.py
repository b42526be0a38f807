"""The outputs of an answer: consumers of its deltas, which send events or collect one body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from infd.http.gathering import ROUTED_BYTES, Gathering

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from infd.http.answer import Answer, ChoiceDelta
    from infd.http.exchange import Events
    from infd.http.formats.base import Format
    from infd.http.generation import Generation
    from infd.http.pieces import Pieces
    from infd.offload import Offload
    from infd.request import TokenLogprobs

# Encoding the log-probabilities of this many tokens, each with 20 alternatives, takes about 4 ms. Longer lists are
# encoded on a thread.
SHORT_LOGPROBS: Final = 128


class Output(Protocol):
    """The consumer of an answer's deltas."""

    def consume(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Consume new tokens during their delivery, without waking the task that reads the answer (`Consumer`)."""

    async def add(self, deltas: list[ChoiceDelta]) -> None: ...

    async def end(self) -> Pieces:
        """Finish the answer. Return the body; an empty list if the answer was streamed."""


class Stream:
    """The output of a streamed answer, which sends each delta as events."""

    def __init__(
        self,
        answer: Answer,
        format: Format,
        events: Events,
        offload: Offload,
        before_end: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._answer = answer
        self._format = format
        self._events = events
        self._offload = offload
        self._before_end = before_end

    def consume(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        if not self._events.writable:
            return False
        if events := self._format.events(self._answer.delta(index, token_ids, logprobs)):
            self._events.write(b"".join(events))
        return True

    async def add(self, deltas: list[ChoiceDelta]) -> None:
        if _count_logprobs(deltas) > SHORT_LOGPROBS:
            await self._events.send_pieces(await self._offload(self._encode, deltas))
        elif events := self._encode(deltas):
            await self._events.send(b"".join(events))

    async def end(self) -> Pieces:
        if self._before_end is not None:
            await self._before_end()
        if last := self._format.last_events():
            await self._events.send(last)
        return []

    def _encode(self, deltas: list[ChoiceDelta]) -> Pieces:
        return [piece for delta in deltas for piece in self._format.events(delta)]


class Folded:
    """The output of a whole answer whose format builds it from the events of a stream, which are dropped."""

    def __init__(self, answer: Answer, format: Format) -> None:
        self._answer = answer
        self._format = format

    def consume(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        self._format.events(self._answer.delta(index, token_ids, logprobs))
        return True

    async def add(self, deltas: list[ChoiceDelta]) -> None:
        for delta in deltas:
            self._format.events(delta)

    async def end(self) -> Pieces:
        return self._format.whole(())


class Body:
    """The output of a whole answer, which collects all deltas into one body."""

    def __init__(self, answer: Answer, format: Format, generation: Generation, offload: Offload) -> None:
        self._answer = answer
        self._format = format
        self._generation = generation
        self._offload = offload
        self._gathering = Gathering(generation.total_choices, format.encode_logprobs)

    def consume(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        self._gathering.add([self._answer.delta(index, token_ids, logprobs)])
        return True

    async def add(self, deltas: list[ChoiceDelta]) -> None:
        if self._gathering.tokens_to_encode(deltas) > SHORT_LOGPROBS:
            await self._offload(self._gathering.add, deltas)
        else:
            self._gathering.add(deltas)

    async def end(self) -> Pieces:
        if self._gathering.unencoded_tokens > SHORT_LOGPROBS:
            return await self._offload(self._whole)
        return self._whole()

    def _whole(self) -> Pieces:
        return self._format.whole(self._gathering.finish(self._generation.choices, self._generation.returned))


def _count_logprobs(deltas: list[ChoiceDelta]) -> int:
    """Return the number of tokens with log-probabilities in these deltas, prompt tokens included.

    Encoding experts counts as encoding the log-probabilities of a token for each ROUTED_BYTES.
    """
    scored_tokens = 0
    for delta in deltas:
        scored_tokens += len(delta.logprobs)
        if delta.prompt is not None:
            scored_tokens += len(delta.prompt.scores)
        if delta.routed is not None:
            scored_tokens += len(delta.routed.values) // ROUTED_BYTES
    return scored_tokens
