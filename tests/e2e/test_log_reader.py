"""Without a reader of its log, the daemon serves, stops on a signal, and its exit code is unchanged."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import pytest

from infd.admin.ctl.client import AdminClient
from infd.admin.protocol import Status
from tests.e2e.process import PATIENCE_S, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Executes another program without standard streams.
CLOSED = "import os, sys; os.closerange(0, 3); os.execv(sys.argv[1], sys.argv[1:])"


@contextmanager
def daemon(directory: Path, stderr: int, *before: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run `infd start`. Yield, once ready, the process and its Unix socket."""
    address = directory / "address"
    command = [*before, sys.executable, "-m", "infd", "start", "--device", "null", "--config", os.devnull]
    command += ["--host", f"unix:{address}", "--admin-socket", str(directory / "admin.sock")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(directory / "notify"))
        manager.settimeout(PATIENCE_S)
        variables = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(directory / "notify")}
        with subprocess.Popen(command, cwd=ROOT, stderr=stderr, env=variables) as process:
            try:
                while b"READY=1" not in manager.recv(4096):
                    pass
                yield process, address
            finally:
                process.kill()


def ask(address: Path, times: int) -> None:
    connection = HTTPConnection("localhost", timeout=PATIENCE_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(PATIENCE_S)
    connection.sock.connect(str(address))
    for i in range(times):
        connection.request("GET", f"/nothing/{i}")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 404
    connection.close()


def fill(write_end: int) -> None:
    os.set_blocking(write_end, False)
    try:
        while True:
            os.write(write_end, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write_end, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stalled_log_reader_stops_nothing(tmp_path: Path, number: signal.Signals) -> None:
    read_end, write_end = os.pipe()
    fill(write_end)
    try:
        with daemon(tmp_path, write_end) as (process, address):
            ask(address, 300)
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 0
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_slow_reader_gets_every_line_in_order_up_to_the_last(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as pipe, daemon(tmp_path, write_end) as (process, address):
        os.close(write_end)
        ask(address, 1000)  # more than a pipe holds
        process.terminate()
        log = pipe.read().decode()
        assert process.wait(PATIENCE_S) == 0
    assert [int(i) for i in re.findall(r"path=/nothing/(\d+)", log)] == [*range(1000)]
    assert log.splitlines()[-1].endswith("stopped exit_code=0")


def test_a_log_that_cannot_be_written_changes_neither_answers_nor_the_exit_code(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, daemon(tmp_path, full.fileno()) as (process, address):
        ask(address, 300)
        assert (
            AdminClient([str(tmp_path / "admin.sock")], timeout_s=PATIENCE_S).get("/v1/status", Status).state == "ready"
        )
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_closed_log_reader_changes_no_exit_code(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with daemon(tmp_path, write_end) as (process, _):
        os.close(write_end)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_daemon_may_be_started_without_standard_streams(tmp_path: Path) -> None:
    with daemon(tmp_path, subprocess.DEVNULL, sys.executable, "-c", CLOSED) as (process, address):
        ask(address, 1)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
