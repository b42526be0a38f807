"""A simulated device on a CPU: separate memory, and copies that complete as late as permitted.

Its tensors report torch's device `meta` and contain their values. In strict mode every operation that would make the
host wait for a GPU raises `Waited`: reading a value, `nonzero`, copies to or from memory that is not pinned. A copy to
the host completes when the host waits for a later event, not before; pinned source memory must stay unchanged until
then.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

APART = torch.device("meta")
_aten = torch.ops.aten
COUNTS = (  # how large their result is depends on numbers that only the device knows
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.repeat_interleave,
    _aten.bincount,
)
READS = (_aten._local_scalar_dense, _aten.equal)
LATE = 0x5A  # the content of a byte whose copy is not complete


class Waited(AssertionError):
    """The host would have waited for the device."""


class Away(torch.Tensor):
    """A tensor of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device_: Device
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: Device) -> Away:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=APART, storage_offset=held.storage_offset()
        )

    def __init__(self, held: Tensor, device: Device) -> None:
        self.held, self.device_ = held, device

    def __repr__(self) -> str:
        return f"Away({self.held})"

    def numpy(self, **_: Any) -> Any:
        raise Waited("numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        device = next(each.device_ for each in given if isinstance(each, Away))
        if device.strict:
            # Composite operations wait where their parts do. Numbers would become tensors of `meta` itself.
            whole = func.overloadpacket is _aten.where and len(args) == 3
            if not whole and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
            device.check(func, [each for each in given if isinstance(each, torch.Tensor)], kwargs)
        return device.keep(func(*device.inside(args), **device.inside(kwargs)))


class Device(TorchFunctionMode):
    """The device, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.strict = False
        self._pinned: list[Tensor] = []
        self.pending: list[Callable[[], object]] = []
        self.done = 0

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        self.strict = True
        try:
            yield
        finally:
            self.strict = False

    def pin(self, size: int) -> Tensor:
        self._pinned.append(torch.full((size,), LATE, dtype=torch.uint8))
        return self._pinned[-1]

    def event(self) -> Event:
        return Event(self)

    def keep(self, result: Any) -> Any:
        return tree_map(lambda x: Away(x, self) if isinstance(x, torch.Tensor) else x, result)

    def inside(self, given: Any) -> Any:
        """Return arguments with their CPU tensors."""
        there = {Away: lambda x: x.held, torch.device: lambda _: torch.device("cpu")}
        return tree_map(lambda x: there.get(type(x), lambda x: x)(x), given)

    def check(self, func: Any, given: list[Tensor], named: dict[str, Any]) -> None:
        packet = func.overloadpacket
        if packet in READS or (packet in COUNTS and named.get("output_size") is None):
            raise Waited(str(func))
        if packet in (_aten.index, _aten.index_put, _aten.index_put_) and any(x.dtype is torch.bool for x in given[1:]):
            raise Waited(f"{func} by a mask")
        if any(not isinstance(x, Away) and x.ndim for x in given):
            raise Waited(f"{func} of the host's memory")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and isinstance(args[0], Away) != isinstance(args[1], Away):
            self._copy(*args, kwargs.get("non_blocking", False))
            return args[0]
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item) and args:
            return self._move(func, args, kwargs)
        if kwargs.get("device") == APART:
            if self.strict and func is torch.tensor:
                raise Waited("torch.tensor")
            return self.keep(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)

    def arrive(self, until: int) -> None:
        for work in self.pending[self.done : until]:
            work()
        self.done = max(self.done, until)

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do `to`, or what reads numbers."""
        x, *rest = args
        if func is not torch.Tensor.to:
            if isinstance(x, Away):
                if self.strict:
                    raise Waited(func.__name__)
                return func(x.held)
            return func(*args, **kwargs)
        rest = [torch.device(each) if isinstance(each, str) else each for each in (*rest, kwargs.get("device"))]
        where = next((each for each in rest if isinstance(each, torch.device)), None)
        if where is None or (where == APART) == isinstance(x, Away):
            if isinstance(x, Away):
                dtype = next((each for each in (*rest, kwargs.get("dtype")) if isinstance(each, torch.dtype)), x.dtype)
                return x if dtype == x.dtype else self.keep(x.held.to(dtype))
            return func(*args, **kwargs)
        if where != APART:
            if self.strict:
                raise Waited("to the host")
            return x.held.clone()
        target = Away(torch.empty_like(x), self)
        self._copy(target, x, kwargs.get("non_blocking", False))
        return target

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        host, up = (source, True) if isinstance(target, Away) else (target, False)
        if not self.strict:
            self.inside(target).copy_(self.inside(source))
            return
        memory = host.untyped_storage().data_ptr()
        if not non_blocking or all(memory != each.untyped_storage().data_ptr() for each in self._pinned):
            raise Waited(f"a copy of {host.nbytes} bytes that is not of pinned memory, or blocks")
        if up:
            target.held.copy_(source)
            sent = source.clone()
            self.pending.append(lambda: _require(bool((source == sent).all()), "pinned memory is used again too soon"))
        else:
            target.view(-1).view(torch.uint8).fill_(LATE)
            values = source.held.clone()
            self.pending.append(partial(target.copy_, values))


class Event:
    """Implements `staging.Event`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._behind = 0
        self.waits = 0

    def record(self) -> None:
        self._behind = len(self._device.pending)

    def query(self) -> bool:
        return self._behind <= self._device.done

    def synchronize(self) -> None:
        self._device.arrive(self._behind)


def _require(held: bool, message: str) -> None:
    assert held, message
