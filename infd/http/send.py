"""Make responses with JSON bodies; large bodies are sent in slices, and may be encoded while they are sent."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.payload import Payload

from infd.http.pieces import joined
from infd.http.sse import HIGH_WATER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aiohttp.abc import AbstractStreamWriter

    from infd.http.pieces import Pieces


class Body(Payload):
    """A JSON body sent in slices, no faster than the client reads. Has a Content-Length, so it is not chunked."""

    def __init__(self, pieces: Iterator[bytes], size: int) -> None:
        super().__init__(pieces, content_type="application/json")
        self._size = size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise NotImplementedError("the body is sent once, piece by piece")

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._value:
            for start in range(0, len(piece), HIGH_WATER):
                await writer.drain()
                await writer.write(piece[start : start + HIGH_WATER])


class Encoding(Payload):
    """A JSON body that is encoded while it is sent, no faster than the client reads. It has no Content-Length: it is
    chunked, or with HTTP/1.0 ends with the connection.
    """

    def __init__(self, slices: Iterator[bytes]) -> None:
        super().__init__(slices, content_type="application/json")

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise NotImplementedError("the body is not encoded yet")

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._value:
            await writer.drain()
            await writer.write(piece)
            await asyncio.sleep(0)  # encoding a slice takes about a millisecond


def json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def body(pieces: Pieces, held: ExitStack | None = None) -> web.Response:
    """Return a response with a JSON body, sent in slices if larger than HIGH_WATER.

    held  is taken over, and closed once the body is sent or dropped
    """
    size = sum(map(len, pieces))
    slices = joined(pieces, HIGH_WATER)
    if size <= HIGH_WATER:
        return json(b"".join(slices))
    return web.Response(body=Body(_holding(slices, held), size))


def encoded(pieces: Iterable[bytes], held: ExitStack) -> web.Response:
    """Return a response whose JSON body is encoded as `pieces` is iterated: at once if it is at most HIGH_WATER bytes
    long, else while it is sent.

    held  is taken over if the body is encoded while it is sent, and closed once it is sent or dropped
    """
    slices = joined(pieces, HIGH_WATER)
    first = next(slices, b"")
    if len(first) < HIGH_WATER:
        return json(first)
    return web.Response(body=Encoding(_holding(chain([first], slices), held)))


def _holding(slices: Iterable[bytes], held: ExitStack | None) -> Iterator[bytes]:
    """Return an iterator of `slices` that takes over `held`, and closes it behind the last slice or when dropped."""

    def each() -> Iterator[bytes]:
        with ExitStack() if held is None else held.pop_all():
            yield b""  # only a generator that has begun runs its `finally` when it is dropped
            yield from slices

    begun = each()
    next(begun)
    return begun
