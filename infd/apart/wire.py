"""Frames between the daemon and its worker: a length in four bytes, and so many bytes of msgpack."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec import Raw, Struct

if TYPE_CHECKING:
    import socket

M = TypeVar("M", bound=Struct)
LARGEST_FRAME: Final = 2**29  # bytes; a tokenizer.json has up to 2**28
_LENGTH: Final = struct.Struct(">I")


class Order(Struct):
    """A task, and the seconds after which the worker ends itself."""

    task: Raw
    seconds: float


class Reply(Struct, omit_defaults=True):
    """What came of a task: its result; or an error that its own text is to blame for; or one that nobody expected.

    refused  the name of the error in infd.errors
    """

    result: Raw = Raw(b"\xc0")
    refused: str = ""
    failed: bool = False
    message: str = ""
    param: str | None = None


class Closed(Exception):
    """The other end is gone."""


class Late(Exception):
    """A frame did not come in time."""


def send(connection: socket.socket, message: Struct, deadline: float | None = None) -> None:
    """Raises Closed, and Late after the deadline (time.monotonic)."""
    data = msgspec.msgpack.encode(message)
    if len(data) > LARGEST_FRAME:
        raise ValueError(f"a frame of {len(data)} bytes")
    try:
        connection.settimeout(_left(deadline))
        connection.sendall(_LENGTH.pack(len(data)) + data)
    except TimeoutError:
        raise Late from None
    except OSError:
        raise Closed from None


def receive(connection: socket.socket, kind: type[M], deadline: float | None = None) -> M:
    """Raises Closed, Late, and msgspec.MsgspecError for what is no such message."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if length > LARGEST_FRAME:
        raise Closed
    return msgspec.msgpack.decode(_exactly(connection, length, deadline), type=kind)


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytearray:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        try:
            connection.settimeout(_left(deadline))
            read = connection.recv_into(view[at:])
        except TimeoutError:
            raise Late from None
        except OSError:
            raise Closed from None
        if not read:
            raise Closed
        at += read
    return data


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.001, deadline - time.monotonic())
