"""Responses and conversations in a file, across restarts of real daemons."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.process import PATIENCE_S, Daemon

if TYPE_CHECKING:
    from pathlib import Path

LONG: dict[str, Any] = {"input": "hi", "max_output_tokens": 1000, "ignore_eos": True}
BRIEF: dict[str, Any] = LONG | {"max_output_tokens": 3}


def started(directory: Path, *arguments: str) -> Daemon:
    directory.mkdir()
    path = directory.parent / "store"
    settings = ["--set", f"store.path={path}", "--set", "device.null_step_ms=20", *arguments]
    return Daemon(directory, settings, {})


def ask(daemon: Daemon, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*daemon.address, timeout=PATIENCE_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def told(daemon: Daemon, method: str, path: str, body: Any = None) -> dict[str, Any]:
    status, found = ask(daemon, method, path, body)
    assert status == 200, found
    decoded: dict[str, Any] = json.loads(found)
    return decoded


def end_events(daemon: Daemon, path: str) -> list[Any]:
    status, found = ask(daemon, "GET", path)
    assert status == 200
    lines = [line for line in found.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_restart_loses_no_stored_response_and_fails_those_in_flight(tmp_path: Path, by: signal.Signals):
    daemon = started(tmp_path / "first", "--set", "server.drain_timeout_s=0").ready()
    try:
        conversation = told(daemon, "POST", "/v1/conversations", {"metadata": {"a": "b"}})
        first = told(daemon, "POST", "/v1/responses", BRIEF | {"conversation": conversation["id"]})
        items = told(daemon, "GET", f"/v1/conversations/{conversation['id']}/items")
        behind = told(daemon, "POST", "/v1/responses", BRIEF | {"background": True})
        replayed = end_events(daemon, f"/v1/responses/{behind['id']}?stream=true")
        flying = [told(daemon, "POST", "/v1/responses", LONG | {"background": True}) for _ in range(3)]
        daemon.signal(by)
        daemon.exit_code()
    finally:
        daemon.close()
    daemon = started(tmp_path / "second").ready()
    try:
        assert told(daemon, "GET", f"/v1/responses/{first['id']}") == first
        assert told(daemon, "GET", f"/v1/conversations/{conversation['id']}") == conversation
        assert told(daemon, "GET", f"/v1/conversations/{conversation['id']}/items") == items
        assert end_events(daemon, f"/v1/responses/{behind['id']}?stream=true") == replayed
        for response in flying:
            ended = told(daemon, "GET", f"/v1/responses/{response['id']}")
            assert (ended["status"], ended["id"]) == ("failed", response["id"])
            *_, last = end_events(daemon, f"/v1/responses/{response['id']}?stream=true&starting_after=0")
            assert (last["type"], last["response"]) == ("response.failed", ended)
            assert last["sequence_number"] > 0
        assert told(daemon, "POST", "/v1/responses", BRIEF | {"previous_response_id": first["id"]})
    finally:
        daemon.close()


def test_a_file_that_is_no_store_ends_the_start_with_78(tmp_path: Path):
    (tmp_path / "store").write_bytes(b"hello" * 1000)
    daemon = started(tmp_path / "first")
    try:
        assert daemon.exit_code() == os.EX_CONFIG
        assert f"store.path: {tmp_path / 'store'}" in daemon.log_text()
    finally:
        daemon.close()


def test_a_full_disk_fails_only_requests_that_are_to_be_stored(tmp_path: Path):
    daemon = started(tmp_path / "first").ready()
    try:
        first = told(daemon, "POST", "/v1/responses", BRIEF)
        before = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (2**17, before[1]))
        large = BRIEF | {"instructions": "x" * 500, "metadata": {"a": "b"}, "input": "y" * 200}
        conversation = {"items": [{"role": "user", "content": "x" * 2**19}]}
        for path, body in (("/v1/conversations", conversation),):
            status, refused = ask(daemon, "POST", path, body)
            assert (status, json.loads(refused)["error"]["code"]) == (507, "not_stored")
        assert told(daemon, "POST", "/v1/responses", large | {"store": False})["status"] == "incomplete"
        assert ask(daemon, "POST", "/v1/completions", {"prompt": "hi", "max_tokens": 2})[0] == 200
        assert told(daemon, "GET", f"/v1/responses/{first['id']}") == first
        assert daemon.get("/readyz")[0] == 200
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, before)
        assert told(daemon, "POST", "/v1/conversations", conversation)
    finally:
        daemon.close()
