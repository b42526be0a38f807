from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
import uvloop

from infd.admin import connection
from infd.admin.commands import VERBS, AdminContext
from infd.admin.peers import Access, Peer
from infd.admin.protocol import Problem
from infd.admin.server import AdminServer
from infd.errors import StartError
from infd.request import FinishReason
from tests.admin.settings import fixed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.admin.conftest import AdminEngine

PATIENCE_S = 30.0  # reached only by a failing test


async def ask(path: Path, method: str, target: str, **options: Any) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.request(method, f"http://infd{target}", **options) as response,
    ):
        return response.status, msgspec.json.decode(await response.read())


async def test_every_verb_of_the_table_is_served(backend: AdminEngine) -> None:
    for verb in VERBS:
        status, _ = await ask(backend.socket, verb.method, verb.path.replace("{id}", "x"))
        assert status != 404 or verb.name == "abort", verb.name


async def test_status_answers_before_a_model_is_loaded(backend: AdminEngine) -> None:
    status, body = await ask(backend.socket, "GET", "/v1/status")
    assert status == 200
    assert body["state"] == "starting"
    assert body["pid"] == os.getpid()
    assert body["last_step_age_s"] is None


async def test_status_counts_running_and_waiting_sequences(backend: AdminEngine) -> None:
    async with backend.loaded(), backend.request():
        _, body = await ask(backend.socket, "GET", "/v1/status")
    assert body["state"] == "ready"
    assert body["running"] + body["waiting"] == 1


async def test_requests_are_listed_with_their_client(backend: AdminEngine) -> None:
    async with backend.loaded(), backend.request() as (request_id, _):
        _, body = await ask(backend.socket, "GET", "/v1/requests")
    (row,) = body["requests"]
    assert row["id"] == request_id
    assert row["client"] == "tester"
    assert row["prompt_tokens"] == 3


async def test_an_aborted_request_ends_with_abort(backend: AdminEngine) -> None:
    async with backend.loaded(), backend.request() as (request_id, choices):
        status, body = await ask(backend.socket, "POST", f"/v1/requests/{request_id}/abort")
        finishes = [delta.finish async for _, delta in choices]
    assert (status, body) == (200, {"id": request_id})
    assert finishes == [FinishReason.ABORT]


async def test_aborting_an_unknown_request_is_404_and_names_the_next_command(backend: AdminEngine) -> None:
    async with backend.loaded():
        status, body = await ask(backend.socket, "POST", "/v1/requests/nobody/abort")
    assert (status, body["code"]) == (404, "unknown_request")
    assert "infdctl ps" in body["detail"]


async def test_kernels_are_listed_after_the_model_is_loaded(backend: AdminEngine) -> None:
    status, body = await ask(backend.socket, "GET", "/v1/ops")
    assert (status, body["code"]) == (409, "not_loaded")
    async with backend.loaded():
        status, body = await ask(backend.socket, "GET", "/v1/ops")
    assert status == 200
    assert body["ops"] == [
        {"family": "attention", "chosen": "fake", "refused": {}},
        {"family": "grammar", "chosen": "fake 1.0", "refused": {"other": "absent"}},
    ]


async def test_drain_stops_the_daemon_like_term_and_answers_at_once(backend: AdminEngine) -> None:
    async with backend.loaded(), backend.request():
        status, body = await ask(backend.socket, "POST", "/v1/drain")
        assert backend.drained.is_set()
    assert status == 200
    assert body["running"] + body["waiting"] == 1


async def test_a_dump_shows_the_call_that_a_task_awaits(backend: AdminEngine) -> None:
    async with backend.loaded():
        _, body = await ask(backend.socket, "GET", "/v1/dump")
    frames = [frame for stack in body["tasks"] for frame in stack["frames"]]
    assert any("Engine" in frame for frame in frames)
    assert any("dump" in frame for frame in frames)
    assert "MainThread" in [stack["name"] for stack in body["threads"]]


async def test_a_page_in_a_browser_is_refused(backend: AdminEngine) -> None:
    for verb in VERBS:
        status, body = await ask(backend.socket, verb.method, verb.path, headers={"Origin": "http://evil.example"})
        assert (status, body["code"]) == (403, "origin")
    assert not backend.drained.is_set()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "takes a JSON object of"),
        (b"[1]", "takes a JSON object of"),
        (b"\xff", "takes a JSON object of"),
        (b'{"nonsense": 1}', "nonsense"),
        (b"[" * 5000, "takes a JSON object of"),
    ],
)
async def test_a_verb_refuses_unknown_arguments(backend: AdminEngine, body: bytes, said: str) -> None:
    for verb in VERBS:
        if verb.mutates:
            status, answer = await ask(backend.socket, "POST", verb.path.replace("{id}", "x"), data=body)
            assert (status, answer["code"]) == (400, "bad_request")
            assert said.replace("takes a JSON object of", "takes") in answer["detail"]
            assert verb.name in answer["detail"]
    assert not backend.drained.is_set()


async def test_unknown_paths_and_wrong_methods_are_problems_too(backend: AdminEngine) -> None:
    status, body = await ask(backend.socket, "GET", "/v1/nothing")
    assert (status, body["code"]) == (404, "unknown_path")
    assert "/v1/status" in body["detail"]
    status, body = await ask(backend.socket, "POST", "/v1/status")
    assert (status, body["code"]) == (405, "wrong_method")
    problem = msgspec.convert(body, Problem)
    assert (problem.status, problem.type) == (405, "about:blank")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/status"), ("POST", "/v1/drain"), ("PUT", "/v1/nothing")])
async def test_an_expectation_is_met_or_refused_with_a_problem(backend: AdminEngine, method: str, path: str) -> None:
    _, plain = await ask(backend.socket, method, path)
    status, body = await ask(backend.socket, method, path, headers={"Expect": "the unexpected"})
    assert (status, body["code"]) == (417, "unknown_expectation")

    _, body = await ask(backend.socket, method, path, data=b"{}", expect100=True)
    assert body.get("code") == plain.get("code")


async def test_an_internal_error_is_a_problem_without_details(
    backend: AdminEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(backend.engine, "status", broken)
    status, body = await ask(backend.socket, "GET", "/v1/status")
    assert (status, body["code"]) == (500, "internal_error")
    assert "secret" not in str(body)
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("groups", "read", "change"), [((), 403, 403), ((50,), 200, 403), ((50, 60), 200, 200), ((60,), 403, 200)]
)
async def test_groups_decide_which_verbs_another_user_may_use(
    tmp_path: Path, backend: AdminEngine, groups: tuple[int, ...], read: int, change: int
) -> None:
    server = AdminServer(
        AdminContext(backend.engine, "embedded", backend.drained.set, fixed()),
        access=Access(owner=1000, readers=50, admins=60),
        identify=lambda connection: Peer(4711, 99, frozenset(groups)),
    )
    await server.start(tmp_path / "other.sock")
    try:
        assert (await ask(tmp_path / "other.sock", "GET", "/v1/status"))[0] == read
        status, body = await ask(tmp_path / "other.sock", "POST", "/v1/drain")
    finally:
        await server.close()
    assert status == change
    assert backend.drained.is_set() is (change == 200)
    if change == 403:
        assert "infd-admin" in body["detail"]


async def test_mutations_are_logged_with_caller_and_outcome(
    backend: AdminEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "infd.admin")
    async with backend.loaded(), backend.request() as (request_id, _):
        await ask(backend.socket, "GET", "/v1/requests")
        await ask(backend.socket, "POST", f"/v1/requests/{request_id}/abort")
        await ask(backend.socket, "POST", "/v1/requests/no%0Abody/abort")
    told = [record.__dict__ for record in caplog.records if record.name == "infd.admin"]
    assert [(entry["verb"], entry["result"]) for entry in told] == [("abort", "done"), ("abort", "unknown_request")]
    assert {(entry["uid"], entry["pid"]) for entry in told} == {(os.geteuid(), os.getpid())}
    assert "\n" not in told[1]["path"]


async def test_a_second_daemon_is_refused_and_the_first_goes_on(backend: AdminEngine) -> None:
    with pytest.raises(StartError, match="another infd"):
        await AdminServer(AdminContext(backend.engine, "embedded", backend.drained.set, fixed())).start(backend.socket)
    assert (await ask(backend.socket, "GET", "/version"))[0] == 200


async def test_closing_removes_the_socket_and_can_be_repeated(backend: AdminEngine) -> None:
    await backend.admin.close()
    await backend.admin.close()
    assert not backend.socket.exists()


def test_credentials_are_read_under_uvloop(tmp_path: Path) -> None:
    async def main() -> int:
        from tests.admin.conftest import AdminEngine

        backend = AdminEngine(tmp_path / "admin.sock")
        await backend.admin.start(backend.socket)
        try:
            return (await ask(backend.socket, "POST", "/v1/drain"))[0]
        finally:
            await backend.admin.close()
            await backend.engine.close()

    assert uvloop.run(main()) == 200


async def connect(backend: AdminEngine, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(backend.socket)
    writer.write(sent)
    return reader, writer


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET /v1/status HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\na b: c\r\n\r\n"]
)
async def test_bytes_that_are_not_http_get_a_problem_and_no_log_record(
    backend: AdminEngine, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    reader, writer = await connect(backend, sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()

    assert b" 400 " in head
    assert b"application/problem+json" in head
    assert msgspec.json.decode(body, type=Problem).code == "invalid_http"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("sent", [b"", b"GET /v1/sta", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_an_idle_connection_is_closed(backend: AdminEngine, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection, "IDLE_S", 0.01)
    reader, writer = await connect(backend, sent)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 200") is sent.endswith(b"\r\n\r\n")


async def test_silent_connections_do_not_lock_out_other_clients(
    backend: AdminEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    idle = [await connect(backend) for _ in range(4)]
    async with asyncio.timeout(PATIENCE_S):
        assert (await ask(backend.socket, "GET", "/version"))[0] == 200
        assert [await reader.read() for reader, _ in idle[:2]] == [b"", b""]
    assert not idle[3][0].at_eof()
    for _, writer in idle:
        writer.close()
