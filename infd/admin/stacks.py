"""Stacks of every task and thread, to diagnose a stuck daemon."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from infd.admin.protocol import Stack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def task_stacks() -> list[Stack]:
    """Return the stacks of all tasks of the running loop."""
    tasks = sorted(asyncio.all_tasks(), key=asyncio.Task.get_name)
    return [Stack(task.get_name(), list(_awaited(task.get_coro()))) for task in tasks]


def thread_stacks() -> list[Stack]:
    """Return the stacks of all threads that run Python code."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        Stack(names.get(ident, str(ident)), [_place(outer, line) for outer, line in traceback.walk_stack(frame)][::-1])
        for ident, frame in sys._current_frames().items()
    ]


def _awaited(coroutine: Any) -> Iterator[str]:
    # Task.get_stack() returns only the outermost frame of a suspended task; awaited objects lead to the inner frames.
    while coroutine is not None:
        for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(coroutine, f"{kind}_frame", None)
            if frame is not None:
                yield _place(frame, frame.f_lineno)
                coroutine = getattr(coroutine, inner)
                break
        else:
            return


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})"
