"""A server in a process of its own, and what the kernel and its metrics say that it costs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_START_S = 120.0
_BUCKET = re.compile(r'^(\w+)_bucket\{(?:.*,)?le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """Started by `async with`, which returns once /readyz answers 200; ended with it."""

    def __init__(self, name: str, arguments: Sequence[str], port: int) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = [sys.executable, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        self._process = subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - nothing else runs yet
        try:
            await self._until_ready()
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def cpu_s(self) -> float:
        """CPU time of the whole process so far, in user and kernel."""
        return _cpu_s(f"/proc/{self._pid}/stat")

    def loop_cpu_s(self) -> float:
        """CPU time of its main thread, which runs the event loop."""
        return _cpu_s(f"/proc/{self._pid}/task/{self._pid}/stat")

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def _until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self.name} exited with {self._process.returncode} before it was ready")
                try:
                    async with session.get(f"{self.url}/readyz") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientConnectorError:
                    pass
                time.sleep(0.05)  # noqa: ASYNC251 - nothing else runs yet
        raise RuntimeError(f"{self.name} was not ready within {_START_S:g} s")

    def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _cpu_s(stat: str) -> float:
    with open(stat) as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S  # utime, stime


class Scrape:
    """One reading of /metrics."""

    def __init__(self, text: str) -> None:
        self._text = text

    def value(self, name: str) -> float:
        """Return the value of a series without its labels, summed over them."""
        found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)", self._text, re.MULTILINE)
        if not found:
            raise KeyError(f"/metrics has no {name}")
        return sum(map(float, found))

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound."""
        return {float(bound): float(count) for series, bound, count in _BUCKET.findall(self._text) if series == name}


def quantile(before: dict[float, float], after: dict[float, float], q: float) -> float | None:
    """Estimate a quantile of what a histogram saw between two readings, linearly within a bucket.

    None if it saw nothing; a value beyond the last bound counts as that bound.
    """
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values(), default=0.0)
    if not total:
        return None
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= q * total:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (q * total - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("the last bucket holds everything")
