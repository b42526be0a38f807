"""How an answer goes out: as events while it is made, or gathered into one body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web

from infd.http import failure
from infd.http.service import EXCHANGE, SERVICE
from infd.http.sse import DONE, event

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.http.answer import Answer, Part
    from infd.http.formats.base import Format

# Explaining so many tokens, each with 20 alternatives, takes about 4 ms.
SHORT_EXPLANATION: Final = 128


def json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


async def answer(request: web.Request, answer: Answer, format: Format, *, stream: bool) -> web.StreamResponse:
    """Send a whole answer. Raises what ended it in an error, unless the client has read a part of it already."""
    if not stream:
        return json(await _write(request, format.whole, await answer.gather()))
    with request.app[SERVICE].streams.open(request) as events:
        try:
            async for parts in answer:
                if news := await _write(request, format.events, parts):
                    await events.send(news)
            await events.send(format.closing_events() + DONE)
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


async def _write(request: web.Request, write: Callable[[list[Part]], bytes], parts: list[Part]) -> bytes:
    """Put parts into words, off the loop where that takes long: a long prompt may be explained token by token."""
    explained = sum(len(part.logprobs) + len(part.prompt_logprobs or ()) for part in parts)
    return write(parts) if explained <= SHORT_EXPLANATION else await request.app[SERVICE].offload(write, parts)
