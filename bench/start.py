"""Measure the time from a daemon's start to readiness, beside `python -c "import torch, aiohttp"`.

    python bench/random_checkpoint.py 0.6b DIR
    python bench/start.py DIR                                  7 pairs, alternating
    python bench/start.py DIR --beside OTHER/python --rounds 5 another tree's infd in the same rounds
    python bench/start.py DIR --cold                           without measurements of earlier starts
    python bench/start.py DIR -- --set scheduler.step_tokens=2048

A daemon is ready at the first 200 of /readyz; a completion of one token follows at once and is timed too. An uncounted
first round fills the page cache and the caches of measurements.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from native_kernels import require_native_kernels

POLL_S = 0.01
PATIENCE_S = 120.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
BASELINE = "import torch, aiohttp"
# Installed packages have bytecode; for a working tree the uncounted round compiles changed files.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Start(NamedTuple):
    """Seconds of one start: until ready, CPU time until then, and of the first completion."""

    ready_s: float
    cpu_s: float
    first_s: float


def baseline(python: str) -> float:
    started = time.monotonic()
    subprocess.run([python, "-c", BASELINE], check=True, env=_ENVIRONMENT)
    return time.monotonic() - started


def start(python: str, model: Path, options: list[str], state: Path, port: int) -> Start:
    """Start a daemon, wait until it is ready, request one token, end the daemon."""
    command = [python, "-m", "infd", "start", "--model", str(model), "--port", str(port), *options]
    environment = {**_ENVIRONMENT, "XDG_CACHE_HOME": str(state / "cache"), "XDG_RUNTIME_DIR": str(state)}
    started = time.monotonic()
    with (state / "log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    try:
        while _ask(port, "GET", "/readyz") != 200:
            if process.poll() is not None or time.monotonic() - started > PATIENCE_S:
                raise RuntimeError((state / "log").read_text()[-2000:])
            time.sleep(POLL_S)
        ready_s = time.monotonic() - started
        cpu_s = _cpu_s(process.pid)
        asked = time.monotonic()
        status = _ask(port, "POST", "/v1/completions", {"prompt": "one two three", "max_tokens": 1, "temperature": 0})
        if status != 200:
            raise RuntimeError(f"the first completion was answered with {status}")
        return Start(ready_s, cpu_s, time.monotonic() - asked)
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


def _ask(port: int, method: str, path: str, body: object = None) -> int:
    """Return the status of a completely read answer; 0 if the connection fails."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
    except OSError:
        return 0
    finally:
        connection.close()
    return answer.status


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("options", nargs="*", help="of `infd start`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--port", type=int, default=8190)
    parser.add_argument("--cold", action="store_true", help="remove the caches of measurements before each start")
    parser.add_argument("--beside", action="append", default=[], help="another interpreter, whose infd is measured too")
    arguments = parser.parse_args()
    require_native_kernels()
    pythons = [sys.executable, *arguments.beside]
    imports: list[float] = []
    starts: dict[str, list[Start]] = {python: [] for python in pythons}
    with TemporaryDirectory(prefix="infd-start-") as directory:
        for turn in range(arguments.rounds + 1):
            imported = baseline(sys.executable)
            for number, python in enumerate(pythons):
                state = Path(directory) / str(number)
                state.mkdir(mode=0o700, exist_ok=True)
                if arguments.cold:
                    shutil.rmtree(state / "cache", ignore_errors=True)
                taken = start(python, arguments.model, arguments.options, state, arguments.port + number)
                if turn:  # the first reads files, and stores measurements
                    starts[python].append(taken)
                name = f"{number}: " if arguments.beside else ""
                print(
                    f"{name}import {imported:.2f} s, ready {taken.ready_s:.2f} s, {taken.ready_s / imported:.2f} times",
                    end="",
                )
                print(f"; CPU {taken.cpu_s:.2f} s, first completion {taken.first_s * 1000:.0f} ms", flush=True)
            if turn:
                imports.append(imported)
    for python, of in starts.items():
        ratios = sorted(taken.ready_s / imported for taken, imported in zip(of, imports, strict=True))
        middle = Start(*map(statistics.median, zip(*of, strict=True)))
        print(
            f"{python}: medians of {len(of)}: import {statistics.median(imports):.2f} s, ready {middle.ready_s:.2f} s,"
            f" {statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f}), CPU {middle.cpu_s:.2f} s,"
            f" first completion {middle.first_s * 1000:.0f} ms"
        )


if __name__ == "__main__":
    main()
