"""How an answer goes out: as events while it is made, or gathered into one body."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.payload import Payload

from infd.http.pieces import joined
from infd.http.service import EXCHANGE, SERVICE
from infd.http.sse import DONE, HIGH_WATER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.abc import AbstractStreamWriter

    from infd.http.answer import Answer, Part
    from infd.http.formats.base import Format
    from infd.http.pieces import Pieces
    from infd.http.sse import EventStream
    from infd.offload import Offload
    from infd.request import TokenLogprobs

# Explaining so many tokens, each with 20 alternatives, takes about 4 ms.
SHORT_EXPLANATION: Final = 128


class Body(Payload):
    """JSON that is written piece by piece, no faster than it is read. Its length is known before."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces, content_type="application/json")
        self._size = sum(map(len, pieces))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in joined(self._value, HIGH_WATER):
            for start in range(0, len(piece), HIGH_WATER):
                await writer.drain()
                await writer.write(piece[start : start + HIGH_WATER])


def json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


@asynccontextmanager
async def promised(request: web.Request, *, stream: bool) -> AsyncIterator[EventStream | None]:
    """Open an answer's stream of events, if it is one, before there is a place in the queue for it.

    Whoever waits for long, at the door as in the queue, hears from us. What is raised once that has begun is told in
    the stream, see `middleware.explain`.
    """
    if not stream:
        yield None
        return
    with request.app[SERVICE].streams.open(request) as events:
        request[EXCHANGE].events = events
        yield events


async def answer(
    request: web.Request, answer: Answer, format: Format, events: EventStream | None
) -> web.StreamResponse:
    """Send a whole answer, through `events` where it was promised so. Raises what ended it in an error."""
    offload = request.app[SERVICE].offload
    if events is None:
        parts = await answer.gather()
        if not _is_long(parts):
            return json(b"".join(format.whole(parts)))
        return web.Response(body=Body(await offload(format.whole, parts)))
    # A task of its own is woken for each token without going down through every middleware to get there.
    await asyncio.ensure_future(_stream(answer, format, events, offload))
    await events.close()
    return events.response


async def _stream(answer: Answer, format: Format, events: EventStream, offload: Offload) -> None:
    def write(index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Write while the reader keeps up, without waking this task for each token."""
        if not events.writable:
            return False
        if news := format.events(answer.part(index, token_ids, logprobs)):
            events.write(b"".join(news))
        return True

    # What a step brings to several choices goes out in one write.
    with answer.offered(write) if answer.single else nullcontext():
        async for parts in answer:
            if _is_long(parts):
                await events.send_pieces(await offload(_events, format, parts))
            elif news := _events(format, parts):
                await events.send(b"".join(news))
    await events.send(format.closing_events() + DONE)


def _events(format: Format, parts: list[Part]) -> Pieces:
    return [piece for part in parts for piece in format.events(part)]


def _is_long(parts: list[Part]) -> bool:
    """Say whether to put parts into words off the loop: a long prompt may be explained token by token."""
    explained = 0
    for part in parts:
        explained += len(part.logprobs)
        if part.opening is not None:
            explained += len(part.opening.scores)
    return explained > SHORT_EXPLANATION
