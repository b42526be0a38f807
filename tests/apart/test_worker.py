"""Any task ends at its limit, whatever it does to its process, and the next task runs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from infd.apart.client import Worker
from infd.errors import CheckpointError, InvalidRequest, TextFailed, TooCostly
from tests.apart.program import Do

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = "tests.apart.program"
LONG_S = 60.0  # only a failing test takes as long
PARENT = """
import sys
from infd.apart.client import Worker
from tests.apart.program import Do
worker = Worker("tests.apart.program")
print(worker.ask(Do("pid"), int, seconds=60), flush=True)
worker.ask(Do(sys.argv[1]), object, seconds=60)
sys.stdin.read()
"""


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker(MODULE)) as worker:
        yield worker


def ask(worker: Worker, what: str, value: Any = None, seconds: float = LONG_S) -> Any:
    return worker.ask(Do(what, value), object, seconds=seconds)


def test_there_is_no_process_before_there_is_a_task(worker: Worker):
    assert worker.pid is None


def test_a_task_sends_and_returns_plain_values(worker: Worker):
    value = {"text": "é🙂", "list": [1, 2.5, None, True], "bytes": b"\x00" * 2**20}

    assert ask(worker, "echo", value) == value


def test_one_process_does_all_tasks(worker: Worker):
    assert ask(worker, "pid") == ask(worker, "pid") == worker.pid


@pytest.mark.parametrize("what", ["spin", "hold the interpreter"])
def test_a_task_ends_at_its_limit_and_the_next_is_done(worker: Worker, what: str):
    with pytest.raises(TooCostly, match=r"took more than 0\.2 s"):
        ask(worker, what, seconds=0.2)
    assert ask(worker, "echo", 1) == 1


def test_a_stopped_process_is_killed_after_its_limit(worker: Worker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("infd.apart.client.PATIENCE_S", 0.0)
    os.kill(ask(worker, "pid"), signal.SIGSTOP)

    with pytest.raises(TooCostly):
        ask(worker, "echo", seconds=0.1)


@pytest.mark.parametrize(
    ("what", "reason"),
    [("abort", "SIGABRT"), ("panic", "Panic: of a library"), ("allocate", "MemoryError")],
)
def test_a_task_that_crashes_its_process_fails_alone(worker: Worker, what: str, reason: str):
    before = ask(worker, "pid")

    with pytest.raises(TextFailed, match=reason):
        ask(worker, what)
    assert ask(worker, "pid") != before


def test_refusals_keep_their_type_and_message(worker: Worker):
    before = ask(worker, "pid")
    for kind in (InvalidRequest, TooCostly):
        with pytest.raises(kind, match="no") as refused:
            ask(worker, "refuse", kind.__name__)
        assert (type(refused.value), refused.value.param) == (kind, "p")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is wrong"):
        ask(worker, "complain")
    assert ask(worker, "pid") == before


def test_a_new_process_repeats_kept_tasks(worker: Worker):
    assert worker.keep(Do("count"), int, seconds=LONG_S) == 1
    with pytest.raises(TextFailed):
        ask(worker, "abort")

    assert ask(worker, "count") == 2


def test_tasks_of_several_threads_run_in_turn(worker: Worker):
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(ask(worker, "echo", n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(answers) == list(range(8))


def test_closing_ends_a_task_under_way(worker: Worker):
    failed: list[BaseException] = []
    pid = ask(worker, "pid")

    def spin() -> None:
        try:
            ask(worker, "hold the interpreter")
        except TextFailed as error:
            failed.append(error)

    thread = threading.Thread(target=spin)
    ended = os.pidfd_open(pid)
    thread.start()
    worker.close()
    thread.join()

    assert len(failed) == 1
    assert select.select([ended], [], [], LONG_S)[0]
    with pytest.raises(TextFailed, match="closed"):
        ask(worker, "echo")


@pytest.mark.parametrize("busy_with", ["echo", "hold the interpreter"])
def test_a_worker_dies_with_the_process_that_started_it(busy_with: str):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, busy_with], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)

        assert select.select([worker], [], [], LONG_S)[0]
    os.close(worker)
