"""The messages between the engine and an executor in another process, and their transport.

Every message is a struct of plain values. The socket preserves the order of frames, as
the device thread's inbox does, so plans, adapters and changes of memory run in
the order in which they were issued. The stream ends when the other process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from msgspec import Struct

from infd import frames
from infd.config import Config
from infd.errors import Fault
from infd.memory import Memory, MemoryPart
from infd.request import Adapter, AdapterFacts
from infd.scheduler.layout import Capacity
from infd.scheduler.plan import StepPlan, StepResult

# Commands to the executor. The answer repeats the `step` or `call` number.


class Start(Struct, tag=True):
    """Load the configured model. Answered by Loaded, or Raised with call 0.

    journal_stream  the daemon's $JOURNAL_STREAM; the worker's log needs it
    """

    config: Config
    journal_stream: str


class Forward(Struct, tag=True):
    step: int
    plan: StepPlan


class Sample(Struct, tag=True):
    """Permit a step to sample. mask: bytes of int32 [rows, ceil(vocab / 32)]; None: all tokens."""

    step: int
    mask: bytes | None = None
    rows: int = 0


class Sleep(Struct, tag=True):
    call: int
    level: int


class Wake(Struct, tag=True):
    call: int
    parts: frozenset[MemoryPart]


class LoadWeights(Struct, tag=True):
    call: int
    path: str
    root: str


class ReadAdapter(Struct, tag=True):
    call: int
    adapter: Adapter
    root: str | None
    room: int


class ForgetAdapter(Struct, tag=True):
    adapter: Adapter
    slot: int | None


class Close(Struct, tag=True):
    """Free all memory and end the process."""


Command = Start | Forward | Sample | Sleep | Wake | LoadWeights | ReadAdapter | ForgetAdapter | Close

# Answers from the executor.


class State(Struct):
    """The executor's changing properties: `Executor.memory`, and facts from `Executor.describe`."""

    memory: Memory
    facts: dict[str, Any]


class Progress(Struct, tag=True):
    """Bytes of weights read so far, and in total."""

    done: int
    total: int


class Loaded(Struct, tag=True):
    """The model is loaded.

    released_by  result of Executor.released_by, by level of sleep
    """

    capacity: Capacity
    depth: int
    decoding_depth: int
    sleep_refusal: str
    released_by: dict[int, frozenset[MemoryPart]]
    state: State


class Result(Struct, tag=True):
    step: int
    result: StepResult


class Failed(Struct, tag=True):
    step: int
    fault: Fault


class Returned(Struct, tag=True):
    """A call has succeeded.

    value  AdapterFacts of ReadAdapter, bytes freed by Sleep, else None
    """

    call: int
    state: State
    value: AdapterFacts | int | None = None


class Raised(Struct, tag=True):
    call: int
    state: State
    fault: Fault


class Beat(Struct, tag=True):
    """The pulse or the state has changed."""

    pulse: int
    state: State


Answer = Progress | Loaded | Result | Failed | Returned | Raised | Beat


class Connection(asyncio.Protocol):
    """One side of a socket pair.

    ended  resolves once the other side has closed and all its messages were received
    """

    def __init__(self, receives: Any, receive: Callable[[Any], None]) -> None:
        """Decode received messages as the type `receives`, and call `receive` with each."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = frames.Reader(receives)
        self._receive = receive
        self._transport: asyncio.Transport | None = None

    def send(self, message: Struct) -> None:
        """Send a message. If the other side has closed, the message is lost and `ended` resolves."""
        assert self._transport is not None
        self._transport.write(frames.frame(message))

    def close(self) -> None:
        """Close after sending all buffered messages."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports subclass no asyncio class

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._receive(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
