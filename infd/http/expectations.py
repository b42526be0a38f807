"""When a client hears that it may send its body, which it asks with `Expect: 100-continue`.

Not before its key is known. aiohttp would answer ahead of every middleware: no key asked, no request id, no access
line. So no route answers; the reader of the body does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp.http import HttpVersion11

from infd.errors import UnknownExpectation

if TYPE_CHECKING:
    from aiohttp import web

_CONTINUE: Final = "100-continue"


async def unanswered(request: web.Request) -> None:
    """Let the request pass to the middlewares."""


def check(request: web.Request) -> None:
    """Raise UnknownExpectation for any other expectation. HTTP/1.0 has none."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", _CONTINUE).lower() != _CONTINUE:
        raise UnknownExpectation(f"the only expectation known here is {_CONTINUE}")


async def invite(request: web.Request) -> None:
    """Tell a client that waits for it to send its body."""
    if request.version >= HttpVersion11 and "Expect" in request.headers:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer has been sent
