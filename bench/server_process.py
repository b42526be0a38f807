"""Run a server as a child process, and read its cost from the kernel and from its metrics."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

import aiohttp
from native_kernels import LOGGED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from types import TracebackType

_CPUCLOCK_SCHED = 2
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_BUCKET = re.compile(r'^(\w+)_bucket\{(?:.*,)?le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server process. `async with` starts it, waits for 200 at `ready`, and at exit ends all its processes.

    cores        permitted cores; empty: all
    environment  variables added to this process's
    log          file for its output; None: standard error is inherited. infd without native kernels, which says so
                 there, is not measured
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        *,
        ready: str = "/readyz",
        start_s: float = 120.0,
        cores: Collection[int] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        log: Path | None = None,
    ) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.ready_s = 0.0
        self._command = [*(["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []), *command]
        self._ready = ready
        self._start_s = start_s
        self._environment = {**os.environ, **environment}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        started = time.monotonic()
        with self._log.open("wb") if self._log else nullcontext(subprocess.DEVNULL) as output:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if self._log else None,
                env=self._environment,
                start_new_session=True,
            )
        try:
            await self._until_ready(started + self._start_s)
        except BaseException:
            self._end()
            raise
        self.ready_s = time.monotonic() - started
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def cpu_s(self) -> float:
        """CPU time of the process so far, user and kernel, in seconds."""
        # /proc counts ticks of 10 ms, which some sandboxes charge to another process. The id of a clock
        # contains the process: clock_getcpuclockid(3).
        return time.clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)

    def loop_cpu_s(self) -> float:
        """CPU time of the main thread, which runs the event loop, in seconds."""
        return _cpu_s(f"/proc/{self.pid}/task/{self.pid}/stat")

    def resident_bytes(self) -> int:
        """Return the proportional set size of the process and its children, in bytes."""
        return sum(proportional_bytes(member) for member in self._session())

    def freeze(self) -> None:
        """Stop all its processes until `thaw`."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _session(self) -> Iterator[Path]:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) == self.pid:
                yield process

    async def _until_ready(self, deadline: float) -> None:
        assert self._process is not None
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self.name} exited with {self._process.returncode} before it was ready")
                try:
                    async with session.get(f"{self.url}{self._ready}") as response:
                        if response.status == 200:
                            self._refuse_without_native_kernels()
                            return
                except aiohttp.ClientConnectionError:
                    pass
                time.sleep(0.05)  # noqa: ASYNC251 - nothing else runs yet
        raise RuntimeError(f"{self.name} was not ready within {self._start_s:g} s")

    def _refuse_without_native_kernels(self) -> None:
        if self._log is None:  # the line is on standard error
            return
        line = next((line for line in self._log.read_text(errors="replace").splitlines() if LOGGED in line), None)
        if line is not None:
            raise RuntimeError(f"{self.name} is not measured: {line}")

    def _end(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self.thaw()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with suppress(ProcessLookupError):  # the process or its orphans
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def _cpu_s(stat: str) -> float:
    with open(stat) as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S  # utime, stime


def proportional_bytes(process: Path) -> int:
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
    except OSError:  # it has ended
        return 0
    return int(found[1]) * 1024 if found else 0


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
    """Estimate a quantile of the values observed between two readings, linearly within a bucket.

    None without values; values beyond the last bound count as that bound.
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
