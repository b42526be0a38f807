"""Receive and decode a request's body.

`read` checks the size; `json_body` then checks nesting and types. Each chunk extends the body's deadline by the time
that the chunk takes at the slowest permitted pace (`server.body_pace`). The total size of all bodies being received is
bounded too, because the queue's limit does not count requests whose bodies are incomplete.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

from infd.errors import BodyTooLarge, InvalidRequest, Overloaded
from infd.http import connection, expectations
from infd.http.json_body import decode

if TYPE_CHECKING:
    import msgspec

    from infd.http.routing import Request
    from infd.http.service import Service

T = TypeVar("T")

# Decoding a body up to this size takes less time than passing the body to a thread.
SMALL_BYTES: Final = 64 * 2**10


async def read(request: Request, decoder: msgspec.json.Decoder[T]) -> tuple[T, int]:
    """Return the decoded body and its size in bytes. Raises InvalidRequest, BodyTooLarge, Overloaded."""
    service = request.service
    depth = service.config.limits.json_depth
    data = bytearray()
    try:
        await _receive(request, data, service)
        if len(data) <= SMALL_BYTES:
            return decode(data, decoder, depth), len(data)
        return await service.offload(decode, data, decoder, depth), len(data)
    finally:
        service.bodies_bytes -= len(data)


async def _receive(request: Request, data: bytearray, service: Service) -> None:
    """Append each chunk of the body to `data`; add the chunk's size to `service.bodies_bytes`. Raises RequestError."""
    server, content = service.config.server, request.content
    # Compressed bodies are refused, because a few kilobytes can decompress to gigabytes.
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InvalidRequest("a compressed body is not accepted: send it without Content-Encoding")
    most = service.largest_body_bytes
    if (request.content_length or 0) > most:
        raise BodyTooLarge(f"the body is larger than {most} bytes")
    await expectations.send_continue(request)

    def add(chunk: bytes) -> None:
        data.extend(chunk)
        service.bodies_bytes += len(chunk)
        if len(data) > most:
            raise BodyTooLarge(f"the body is larger than {most} bytes")
        if service.bodies_bytes > server.max_bodies_bytes:
            raise Overloaded("too many large bodies are arriving at once", code="too_many_bodies")

    if content.is_eof() and content.exception() is None:  # the body has arrived with the headers
        add(content.read_nowait())
        return
    client = connection.of(request)
    client.mark_idle()
    deadline = asyncio.get_running_loop().time() + server.body_timeout_s
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            async for chunk in content.iter_any():
                add(chunk)
                timeout.reschedule(deadline + len(data) / server.body_pace)
    except TimeoutError:
        raise InvalidRequest(
            f"the body did not arrive within {server.body_timeout_s:g} s, nor at {server.body_pace} bytes a second",
            code="body_timeout",
        ) from None
    finally:
        client.mark_busy()
