"""`infdctl` as a process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from infd.admin import protocol
from infd.admin.ctl.app import wait_
from infd.admin.ctl.client import AdminClient, TimedOut, Unreachable
from infd.admin.ctl.show import left_out_of, time_of
from infd.config import QuotasConfig
from infd.engine.lifecycle.state import State
from infd.telemetry.slowest import Ended
from infd.telemetry.usage import Usage
from infd.version import __version__

if TYPE_CHECKING:
    from tests.admin.conftest import AdminEngine

ROOT = Path(__file__).parents[2]


async def start_infdctl(*arguments: str | Path, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from infd.admin.ctl import main; main()",
        *map(str, arguments),
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def infdctl(*arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    """Run infdctl; return exit code, standard output and standard error."""
    process = await start_infdctl(*arguments, **environment)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_json_and_table_of_every_reading_verb(backend: AdminEngine) -> None:
    def at(*arguments: str) -> Any:
        return infdctl("--socket", backend.socket, *arguments)

    async with backend.loaded(), backend.request() as (request_id, _):
        runs = await asyncio.gather(*(at(verb, *flag) for verb in READING for flag in ((), ("--json",))))
    for (code, _, err), (json_code, json, json_err), reply in zip(runs[::2], runs[1::2], READING.values(), strict=True):
        assert (code, json_code) == (0, 0), err + json_err
        msgspec.json.decode(json, type=reply, strict=True)
    tables = dict(zip(READING, (out for _, out, _ in runs[::2]), strict=True))
    assert "ready" in tables["status"]
    assert request_id in tables["ps"]
    assert "attention" in tables["ops"]
    assert tables["ops"].startswith("device ")
    assert ", stored as int4, groups of 32, kept (7 matrices)" in tables["ops"]
    assert ", stored as int4, groups of 32, kept (7 matrices)" in tables["status"]
    assert [line for out in tables.values() for line in out.splitlines() if line != line.rstrip()] == []
    assert "Engine" in tables["dump"]
    assert "\x1b" not in "".join(tables.values())


READING: dict[str, type[msgspec.Struct]] = {
    "status": protocol.Status,
    "ps": protocol.Requests,
    "slow": protocol.SlowRequests,
    "ops": protocol.Ops,
    "usage": protocol.UsageRows,
    "dump": protocol.Dump,
}


async def test_the_socket_may_be_named_behind_every_command(backend: AdminEngine, tmp_path: Path) -> None:
    elsewhere = ("--socket", tmp_path / "nothing.sock")
    runs = await asyncio.gather(
        infdctl(*elsewhere, "status", "--socket", backend.socket),
        infdctl("config", "get", "log.level", f"--socket={backend.socket}"),
        infdctl("wait", "ready", "--timeout", "0", *elsewhere),
    )

    assert [code for code, _, _ in runs] == [0, 0, 5]
    assert str(elsewhere[1]) in runs[2][2]


async def test_status_says_that_native_kernels_are_missing_and_how_to_build_them(
    backend: AdminEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with backend.loaded():
        _, out, _ = await infdctl("--socket", backend.socket, "status")
        assert "native" not in out
        reason = "built from other sources than the present ones: `make native` rebuilds it"
        facts = {**backend.executor.describe(), "native_missing": reason}
        monkeypatch.setattr(backend.executor, "describe", lambda: facts)
        _, out, _ = await infdctl("--socket", backend.socket, "status")
    assert f"native kernels are not used: {reason}" in " ".join(out.split())


async def test_the_status_has_the_kept_drafts_by_position(backend: AdminEngine) -> None:
    async with backend.loaded():
        _, out, _ = await infdctl("--socket", backend.socket, "status")
        assert "drafts" not in out
        counted = backend.engine.core.scheduler.speculation
        counted.drafts, counted.drafted, counted.accepted = 20, 50, [16, 5, 0]
        _, out, _ = await infdctl("--socket", backend.socket, "status")
    assert "2.05 tokens a step; kept by position: 80% 25%" in " ".join(out.split())


async def test_the_status_counts_rejected_requests_by_reason(backend: AdminEngine) -> None:
    backend.engine.metrics.rejected.update(overloaded=3, rate_limit_exceeded=12)
    _, out, _ = await infdctl("--socket", backend.socket, "status")

    assert "\nrejected  3 overloaded, 12 rate_limit_exceeded\n" in out


async def test_abort_ends_a_request(backend: AdminEngine) -> None:
    async with backend.loaded(), backend.request() as (request_id, choices):
        code, out, err = await infdctl("abort", request_id, "--json", INFD_ADMIN_SOCKET=str(backend.socket))
        assert [delta.finish is not None async for _, delta in choices] == [True]
    assert code == 0, err
    assert msgspec.json.decode(out) == {"id": request_id}


async def test_a_refused_command_exits_1(backend: AdminEngine) -> None:
    async with backend.loaded():
        code, out, err = await infdctl("--socket", backend.socket, "abort", "no/such one")
    assert (code, out) == (1, "")
    assert err.startswith("infdctl: no request 'no/such one'")


async def test_wrong_usage_exits_2(backend: AdminEngine) -> None:
    runs = await asyncio.gather(
        infdctl("no-such-verb"), infdctl("abort"), infdctl("--socket", backend.socket, "drain", "--timeout", "1")
    )
    assert [code for code, _, _ in runs] == [2, 2, 2]
    assert all(err.startswith("infdctl: ") and err.count("\n") == 1 for _, _, err in runs)
    assert not backend.drained.is_set()


async def test_no_daemon_exits_3_and_names_the_sockets_that_were_tried(tmp_path: Path) -> None:
    code, out, err = await infdctl("status", "--json", XDG_RUNTIME_DIR=str(tmp_path))
    assert (code, out) == (3, "")
    assert f"{tmp_path}/infd/admin.sock" in err
    assert "/run/infd/admin.sock" in err
    assert "infd start" in err


async def test_a_left_over_socket_exits_3(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "admin.sock"))
    code, _, err = await infdctl("--socket", tmp_path / "admin.sock", "status")
    assert code == 3
    assert "left over" in err


async def test_a_directory_is_not_taken_for_a_socket(tmp_path: Path) -> None:
    code, _, err = await infdctl("--socket", tmp_path, "status")
    assert code == 3
    assert f"{tmp_path} is not a socket" in err


async def test_wait_returns_in_the_state_and_otherwise_times_out(backend: AdminEngine) -> None:
    waiting = infdctl("--socket", backend.socket, "wait", "ready", "--timeout", "0")
    code, _, err = await waiting
    assert (code, err) == (5, "infdctl: not ready after 0 s: the daemon is starting\n")

    async with backend.loaded():
        assert (await infdctl("--socket", backend.socket, "wait", "ready"))[0] == 0
    backend.engine.lifecycle.enter(State.FAILED, "the GPU is gone")
    code, _, err = await infdctl("--socket", backend.socket, "wait", "ready")
    assert (code, err) == (4, "infdctl: the daemon is failed (the GPU is gone)\n")


async def test_a_daemon_that_is_not_started_yet_is_waited_for(tmp_path: Path) -> None:
    code, _, err = await infdctl("--socket", tmp_path / "admin.sock", "wait", "ready", "--timeout", "0.3")

    assert code == 5
    assert err.count("infdctl: waiting: no daemon: nothing is at") == 1
    assert "infdctl: not ready after 0.3 s: no daemon" in err


async def test_waiting_ends_with_a_daemon_that_ends_while_it_starts(backend: AdminEngine) -> None:
    process = await start_infdctl("--socket", backend.socket, "wait", "ready")
    assert process.stderr is not None
    assert await process.stderr.readline() == b"infdctl: waiting: the daemon is starting\n"
    await backend.admin.close()

    assert await process.stderr.read() == b"infdctl: the daemon ended while it was starting; its log says why\n"
    assert await process.wait() == 4


async def test_both_versions_are_shown(backend: AdminEngine) -> None:
    assert (await infdctl("--socket", backend.socket, "version"))[1] == f"infdctl {__version__}, daemon {__version__}\n"


async def test_every_state_can_be_named() -> None:
    assert set(protocol.STATES) == {state.value for state in State}


async def test_the_version_is_printed() -> None:
    assert await infdctl("--version") == (0, f"infdctl {__version__}\n", "")


async def test_the_wrong_state_exits_4(backend: AdminEngine) -> None:
    code, _, err = await infdctl("--socket", backend.socket, "ops")
    assert code == 4
    assert "starting" in err


async def test_drain_returns_at_once_without_wait(backend: AdminEngine) -> None:
    code, out, err = await infdctl("--socket", backend.socket, "drain", "--json")
    assert code == 0, err
    assert backend.drained.is_set()
    assert msgspec.json.decode(out)["exited"] is False


async def test_drain_waits_until_the_daemon_is_gone(backend: AdminEngine) -> None:
    async def leave() -> None:
        await backend.drained.wait()
        await backend.admin.close()

    (code, out, err), _ = await asyncio.gather(
        infdctl("--socket", backend.socket, "drain", "--wait", "--timeout", "60", "--json"), leave()
    )
    assert code == 0, err
    assert msgspec.json.decode(out)["exited"] is True


async def test_a_drain_that_cut_requests_off_exits_1(backend: AdminEngine) -> None:
    async def leave() -> None:
        await backend.drained.wait()
        backend.engine.cut_off(2, "the drain ran out of time", after_s=60.0)
        await backend.admin.close()

    (code, out, err), _ = await asyncio.gather(
        infdctl("--socket", backend.socket, "drain", "--wait", "--json"), leave()
    )
    assert code == 1
    assert msgspec.json.decode(out)["cut_off"] == 2
    assert err.endswith("infdctl: drained, but 2 requests were cut off after 60 s (server.drain_timeout_s)\n")


async def test_waiting_for_longer_than_allowed_exits_5(backend: AdminEngine) -> None:
    code, _, err = await infdctl("--socket", backend.socket, "drain", "--wait", "--timeout", "0")
    assert code == 5
    assert "still draining after 0 s (0 running, 0 waiting; at most 60 s more, by server.drain_timeout_s)" in err


def test_wait_goes_on_while_the_daemon_does_not_answer(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(tmp_path / "admin.sock"))
        busy.listen()
        client = AdminClient([str(tmp_path / "admin.sock")], timeout_s=0.01)
        told = CliRunner().invoke(wait_, ["ready", "--timeout", "0.5"], obj=client)

    assert told.exit_code == 5
    assert told.output == (
        "infdctl: waiting: the daemon does not answer yet\n"
        "Error: not ready after 0.5 s: the daemon does not answer yet\n"
    )


def test_a_daemon_that_does_not_answer_is_a_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.bind(str(tmp_path / "admin.sock"))
        stuck.listen()
        with pytest.raises(TimedOut, match="did not answer"):
            AdminClient([str(tmp_path / "admin.sock")], timeout_s=0.01).get("/v1/status", protocol.Status)


async def test_another_server_at_the_socket_is_not_taken_for_infd(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        writer.close()

    client = AdminClient([str(tmp_path / "admin.sock")])
    async with await asyncio.start_unix_server(answer, tmp_path / "admin.sock"):
        with pytest.raises(Unreachable, match="does not speak"):
            await asyncio.to_thread(client.get, "/v1/status", protocol.Status)


async def test_infdctl_starts_without_server_code() -> None:
    heavy = ("torch", "transformers", "aiohttp", "uvloop", "rich", "asyncio")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"import infd.admin.ctl, sys; print([name for name in {heavy} if name in sys.modules])",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert out.decode().strip() == "[]"


async def test_usage_lists_the_tokens_of_each_key_and_tenant(backend: AdminEngine):
    used = {
        "ann": Usage(tenant="team", requests=5, limited=2, refused=4, answered=3, prompt=40, cached=16, generated=9),
        "bob": Usage(tenant="team", requests=2, limited=0, answered=2, prompt=10, cached=4, generated=1),
        "": Usage(requests=1, answered=1, prompt=4, generated=1),
    }
    backend.engine.metrics.usage.update(used)
    backend.live.now = replace(backend.live.now, quotas=QuotasConfig(tenants={"team": "share=2"}))

    code, shown, _ = await infdctl("--socket", backend.socket, "usage")
    keys, tenants = ([line.split() for line in part.splitlines()] for part in shown.split("\n\n"))
    assert code == 0
    assert keys == [
        ["KEY", "TENANT", "REQUESTS", "LIMITED", "REFUSED", "ANSWERED", "PROMPT", "CACHED", "GENERATED"],
        ["-", "-", "1", "0", "0", "1", "4", "0", "1"],
        ["ann", "team", "5", "2", "4", "3", "40", "16", "9"],
        ["bob", "team", "2", "0", "0", "2", "10", "4", "1"],
    ]
    assert tenants == [
        ["TENANT", "KEYS", "REQUESTS", "LIMITED", "REFUSED", "ANSWERED", "PROMPT", "CACHED", "GENERATED", "QUOTA"],
        ["-", "0", "1", "0", "0", "1", "4", "0", "1", "-"],
        ["team", "2", "7", "2", "4", "5", "50", "20", "10", "share=2"],
    ]

    _, shown, _ = await infdctl("--socket", backend.socket, "usage", "--json")
    answer = msgspec.json.decode(shown)
    assert answer["since"] <= time.time()
    assert [row["key"] for row in answer["usage"]] == ["", "ann", "bob"]
    assert answer["usage"][1]["generated"] == 9
    assert [(row["tenant"], row["generated"]) for row in answer["tenants"]] == [("", 1), ("team", 10)]


async def test_keys_that_share_no_tenant_are_not_listed_twice(backend: AdminEngine):
    backend.engine.metrics.usage["ann"] = Usage(tenant="ann", requests=5)

    _, shown, _ = await infdctl("--socket", backend.socket, "usage")
    assert shown.count("ann") == 2
    assert len(shown.splitlines()) == 2


async def test_the_slowest_ended_requests_are_listed_by_the_time_asked_for(backend: AdminEngine):
    for number, (total, ttft) in enumerate([(900.0, 300.0), (5000.0, 20.0), (70.0, None)]):
        ended = Ended(
            id=f"req-{number}",
            client="ann",
            tenant="team",
            model="tiny",
            time=time.time() - 600 * number,
            queue_ms=3.0,
            ttft_ms=ttft,
            total_ms=total,
            prompt=7,
            cached=4,
            generated=11,
            finish="stop",
            stages={"prepare_ms": 0.0, "queue_ms": 3.0, "prefill_ms": 0.0, "decode_ms": 5000.0, "send_ms": 0.0},
            preemptions=0,
        )
        backend.engine.slowest.note({"total": total, "ttft": ttft, "queue": 3.0}, lambda ended=ended: ended)  # type: ignore[misc]

    code, shown, err = await infdctl("--socket", backend.socket, "slow", TZ="UTC")
    head, first, *rest = shown.splitlines()
    assert (code, err) == (
        0,
        "slowest requests that ended in the last 6 hours, by the time of the whole answer\n",
    )
    assert head.split()[:8] == ["ID", "CLIENT", "TENANT", "MODEL", "ENDED", "QUEUE", "TTFT", "TOTAL"]
    assert first.split()[:4] + first.split()[5:6] == ["req-1", "ann", "team", "tiny", "0.00s"]
    assert first.split()[6:12] == ["0.02s", "5.00s", "7", "4", "11", "stop"]
    assert first.endswith("11 tokens in 5.0 s, 500.0 ms each")
    assert [line.split()[0] for line in rest] == ["req-0", "req-2"]

    _, shown, _ = await infdctl("--socket", backend.socket, "slow", "--by", "ttft", "--json")
    answer = msgspec.json.decode(shown)
    assert [row["id"] for row in answer["requests"]] == ["req-0", "req-1"]
    assert answer["within_s"] == 6 * 3600
    assert {row["cause"].partition(":")[0] for row in answer["requests"]} == {"waited 3.0 ms"}
    _, shown, err = await infdctl("--socket", backend.socket, "slow", "--since", "15m")
    assert "in the last 15 minutes" in err
    assert [line.split()[0] for line in shown.splitlines()] == ["ID", "req-1", "req-0"]
    code, _, err = await infdctl("--socket", backend.socket, "slow", "--by", "age")
    assert code == 2
    assert "'total', 'ttft', 'queue'" in err


def test_a_time_of_another_day_has_its_date():
    noon = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))

    assert time_of(noon, noon + 3600) == "12:00:00"
    assert time_of(noon, noon + 86400) == "2026-03-04T12:00:00"


def test_a_narrow_terminal_goes_without_spare_columns_until_the_others_fit():
    widths = {"ID": 24, "CLIENT": 6, "CAUSE": 50, "TOTAL": 6}

    assert left_out_of(widths, ("CAUSE", "CLIENT"), 92) == []
    assert left_out_of(widths, ("CAUSE", "CLIENT"), 91) == ["CAUSE"]
    assert left_out_of(widths, ("CAUSE", "CLIENT"), 39) == ["CAUSE", "CLIENT"]
    assert left_out_of(widths, ("CAUSE", "CLIENT"), 10) == ["CAUSE", "CLIENT"]
    assert left_out_of({}, (), 80) == []
