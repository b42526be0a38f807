"""The embedded model with device.own_process, for clients and systemd."""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.test_pause import infdctl

if TYPE_CHECKING:
    from tests.e2e.process import Daemon
    from tests.e2e.test_pause import Start

DEVICE = ("--device", "cpu", "--set", "device.threads=1", "--set", "scheduler.step_tokens=256", "--dtype", "float32")
OWN = (*DEVICE, "--set", "device.own_process=true")
PROMPT = [5, 17, 300, 41]


def worker_of(daemon: Daemon) -> int:
    """Return the pid of the device process."""
    task = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children")
    (child,) = (
        int(pid)
        for pid in task.read_text().split()
        if b"infd.executors.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return child


def answer(daemon: Daemon) -> str:
    with daemon.stream(prompt=PROMPT, max_tokens=24, temperature=0) as events:
        return "".join(choice["text"] for event in [events.first, *events] for choice in event["choices"])


def test_it_answers_alike_sleeps_wakes_and_leaves_no_process_behind(start_daemon: Start) -> None:
    daemon = start_daemon(*OWN).ready()
    first = answer(daemon)
    worker = worker_of(daemon)
    infdctl(daemon, "sleep", "--level", "2", "--wait")
    infdctl(daemon, "wake", "--wait")
    assert answer(daemon) == first
    daemon.signal(signal.SIGTERM)
    assert daemon.exit_code() == 0
    assert not Path(f"/proc/{worker}").exists()

    assert answer(start_daemon(*DEVICE).ready()) == first


def test_numbers_of_pooled_texts_come_from_it_too(start_daemon: Start) -> None:
    found = []
    for arguments in (OWN, DEVICE):
        daemon = start_daemon(*arguments, "--task", "embed").ready()
        connection = http.client.HTTPConnection(*daemon.address, timeout=30)
        try:
            for task in ("embed", "token_embed"):
                body = {"input": [PROMPT, PROMPT[:2]], "task": task, "dimensions": 8, "normalize": True}
                connection.request("POST", "/pooling", json.dumps(body), {"Content-Type": "application/json"})
                found.append(json.loads(connection.getresponse().read())["data"])
        finally:
            connection.close()
    assert found[:2] == found[2:]
    assert [len(each["data"]) for each in found[1]] == [4, 2]


def test_a_device_process_that_is_killed_ends_streams_with_an_error_and_the_daemon_with_70(
    start_daemon: Start,
) -> None:
    daemon = start_daemon(*OWN).ready()
    with daemon.stream(prompt=PROMPT, max_tokens=2000) as events:
        os.kill(worker_of(daemon), signal.SIGKILL)
        *_, last = events
    assert "error" in last, json.dumps(last)
    assert events.done
    assert daemon.exit_code() == os.EX_SOFTWARE
    assert f"by signal {signal.SIGKILL:d}" in daemon.log_text()
