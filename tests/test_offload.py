"""Calls to the worker whose callers were cancelled delay no other call; threads for grammars have large stacks."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest

from infd.apart.client import Worker
from infd.errors import TextFailed, TooCostly
from infd.offload import GRAMMAR_THREADS, SWITCH_INTERVAL_S, WORKER_STACK, Offload, QuickSwitches
from tests.apart.program import Do

if TYPE_CHECKING:
    from pathlib import Path

LONG_S = 60.0  # only a failing test takes as long


def test_the_switch_interval_is_short_while_a_model_needs_it_and_then_restored():
    first, before = QuickSwitches(), sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.004)
        with first:
            with first:
                assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
            assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        assert sys.getswitchinterval() == pytest.approx(0.004)

        with first:
            sys.setswitchinterval(0.002)
        assert sys.getswitchinterval() == pytest.approx(0.002), "set by other code since"
        sys.setswitchinterval(0.0001005)
        with first:
            assert sys.getswitchinterval() == pytest.approx(0.0001), "never lengthened"
        assert sys.getswitchinterval() == pytest.approx(0.0001), "to the microsecond"
    finally:
        sys.setswitchinterval(before)


async def test_a_task_without_a_caller_is_interrupted_once_another_waits(tmp_path: Path):
    os.mkfifo(pipe := tmp_path / "pipe")
    ended: list[Exception] = []

    def spin() -> None:
        try:
            worker.ask(Do("announce, then spin", str(pipe)), object, seconds=LONG_S)
        except (TextFailed, TooCostly) as error:
            ended.append(error)

    with closing(Worker("tests.apart.program")) as worker, closing(Offload(interrupt=worker.interrupt)) as offload:
        abandoned = asyncio.create_task(offload.apart(spin))
        await asyncio.to_thread(pipe.read_bytes)
        abandoned.cancel()
        with suppress(asyncio.CancelledError):
            await abandoned
        assert not ended  # no other call waits

        assert await offload.apart(partial(worker.ask, Do("echo", 1), int, seconds=LONG_S)) == 1
    assert [type(error) for error in ended] == [TextFailed]  # TooCostly would be its time limit


async def test_a_task_that_is_awaited_is_not_interrupted(tmp_path: Path):
    os.mkfifo(pipe := tmp_path / "pipe")
    interrupted: list[None] = []
    with closing(Offload(interrupt=lambda: interrupted.append(None))) as offload:
        awaited = asyncio.create_task(offload.apart(pipe.write_bytes, b"x"))
        waiting = asyncio.create_task(offload.apart(int))
        await asyncio.to_thread(pipe.read_bytes)
        await asyncio.gather(awaited, waiting)

    assert not interrupted


async def test_a_queued_task_without_a_caller_is_dropped():
    begun, release, done = threading.Event(), threading.Event(), []
    with closing(Offload()) as offload:
        first = asyncio.create_task(offload.apart(lambda: (begun.set(), release.wait(LONG_S))))
        second = asyncio.create_task(offload.apart(done.append, 2))
        await asyncio.to_thread(begun.wait, LONG_S)
        second.cancel()
        with suppress(asyncio.CancelledError):
            await second
        third = asyncio.create_task(offload.apart(done.append, 3))
        release.set()
        await asyncio.gather(first, third)

    assert done == [3]


def stack_bytes() -> int:
    """Return the size of the present thread's stack."""
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(64), ctypes.c_size_t()
    libc.pthread_self.restype = ctypes.c_void_p
    libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    libc.pthread_attr_destroy(attributes)
    return size.value


async def test_threads_for_grammars_have_larger_stacks_than_the_workers_that_compile_first():
    before = threading.stack_size()
    with closing(Offload()) as offload:
        stacks = [await offload.masks(stack_bytes)]
        stacks += [await offload.grammars(thread, stack_bytes) for thread in range(GRAMMAR_THREADS)]
    assert min(stacks) >= 2 * WORKER_STACK
    assert threading.stack_size() == before
