"""The routes that generate text: decode an API's request, send its answer whole or as events."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from infd.http import failure, send
from infd.http.admission import guarded
from infd.http.body import read
from infd.http.generate import generate
from infd.http.schema.sampling import GenerationFields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from infd.http.apis.api import Api
    from infd.http.exchange import Events
    from infd.http.routing import Handler, Request

Fields = TypeVar("Fields", bound=GenerationFields)


def answering(api: Api[Fields]) -> Handler:
    """Return the handler of the route that generates text in an API's format."""

    async def answer(request: Request) -> web.StreamResponse:
        service, exchange = request.service, request.exchange
        body, size = await read(request, api.decoder)
        generation = api.generation(body, size, service.config)
        format_of = partial(api.format, body)
        work = partial(generate, generation, format_of, exchange, service)
        return await stream(request, work) if body.stream else send.body(await work(), exchange.held)

    return guarded(answer)


async def stream(request: Request, work: Callable[[Events], Awaitable[object]]) -> web.StreamResponse:
    """Answer with the events that `work` sends. The stream opens before the request is queued, so that the client
    receives headers and pings while the request waits in the queue or for a sleeping engine.
    """
    service, exchange = request.service, request.exchange
    with service.streams.open(request) as events:
        try:
            await work(events)
        except ConnectionError:
            raise
        except Exception as error:
            if not events.begun:
                raise
            exchange.error = failure.translate(error, exchange)
            if not exchange.queued:
                failure.count(exchange.error, service.metrics)
            await events.send(exchange.errors.error_events(exchange.error))
        await events.close()
        return events.response
