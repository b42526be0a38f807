"""How an answer goes out: as events while it is made, or gathered into one body."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from aiohttp import web

from infd.http.service import EXCHANGE, SERVICE
from infd.http.sse import DONE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infd.http.answer import Answer, Part
    from infd.http.formats.base import Format
    from infd.http.sse import EventStream
    from infd.offload import Offload

# Explaining so many tokens, each with 20 alternatives, takes about 4 ms.
SHORT_EXPLANATION: Final = 128


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
        return json(await offload(format.whole, parts) if _is_long(parts) else format.whole(parts))
    # A task of its own is woken for each token without going down through every middleware to get there.
    await asyncio.ensure_future(_stream(answer, format, events, offload))
    await events.close()
    return events.response


async def _stream(answer: Answer, format: Format, events: EventStream, offload: Offload) -> None:
    async for parts in answer:
        news = await offload(format.events, parts) if _is_long(parts) else format.events(parts)
        if news:
            await events.send(news)
    await events.send(format.closing_events() + DONE)


def _is_long(parts: list[Part]) -> bool:
    """Say whether to put parts into words off the loop: a long prompt may be explained token by token."""
    explained = 0
    for part in parts:
        if part.logprobs or part.prompt_logprobs:
            explained += len(part.logprobs) + len(part.prompt_logprobs or ())
    return explained > SHORT_EXPLANATION
