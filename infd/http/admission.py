"""Refuse inference requests before their bodies are read.

Under overload a refusal costs one check of the queue's length, because infd does not receive, decode or render the
body.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

from infd.errors import NotReady, Overloaded

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.routing import Handler, Request


def guarded(handler: Handler) -> Handler:
    """Return a handler that checks the API key's cap on requests in flight, the queue and the key's rates.

    The returned handler then calls `handler`. It raises NotReady, Overloaded, RateLimited.
    """

    @wraps(handler)
    async def admit(request: Request) -> web.StreamResponse:
        service, exchange = request.service, request.exchange
        try:
            with exchange.place as place, exchange.held:
                if (key := exchange.key) is not None and key.in_flight is not None:
                    place.enter_context(service.in_flight.hold(key.name, key.in_flight))
                service.engine.require_room(exchange.account.tenant)
                exchange.account.enter()
                return await handler(request)
        except (Overloaded, NotReady):
            exchange.account.usage.refused += 1
            raise

    return admit
