"""The program of the worker in tests: `python -m tests.apart.program`."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from infd.apart.child import serve
from infd.errors import CheckpointError, InvalidRequest, TooCostly


class Do(Struct):
    """A task: the name of an action below, and its operand."""

    what: str
    value: Any = None


class Panic(BaseException):
    """Like a panic of a library in Rust: no Exception."""


class Counter:
    count = 0


def do(task: Do) -> Any:
    match task.what:
        case "echo":
            return task.value
        case "count":
            Counter.count += 1
            return Counter.count
        case "pid":
            return os.getpid()
        case "announce, then spin":
            Path(task.value).write_bytes(b"")  # a named pipe: blocks until it is read
            while True:
                pass
        case "spin":
            while True:
                pass
        case "hold the interpreter":
            ctypes.PyDLL(None).sleep(3600)
        case "abort":
            os.abort()
        case "allocate":
            return len([bytes(2**30) for _ in range(64)])
        case "panic":
            raise Panic("of a library")
        case "refuse":
            raise {"InvalidRequest": InvalidRequest, "TooCostly": TooCostly}[task.value]("no", param="p")
        case "complain":
            raise CheckpointError("tokenizer.json is wrong")
        case "sleep":
            time.sleep(task.value)
    return None


if __name__ == "__main__":
    serve(Do, do)
