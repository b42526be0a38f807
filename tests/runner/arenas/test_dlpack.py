"""Tensors of memory whose device is known."""

from __future__ import annotations

import ctypes
import gc
import weakref
from threading import Thread

import pytest
import torch

from infd.runner.arenas.dlpack import tensor_at

CPU = torch.device("cpu")


class Memory:
    def __init__(self) -> None:
        self.bytes = (ctypes.c_uint8 * 100)(*range(100))

    def tensor(self) -> torch.Tensor:
        return tensor_at(ctypes.addressof(self.bytes), 100, CPU, self)


def test_a_tensor_is_the_memory_itself():
    memory = Memory()
    tensor = memory.tensor()
    assert tensor.data_ptr() == ctypes.addressof(memory.bytes)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((100,), torch.uint8, CPU)
    assert tensor.tolist() == list(range(100))
    tensor[3] = 77
    assert memory.bytes[3] == 77


def test_the_last_view_keeps_the_owner_and_may_go_on_any_thread_and_while_an_exception_is_raised():
    def failing(view: torch.Tensor) -> None:
        raise ValueError(f"with {view.numel()} numbers")

    def on_a_thread(memory: weakref.ref, views: list[torch.Tensor]) -> None:
        assert memory() is not None
        thread = Thread(target=views.clear)
        thread.start()
        thread.join()

    def in_an_exception(memory: weakref.ref, views: list[torch.Tensor]) -> None:
        with pytest.raises(ValueError, match="with 24 numbers"):
            failing(views.pop())

    for end in (on_a_thread, in_an_exception):
        memory = Memory()
        known, views = weakref.ref(memory), [memory.tensor()[4:].view(torch.float32)]
        del memory
        gc.collect()
        end(known, views)
        gc.collect()
        assert known() is None
