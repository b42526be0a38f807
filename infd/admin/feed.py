"""How news reach operators who read along: one JSON object a line.

A line waits for its reader, in what the kernel and two small buffers hold; one
who takes nothing for SLOW_S is dropped, and so is who would be one too many.
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
from infd.admin.protocol import NEWS_TYPE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

log = logging.getLogger("infd.admin")

SLOW_S: Final = 30.0
MOST: Final = 16  # of the connections that there may be


class Feeds:
    """Those who read along."""

    def __init__(self) -> None:
        self.open = 0

    async def send(self, request: web.Request, news: AsyncGenerator[msgspec.Struct, None]) -> web.StreamResponse:
        """Send news until they end or their reader has gone. Raises Refused."""
        if self.open >= MOST:
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS, "crowded", f"{MOST} read along already; end one of them, or ask again"
            )
        asking = connection.of(request)
        response = web.StreamResponse(headers={"Content-Type": NEWS_TYPE})
        self.open += 1
        try:
            # Other answers are finished though nobody is there any more; this one might never end.
            asking.ends(asyncio.current_task())
            await response.prepare(request)
            async with aclosing(news):
                async for each in news:
                    async with asyncio.timeout(SLOW_S):
                        await response.write(msgspec.json.encode(each) + b"\n")
        except TimeoutError:
            log.warning("who reads along takes nothing and is dropped", extra={"path": request.rel_url.raw_path})
            asking.drop()
        finally:
            self.open -= 1
            asking.ends(None)
        return response
