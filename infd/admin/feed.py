"""Stream a feed's items to subscribers, one JSON object per line.

Lines that a subscriber has not read wait in the transport's and the socket's buffers. The server drops a subscriber
that does not read for WRITE_TIMEOUT_S, and refuses a subscriber beyond MAX_SUBSCRIBERS.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from infd.admin import connection
from infd.admin.commands import Refused
from infd.admin.protocol import FEED_TYPE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

log = logging.getLogger("infd.admin")

WRITE_TIMEOUT_S: Final = 30.0
MAX_SUBSCRIBERS: Final = 16  # less than MAX_CONNECTIONS, so that subscribers leave connections for verbs


class Feeds:
    """Sends feeds to subscribers, and limits the number of open subscriptions."""

    def __init__(self) -> None:
        self.open = 0

    async def send(self, request: web.Request, items: AsyncGenerator[msgspec.Struct, None]) -> web.StreamResponse:
        """Stream `items` until they end or the subscriber disconnects. Raises Refused beyond MAX_SUBSCRIBERS."""
        if self.open >= MAX_SUBSCRIBERS:
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                "crowded",
                f"{MAX_SUBSCRIBERS} subscribers are connected already; end one of them, or ask again",
            )
        client = connection.of(request)
        response = web.StreamResponse(headers={"Content-Type": FEED_TYPE})
        self.open += 1
        try:
            # Other answers are finished after a disconnect; a feed may never end, so its task is cancelled.
            client.cancel_on_close(asyncio.current_task())
            await response.prepare(request)
            async with aclosing(items):
                async for item in items:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await response.write(msgspec.json.encode(item) + b"\n")
        except TimeoutError:
            log.warning("a subscriber does not read and is dropped", extra={"path": request.rel_url.raw_path})
            client.drop()
        finally:
            self.open -= 1
            client.cancel_on_close(None)
        return response
