"""`Expect: 100-continue`: a client that sends it waits for permission to send its body.

Permission is given when the body is read, after the key was checked. aiohttp would give it before every middleware:
without a key, a request id or an access line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp.http import HttpVersion11

from infd.errors import UnknownExpectation

if TYPE_CHECKING:
    from aiohttp import web

_CONTINUE: Final = "100-continue"


async def unanswered(request: web.Request) -> None:
    """Do nothing: the route's expectation handler, in place of aiohttp's."""


def check(request: web.Request) -> None:
    """Raise UnknownExpectation for any other expectation. HTTP/1.0 has none."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", _CONTINUE).lower() != _CONTINUE:
        raise UnknownExpectation(f"the only expectation known here is {_CONTINUE}")


async def invite(request: web.Request) -> None:
    """Give permission to send the body, if the client waits for it."""
    if request.version >= HttpVersion11 and "Expect" in request.headers:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # this was no part of the answer
