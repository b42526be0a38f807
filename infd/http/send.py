"""How an answer goes out: as events while it is made, or gathered into one body."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp import web

from infd.http import failure
from infd.http.service import EXCHANGE, SERVICE
from infd.http.sse import DONE, event

if TYPE_CHECKING:
    from infd.http.answer import Answer, Part
    from infd.http.formats.base import Format
    from infd.http.sse import EventStream
    from infd.offload import Offload

# Explaining so many tokens, each with 20 alternatives, takes about 4 ms.
SHORT_EXPLANATION: Final = 128


def json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


async def answer(request: web.Request, answer: Answer, format: Format, *, stream: bool) -> web.StreamResponse:
    """Send a whole answer. Raises what ended it in an error, unless the client has read a part of it already."""
    offload = request.app[SERVICE].offload
    if not stream:
        parts = await answer.gather()
        return json(await offload(format.whole, parts) if _is_long(parts) else format.whole(parts))
    with request.app[SERVICE].streams.open(request) as events:
        try:
            # A task of its own is woken for each token without going down through every middleware to get there.
            await asyncio.ensure_future(_stream(answer, format, events, offload))
        except ConnectionError:
            raise
        except Exception as error:
            if not events.begun:
                raise
            exchange = request[EXCHANGE]
            told = exchange.error = failure.translate(error, exchange)
            await events.send(event(failure.body(told)) + DONE)
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
