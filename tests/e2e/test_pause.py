"""Pause, sleep, wake and resume, for clients, operators and systemd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from infd import embedded

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

QUICK = ("--set", "device.null_step_ms=2")
ENDLESS = 2000  # tokens


def infdctl(daemon: Daemon, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from infd.admin.ctl import main; main()", "--socket", str(daemon.admin_socket)]
    done = subprocess.run([*command, *arguments, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_term_ends_frozen_streams_with_an_error_event_at_once_and_exits_0(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK).ready()
    with daemon.stream(max_tokens=ENDLESS) as events:
        assert infdctl(daemon, "pause", "--mode", "keep")["frozen"] == 1
        status, said = daemon.get("/readyz?verbose")
        assert (status, json.loads(said)["state"]) == (503, "paused")
        assert daemon.get("/health")[0] == daemon.get("/livez")[0] == 200
        assert b'infd_state{state="paused"} 1.0' in daemon.get("/metrics")[1].replace(b'model_name="embedded",', b"")
        while not daemon.notified[-1].get("STATUS", "").startswith("paused · requests in flight are frozen"):
            assert daemon.read_notification()
        daemon.signal(signal.SIGTERM)
        *_, last = events
    assert "error" in last
    assert events.done
    assert daemon.exit_code() == 0


def test_a_request_that_comes_during_a_pause_is_answered_after_it(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK).ready()
    with ThreadPoolExecutor(1) as pool, daemon.stream(max_tokens=20, seed=3) as events:
        alone = "".join(choice["text"] for event in [events.first, *events] for choice in event["choices"])
        infdctl(daemon, "pause", "--wait")

        def late() -> str:
            with daemon.stream(max_tokens=20, seed=3) as events:
                return "".join(choice["text"] for event in [events.first, *events] for choice in event["choices"])

        answer = pool.submit(late)
        while not infdctl(daemon, "status")["held"]:
            pass
        assert not answer.done()
        infdctl(daemon, "resume", "--wait")
        assert answer.result() == alone


def fewest_descriptors(daemon: Daemon) -> int:
    """Count open connections, except one whose close the daemon may not have noticed."""
    directory = f"/proc/{daemon.process.pid}/fd"
    counts = []
    for _ in range(20):
        assert daemon.get("/livez")[0] == 200
        counts.append(len(os.listdir(directory)))
    return min(counts)


def text(daemon: Daemon) -> str:
    with daemon.stream(max_tokens=20, seed=3, temperature=0) as events:
        return "".join(choice["text"] for event in [events.first, *events] for choice in event["choices"])


def test_a_request_wakes_a_real_model_which_answers_as_before(start_daemon: Start) -> None:
    settings = ("device.threads=1", "server.wake_on_request=true", "cache.bytes=4M", "scheduler.step_tokens=64")
    daemon = start_daemon("--device", "cpu", *(word for each in settings for word in ("--set", each))).ready()
    before = text(daemon)
    descriptors = fewest_descriptors(daemon)
    for level in ("1", "2"):
        asleep = infdctl(daemon, "sleep", "--level", level, "--wait")
        assert (asleep["state"], asleep["kv_cache"]) == ("sleeping", "released")
        assert asleep["weights"] == ("released" if level == "2" else "loaded")
        assert daemon.get("/readyz")[0] == daemon.get("/health")[0] == 200
        assert text(daemon) == before
        assert infdctl(daemon, "status")["weights"] == "loaded"
    infdctl(daemon, "pause", "--wait")
    infdctl(daemon, "load-weights", str(embedded.path()), "--wait")
    infdctl(daemon, "resume", "--wait")
    assert text(daemon) == before
    assert fewest_descriptors(daemon) <= descriptors
    infdctl(daemon, "sleep", "--level", "2", "--wait")
    daemon.signal(signal.SIGTERM)
    assert daemon.exit_code() == 0
