"""Requests of 2,048 inputs over HTTP: their memory is bounded, and a neighbour's short request waits for few steps."""

from __future__ import annotations

import re
import statistics
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

from tests.e2e.process import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(120)]

INPUTS = 2048
FLOODS = 6  # of which the queue takes two
STEP_MS = 50  # long beside two readings of /metrics
MIB = 2**20
TEXT = "a text of some words that are read as a few tokens each, "


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    # Two floods take 64 steps.
    daemon = Daemon(tmp_path, ["--set", f"device.null_step_ms={STEP_MS}", "--set", "scheduler.max_num_seqs=64"], {})
    try:
        yield daemon.ready()
    finally:
        daemon.close()


def steps(daemon: Daemon) -> int:
    found = re.search(r"^infd_step_duration_seconds_count\{.*\} (\S+)$", daemon.get("/metrics")[1].decode(), re.M)
    assert found is not None
    return int(float(found[1]))


def resident(daemon: Daemon, name: str) -> int:
    """Return VmRSS or VmHWM of the daemon, in bytes."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.M)
    assert found is not None
    return int(found[1]) * 1024


def test_a_flood_is_bounded_in_memory_and_costs_a_short_request_two_steps(daemon: Daemon):
    url = "http://{}:{}/v1/embeddings".format(*daemon.address)
    body = {"input": [f"{TEXT * 4}{number}" for number in range(INPUTS)], "encoding_format": "base64"}
    requests.post(url, json={"input": ["warm"] * 32}, timeout=30).raise_for_status()
    before = resident(daemon, "VmRSS")
    answers: list[tuple[int, int]] = []

    def flood() -> None:
        answer = requests.post(url, json=body, timeout=100)
        answers.append((answer.status_code, len(answer.content)))

    threads = [threading.Thread(target=flood) for _ in range(FLOODS)]
    for thread in threads:
        thread.start()
    begun = steps(daemon)
    while steps(daemon) < begun + 5:
        pass
    took: list[int] = []
    for number in range(8):
        first = steps(daemon)
        answer: Any = requests.post(url, json={"input": f"short {number}"}, timeout=30).json()
        took.append(steps(daemon) - first)
        assert len(answer["data"]) == 1
    assert any(thread.is_alive() for thread in threads), "the floods ended before the short requests"
    for thread in threads:
        thread.join()
    grown = resident(daemon, "VmHWM") - before
    print(f"short requests ended within {took} steps; {grown / MIB:.1f} MiB more at most")

    assert sorted(status for status, _ in answers) == [200] * 2 + [429] * (FLOODS - 2)
    # Its own step, two of others, and those that end while /metrics is read twice.
    assert statistics.median(took) <= 3 + 1
    assert grown < 64 * MIB
