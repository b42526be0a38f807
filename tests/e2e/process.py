"""A real `infd start` under a service manager of ours: a process, its notifications, its log."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 60.0  # only a test that fails waits this long
# Become another program, with a socket at the place and under the names of sd_listen_fds(3).
PASS_ON = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Daemon:
    """One process.

    arguments  for `infd start`, after those that keep it to itself: a free port, its own admin socket, no files of /etc
    variables  of its environment
    listening  a socket to pass to it as systemd does
    """

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        listening: socket.socket | None = None,
    ) -> None:
        self.directory = directory
        self.admin_socket = directory / "admin.sock"
        self.log_file = directory / "log"
        (directory / "infd.toml").touch()
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(directory / "notify"))
        self.notified: list[dict[str, str]] = []
        command = [sys.executable, "-m", "infd", "start", "--config", str(directory / "infd.toml"), "--device", "null"]
        command += ["--port", "0", "--admin-socket", str(self.admin_socket), "--set", "log.format=json", *arguments]
        if listening is not None:
            command = [sys.executable, "-c", PASS_ON, str(listening.fileno()), *command]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(directory / "notify"), **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=() if listening is None else (listening.fileno(),),
            )
        self._pidfd = os.pidfd_open(self.process.pid)

    def ready(self) -> Daemon:
        """Wait until it says READY."""
        self.wait_for("READY", "1")
        return self

    def wait_for(self, name: str, value: str) -> None:
        """Wait for a notification, or fail when the process ends without it."""
        while not any(said.get(name) == value for said in self.notified):
            if not self.hear():
                raise AssertionError(f"never said {name}={value}; it said {self.notified}\n{self.log_text()}")

    def exit_code(self) -> int:
        """Wait for its end, and for what it said until then."""
        while self.hear():
            pass
        return self.process.wait(PATIENCE_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def log_text(self) -> str:
        return self.log_file.read_text(errors="replace")

    def log(self, message: str) -> dict[str, Any]:
        """Return the one record with this message."""
        whole = self.log_text().rpartition("\n")[0]  # the last line may be half written
        records = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        (found,) = [record for record in records if record["message"] == message]
        return found

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.log("listening")["address"].split()[0])
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    @contextmanager
    def stream(self, **fields: Any) -> Iterator[Events]:
        """Ask for a streamed completion. Entered once the first event has come."""
        body = {"model": "embedded", "prompt": "once", "stream": True, "ignore_eos": True, **fields}
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            events = Events(answer)
            events.first = next(events)
            yield events
        finally:
            connection.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._pidfd)
        self._manager.close()

    def hear(self) -> bool:
        """Take in one notification. Return False once the process has ended and said everything."""
        heard, _, _ = select.select([self._manager, self._pidfd], [], [], PATIENCE_S)
        assert heard, f"neither a word nor an end of it\n{self.log_text()}"
        if self._manager not in heard:
            return False
        lines = self._manager.recv(65536).decode().splitlines()
        self.notified.append(dict(line.split("=", 1) for line in lines))
        return True


class Events:
    """The `data:` events of an answer; ends after [DONE], or where the connection does."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer
        self.first: dict[str, Any] = {}
        self.done = False

    def __iter__(self) -> Events:
        return self

    def __next__(self) -> dict[str, Any]:
        while not self.done:
            line = self._answer.readline()
            if not line:
                break
            if line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                return event
        raise StopIteration
