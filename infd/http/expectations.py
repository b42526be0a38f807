"""`Expect: 100-continue`: a client that sends this header waits for permission to send its body.

infd grants permission when a route's handler reads the body: after the API key is checked and the request id assigned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp.http import HttpVersion11

from infd.errors import UnknownExpectation

if TYPE_CHECKING:
    from aiohttp import web

_CONTINUE: Final = "100-continue"


def check(request: web.BaseRequest) -> None:
    """Raise UnknownExpectation for an expectation other than 100-continue. HTTP/1.0 defines no expectations."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", _CONTINUE).lower() != _CONTINUE:
        raise UnknownExpectation(f"the only expectation known here is {_CONTINUE}")


async def send_continue(request: web.BaseRequest) -> None:
    """Send `100 Continue` if the client waits for permission to send its body."""
    if request.version >= HttpVersion11 and "Expect" in request.headers:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # `100 Continue` is not part of the response
