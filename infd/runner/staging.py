"""Carry numbers between host and device, so that neither waits for the other.

A GPU reads what the host has written, and writes what the host will read, on its own time. Both happen in pinned
memory, cut into parts: a part belongs to one step, and to another only when the event behind that step has passed and
its results are read. That event is the one thing a step is ever waited for by. Where the host's memory is the device's,
nothing is carried.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from infd.rounding import round_up

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

PART_BYTES: Final = 2**20  # of a part at first: it grows with a prompt's tokens, with scores, with an adapter
KEPT_BYTES: Final = 2**24  # of a part that has grown
ALIGNMENT: Final = 64
NAP_S: Final = 1e-5
PR_SET_TIMERSLACK: Final = 29  # linux/prctl.h; in nanoseconds


class Event(Protocol):
    """Of torch.cuda.Event, what is used."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Part:
    """The pinned memory of one step, and the event behind it."""

    def __init__(self, pin: Callable[[int], Tensor], event: Event) -> None:
        self._pin = pin
        self._outgrown: list[Tensor] = []  # copies from there may be on their way
        self.event = event
        self._lie_in(pin(PART_BYTES))

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of this part that nothing else of the step uses."""
        tensor = self._memory[self._take(torch.Size(shape).numel() * dtype.itemsize)].view(dtype)
        return tensor if len(shape) == 1 else tensor.view(shape)

    def holding(self, array: Array) -> Tensor:
        """Return a copy of `array` in this part."""
        place = self._take(array.nbytes)
        held = self._bytes[place].view(array.dtype)
        held[:] = array.reshape(-1)
        tensor = self._memory[place].view(_DTYPES[array.dtype.char])
        return tensor if array.ndim == 1 else tensor.view(array.shape)

    def clear(self) -> None:
        """Forget what was in it, which is over."""
        self._used = 0
        self._outgrown.clear()
        if len(self._bytes) > KEPT_BYTES:
            self._lie_in(self._pin(PART_BYTES))

    def _lie_in(self, memory: Tensor) -> None:
        self._memory, self._used = memory, 0
        self._bytes: Array = memory.numpy()

    def _take(self, size: int) -> slice:
        first = round_up(self._used, ALIGNMENT)
        if first + size > len(self._bytes):
            self._outgrown.append(self._memory)
            self._lie_in(self._pin(max(2 * len(self._bytes), size)))
            first = 0
        self._used = first + size
        return slice(first, self._used)


_DTYPES = {np.dtype(name).char: getattr(torch, name) for name in ("int32", "int64", "float32", "bool", "uint8")}


class Staging(Protocol):
    """What carries.

    spin_s  how long a wait asks for the end of a step, again and again, before it sleeps until the device interrupts
    """

    spin_s: float

    @property
    def waits(self) -> bool:
        """Whether results are there only once the device has got to them."""

    def begin(self) -> None:
        """Begin a step: what goes up from now on is its own."""

    def up(self, array: Array) -> Tensor:
        """Copy what the host gathered to the device."""

    def fill(self, target: Tensor, array: Array) -> None:
        """Copy what the host gathered to where it lies on the device, [n]."""

    def down(self, values: Tensor) -> Tensor:
        """Start a copy to the host, where it is complete once `end`'s part has arrived."""

    def end(self) -> Part | None:
        """End a step's work; return what its results lie in, to be given to `wait` and to `release`."""

    def attend(self) -> None:
        """Prepare the thread that calls this to wait."""

    def wait(self, part: Part) -> None:
        """Wait until the device is past the end of the step."""

    def release(self, part: Part) -> None:
        """Give back what has been read."""


class Shared:
    """Carries nothing: the device's memory is the host's. Other devices get plain copies, which may be waited for."""

    waits = False
    spin_s = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        """Do nothing."""

    def up(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def fill(self, target: Tensor, array: Array) -> None:
        target.copy_(torch.from_numpy(array))

    def down(self, values: Tensor) -> Tensor:
        return values

    def end(self) -> None:
        """None: results are where they were computed."""

    def attend(self) -> None:
        """Do nothing: there is no other device."""

    def wait(self, part: Part) -> None:
        raise AssertionError("nothing is on its way")

    def release(self, part: Part) -> None:
        raise AssertionError("nothing is on its way")


class Pinned:
    """Carries by way of pinned memory. It never waits to get some: if none is free yet, there is one part more."""

    waits = True

    def __init__(
        self,
        device: torch.device,
        pin: Callable[[int], Tensor] | None = None,
        event: Callable[[], Event] | None = None,
    ) -> None:
        """pin: returns pinned memory of that many bytes; event: makes an event for the device's stream."""
        self._device = device
        self._pin = pin or _pin
        self._event = event or _event
        self._part: Part | None = None
        self._idle: deque[Part] = deque()  # in the order of their events
        self.spin_s = 0.0
        self.parts = 0  # made so far

    def begin(self) -> None:
        if self._part is not None:  # of a step that failed, or of what went up between steps
            self.release(self._end(self._part))

    def up(self, array: Array) -> Tensor:
        return self._current().holding(array).to(self._device, non_blocking=True)

    def fill(self, target: Tensor, array: Array) -> None:
        target.copy_(self._current().holding(array), non_blocking=True)

    def down(self, values: Tensor) -> Tensor:
        return self._current().room(values.shape, values.dtype).copy_(values, non_blocking=True)

    def end(self) -> Part:
        return self._end(self._current())

    def attend(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # or waiting would make a context on the first GPU
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1))  # else a nap ends 50 us late

    def wait(self, part: Part) -> None:
        until = time.perf_counter() + self.spin_s
        while not part.event.query():
            if time.perf_counter() >= until:
                part.event.synchronize()
                return
            time.sleep(NAP_S)  # meanwhile other threads have the interpreter

    def release(self, part: Part) -> None:
        self._idle.append(part)

    def _end(self, part: Part) -> Part:
        part.event.record()
        self._part = None
        return part

    def _current(self) -> Part:
        if self._part is None:
            if self._idle and self._idle[0].event.query():
                self._part = self._idle.popleft()
                self._part.clear()
            else:
                self._part = Part(self._pin, self._event())
                self.parts += 1
        return self._part


def staging(device: torch.device) -> Staging:
    """Return what carries to and from a device."""
    return Pinned(device) if device.type == "cuda" else Shared(device)


def _pin(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _event() -> Event:
    event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event
