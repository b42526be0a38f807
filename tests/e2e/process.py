"""Run `infd start` under a test service manager: a process, its notifications, its log."""

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
PATIENCE_S = 60.0  # reached only by a failing test
# Executes another program with a socket at descriptor 3 and the variables of sd_listen_fds(3).
PASS_ON = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Daemon:
    """One daemon process.

    arguments  for `infd start`, after those that isolate it: a free port, an own admin socket, no files of /etc
    variables  environment variables
    listening  a socket to pass as systemd does
    module     the program, run with `python -m`
    """

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        listening: socket.socket | None = None,
        module: str = "infd",
    ) -> None:
        self.directory = directory
        self.admin_socket = directory / "admin.sock"
        self.log_file = directory / "log"
        (directory / "infd.toml").touch()
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(directory / "notify"))
        self.notified: list[dict[str, str]] = []
        command = [sys.executable, "-m", module, "start", "--config", str(directory / "infd.toml"), "--device", "null"]
        command += ["--port", "0", "--admin-socket", str(self.admin_socket), "--set", "log.format=json", *arguments]
        if listening is not None:
            command = [sys.executable, "-c", PASS_ON, str(listening.fileno()), *command]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={
                    "PATH": os.environ["PATH"],
                    "NOTIFY_SOCKET": str(directory / "notify"),
                    "XDG_CACHE_HOME": str(directory / "cache"),
                    **variables,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=() if listening is None else (listening.fileno(),),
            )
        self._pidfd = os.pidfd_open(self.process.pid)

    def ready(self) -> Daemon:
        """Wait for READY."""
        self.wait_for("READY", "1")
        return self

    def wait_for(self, name: str, value: str) -> None:
        """Wait for a notification; fail if the process ends without it."""
        while not any(said.get(name) == value for said in self.notified):
            if not self.read_notification():
                raise AssertionError(
                    f"{name}={value} was never sent; notifications: {self.notified}\n{self.log_text()}"
                )

    def exit_code(self) -> int:
        """Wait for the process's end and its last output."""
        while self.read_notification():
            pass
        return self.process.wait(PATIENCE_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def log_text(self) -> str:
        return self.log_file.read_text(errors="replace")

    def log(self, message: str) -> dict[str, Any]:
        """Return the only log record with this message."""
        whole = self.log_text().rpartition("\n")[0]  # the last line may be incomplete
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
        """Stream a completion; the block starts after the first event."""
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

    def read_notification(self) -> bool:
        """Read one notification. Return False once the process has ended and all are read."""
        heard, _, _ = select.select([self._manager, self._pidfd], [], [], PATIENCE_S)
        assert heard, f"neither a notification nor an end\n{self.log_text()}"
        if self._manager not in heard:
            return False
        lines = self._manager.recv(65536).decode().splitlines()
        self.notified.append(dict(line.split("=", 1) for line in lines))
        return True


@contextmanager
def served(directory: Path, arguments: Sequence[str]) -> Iterator[str]:
    """Start a daemon, and yield its address as a URL; see Daemon for the arguments."""
    daemon = Daemon(directory, arguments, {})
    try:
        host, port = daemon.ready().address
        yield f"http://{host}:{port}"
    finally:
        daemon.close()


class Events:
    """Yield the `data:` events of an answer, until [DONE] or the connection's end."""

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
