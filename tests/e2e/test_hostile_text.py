"""With a hostile chat template and tokenizer the daemon survives, answers other requests, and stops when asked to."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infd import embedded
from infd.admin.ctl import show
from infd.admin.ctl.client import AdminClient
from infd.admin.protocol import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

PATIENCE_S = 60.0  # only a test that fails waits this long
# C code can hold the interpreter lock for hours: jinja's wordwrap takes quadratic time.
TEMPLATE = (
    "{% if messages[-1].content == 'hang' %}{{ ('x' * 4000000) | wordwrap(1) }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def hostile(directory: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(embedded.path() / name, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    described = json.loads((directory / "tokenizer.json").read_text())
    described["pre_tokenizer"]["pretokenizers"].insert(0, BACKTRACKING)
    (directory / "tokenizer.json").write_text(json.dumps(described))
    return directory


def post(daemon: Daemon, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
    connection = HTTPConnection(*daemon.address, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers["X-Request-Id"]
    finally:
        connection.close()


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def begin(daemon: Daemon, content: str) -> socket.socket:
    """Send a chat request without waiting for the answer."""
    data = json.dumps(chat(content)).encode()
    client = socket.create_connection(daemon.address, timeout=PATIENCE_S)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    client.sendall(head % len(data) + data)
    return client


def worker(daemon: Daemon) -> int:
    """Return the daemon's only child process."""
    tasks = Path(f"/proc/{daemon.process.pid}/task").iterdir()
    (child,) = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return child


def wait_until_busy(pid: int, daemon: Daemon) -> None:
    """Wait until a process is in state R, polling the daemon between checks."""
    for _ in range(10_000):
        assert daemon.get("/livez")[0] == 200
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R":
            return
    raise AssertionError("the worker is not at work")


def test_a_hostile_checkpoint_text_fails_only_its_own_request(
    start_daemon: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = start_daemon("--model", str(hostile(tmp_path)), "--set", "server.drain_timeout_s=1").ready()
    status = AdminClient([str(daemon.admin_socket)], timeout_s=PATIENCE_S).get("/v1/status", Status)
    assert status.apart == {
        "tokenizer": "pre_tokenizer: Split: a regular expression that infd does not know to be fast",
        "chat template 'default'": "line 1: the filter wordwrap",
    }
    show.status(status)
    assert "chat template 'default', whose cost is not known: line 1: the filter wordwrap" in capsys.readouterr().out
    assert post(daemon, "/v1/chat/completions", chat("hello"))[0] == 200

    code, body, request_id = post(daemon, "/v1/completions", {"prompt": "a" * 40 + "b", "max_tokens": 1})
    assert (code, body["error"]["code"]) == (500, "internal_error")
    assert request_id in body["error"]["message"]
    assert request_id in daemon.log_text()
    assert post(daemon, "/v1/completions", {"prompt": "hello", "max_tokens": 1})[0] == 200

    pid = worker(daemon)
    with begin(daemon, "hang"):
        wait_until_busy(pid, daemon)
        assert [daemon.get("/livez")[0] for _ in range(20)] == [200] * 20
        ended = os.pidfd_open(pid)
        daemon.signal(signal.SIGTERM)
        assert daemon.exit_code() == os.EX_TEMPFAIL  # the request in flight was cut off
    assert select.select([ended], [], [], PATIENCE_S)[0]
    os.close(ended)


def test_a_worker_that_is_busy_does_not_outlive_a_daemon_that_is_killed(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon("--model", str(hostile(tmp_path))).ready()
    pid = worker(daemon)
    with begin(daemon, "hang"):
        wait_until_busy(pid, daemon)
        ended = os.pidfd_open(pid)
        daemon.signal(signal.SIGKILL)
        assert select.select([ended], [], [], PATIENCE_S)[0]
    os.close(ended)
