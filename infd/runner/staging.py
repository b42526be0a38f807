"""Copy arrays between host and device without synchronizing them.

A GPU copies asynchronously, from and to pinned memory. A pinned buffer belongs to one step. It is reused once the event
at the end of the step has occurred and the step's results are read. The host waits for no other event. On a CPU, where
host and device share memory, no buffers are needed.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from infd.rounding import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

BUFFER_BYTES: Final = 2**20  # initial size of a buffer; long prompts, scores and adapters need larger buffers
KEPT_BYTES: Final = 2**24  # a larger buffer shrinks to BUFFER_BYTES when the next step uses the buffer
ALIGNMENT: Final = 64
NAP_S: Final = 1e-5
PR_SET_TIMERSLACK: Final = 29  # option of prctl(2), from linux/prctl.h; the argument is in nanoseconds


class Event(Protocol):
    """The methods of torch.cuda.Event that staging calls."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class StagingBuffer:
    """The pinned memory of one step, and the event recorded at the end of the step."""

    def __init__(self, pin: Callable[[int], Tensor], event: Event) -> None:
        self._pin = pin
        self._outgrown: list[Tensor] = []  # copies from this memory may be in flight
        self.event = event
        self._use(pin(BUFFER_BYTES))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in unused memory of this buffer."""
        tensor = self._memory[self._allocate(torch.Size(shape).numel() * dtype.itemsize)].view(dtype)
        return tensor if len(shape) == 1 else tensor.view(shape)

    def copy_of(self, array: Array) -> Tensor:
        """Return a copy of `array` in this buffer."""
        place = self._allocate(array.nbytes)
        copied = self._bytes[place].view(array.dtype)
        copied[:] = array.reshape(-1)
        tensor = self._memory[place].view(_DTYPES[array.dtype.char])
        return tensor if array.ndim == 1 else tensor.view(array.shape)

    def clear(self) -> None:
        """Free all tensors of the buffer; shrink a large buffer. Called after the buffer's step has ended."""
        self._used = 0
        self._outgrown.clear()
        if len(self._bytes) > KEPT_BYTES:
            self._use(self._pin(BUFFER_BYTES))

    def _use(self, memory: Tensor) -> None:
        self._memory, self._used = memory, 0
        self._bytes: Array = memory.numpy()

    def _allocate(self, size: int) -> slice:
        first = round_up(self._used, ALIGNMENT)
        if first + size > len(self._bytes):
            self._outgrown.append(self._memory)
            self._use(self._pin(max(2 * len(self._bytes), size)))
            first = 0
        self._used = first + size
        return slice(first, self._used)


_DTYPES = {np.dtype(name).char: getattr(torch, name) for name in ("int32", "int64", "float32", "bool", "uint8")}


class Staging(Protocol):
    """Copies between host and device.

    device  the device to which arrays are copied
    spin_s  seconds for which `wait` polls the event, before the thread sleeps until the device's interrupt
    """

    device: torch.device
    spin_s: float

    @property
    def waits(self) -> bool:
        """Whether copies are asynchronous: a step's results are valid only after `wait`."""

    def begin(self) -> None:
        """Begin a step: later copies use the step's buffer."""

    def up(self, array: Array) -> Tensor:
        """Return a copy of a host array on the device."""

    def up_together(self, *groups: Sequence[Array]) -> Sequence[Tensor]:
        """Return the numbers of each group of host arrays [n] of one type, joined, on the device.

        On a CPU a tensor may share the memory of an array; neither is written to.
        """

    def fill(self, target: Tensor, array: Array) -> None:
        """Copy a host array [n] into a tensor [n] on the device."""

    def write(self, target: Tensor, rows: Tensor, array: Array) -> None:
        """Copy a host array [n, ...] into rows of a tensor on the device; an array [n, w] into their first w columns.

        rows  [n] int64, from `up`
        """

    def down(self, values: Tensor) -> Tensor:
        """Start a copy to the host. The copy is complete after `wait`, called with the buffer that `end` returns."""

    def end(self) -> StagingBuffer | None:
        """End a step. Return the buffer of its results, for `wait` and `release`, or None if nothing is copied."""

    def prepare_to_wait(self) -> None:
        """Set the calling thread's device and timer slack. Called before the thread's first wait."""

    def wait(self, buffer: StagingBuffer) -> None:
        """Wait until the device has finished the step."""

    def release(self, buffer: StagingBuffer) -> None:
        """Free the buffer of a step whose results are read."""


class Shared:
    """For a CPU: host and device share memory, so results are not copied. Copies to other devices are synchronous."""

    waits = False
    spin_s = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """No-op: there are no buffers."""

    def up(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def up_together(self, *groups: Sequence[Array]) -> Sequence[Tensor]:
        # A tensor of each group takes less time than to split one of all.
        return [self.up(arrays[0] if len(arrays) == 1 else np.concatenate(arrays)) for arrays in groups]

    def fill(self, target: Tensor, array: Array) -> None:
        target.copy_(torch.from_numpy(array))

    def write(self, target: Tensor, rows: Tensor, array: Array) -> None:
        if self.device.type == "cpu":  # numpy takes a tenth of the time of torch's calls
            written = target.numpy()
            (written if array.ndim == 1 else written[:, : array.shape[1]])[rows.numpy()] = array
        else:
            _write(target, rows, self.up(array))

    def down(self, values: Tensor) -> Tensor:
        return values

    def end(self) -> None:
        """Return None: results are not copied."""

    def prepare_to_wait(self) -> None:
        """No-op: `wait` is never called."""

    def wait(self, buffer: StagingBuffer) -> None:
        raise AssertionError("no copy is in flight")

    def release(self, buffer: StagingBuffer) -> None:
        raise AssertionError("no copy is in flight")


class Pinned:
    """Copies asynchronously through pinned buffers. If no buffer is free, a new buffer is allocated.

    buffers  number of buffers allocated so far
    """

    waits = True

    def __init__(
        self,
        device: torch.device,
        pin: Callable[[int], Tensor] | None = None,
        event: Callable[[], Event] | None = None,
    ) -> None:
        """Start without buffers.

        pin    allocates [n] uint8 of pinned memory, given n; None: torch's allocator
        event  returns a new event; None: a torch.cuda.Event
        """
        self.device = device
        self._pin = pin or _pin
        self._event = event or _event
        self._buffer: StagingBuffer | None = None
        self._idle: deque[StagingBuffer] = deque()  # in the order of their events
        self.spin_s = 0.0
        self.buffers = 0

    def begin(self) -> None:
        if self._buffer is not None:  # left by a failed step, or by copies between steps
            self.release(self._end(self._buffer))

    def up(self, array: Array) -> Tensor:
        return self._current().copy_of(array).to(self.device, non_blocking=True)

    def up_together(self, *groups: Sequence[Array]) -> Sequence[Tensor]:
        sizes = [sum(map(len, arrays)) for arrays in groups]
        return self.up(np.concatenate(list(chain(*groups)))).split_with_sizes(sizes)

    def fill(self, target: Tensor, array: Array) -> None:
        target.copy_(self._current().copy_of(array), non_blocking=True)

    def write(self, target: Tensor, rows: Tensor, array: Array) -> None:
        _write(target, rows, self.up(array))

    def down(self, values: Tensor) -> Tensor:
        return self._current().empty(values.shape, values.dtype).copy_(values, non_blocking=True)

    def end(self) -> StagingBuffer:
        return self._end(self._current())

    def prepare_to_wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # otherwise waiting would create a CUDA context on GPU 0
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1))  # by default Linux may end sleeps 50 us late

    def wait(self, buffer: StagingBuffer) -> None:
        until = time.perf_counter() + self.spin_s
        while not buffer.event.query():
            if time.perf_counter() >= until:
                buffer.event.synchronize()
                return
            time.sleep(NAP_S)  # releases the interpreter's lock

    def release(self, buffer: StagingBuffer) -> None:
        self._idle.append(buffer)

    def _end(self, buffer: StagingBuffer) -> StagingBuffer:
        buffer.event.record()
        self._buffer = None
        return buffer

    def _current(self) -> StagingBuffer:
        if self._buffer is None:
            if self._idle and self._idle[0].event.query():
                self._buffer = self._idle.popleft()
                self._buffer.clear()
            else:
                self._buffer = StagingBuffer(self._pin, self._event())
                self.buffers += 1
        return self._buffer


def staging(device: torch.device) -> Staging:
    """Return the default staging of a device."""
    return Pinned(device) if device.type == "cuda" else Shared(device)


def _write(target: Tensor, rows: Tensor, values: Tensor) -> None:
    (target if values.dim() == 1 else target[:, : values.shape[1]]).index_copy_(0, rows, values)


def _pin(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _event() -> Event:
    event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event
