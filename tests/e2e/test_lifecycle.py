"""From start to exit, for systemd, operators and clients. Neither tests nor daemon import torch."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

QUICK = ("--set", "device.null_step_ms=5")
SLOW = ("--set", "device.null_step_ms=100")
ENDLESS = 2000  # tokens; at SLOW longer than any test


def test_it_becomes_ready_says_so_and_answers(start_daemon: Start) -> None:
    daemon = start_daemon().ready()

    assert daemon.get("/readyz") == (200, b'{"state":"ready"}')
    said = next(said for said in daemon.notified if "READY" in said)
    assert said["STATUS"] == "ready · 0 running · 0 waiting · KV 0%"
    record = daemon.log("ready")
    assert record["device"] == "null"
    assert record["model"] == "embedded"
    assert record["ready_s"] > 0


def test_more_time_is_asked_for_before_it_is_ready(start_daemon: Start) -> None:
    daemon = start_daemon().ready()

    assert any("EXTEND_TIMEOUT_USEC" in said for said in daemon.notified)


def test_the_null_device_needs_no_torch_and_no_children(start_daemon: Start) -> None:
    daemon = start_daemon().ready()
    with daemon.stream(max_tokens=5) as events:
        list(events)

    proc = Path(f"/proc/{daemon.process.pid}")
    assert "libtorch" not in (proc / "maps").read_text()
    assert (proc / f"task/{daemon.process.pid}/children").read_text() == ""


def test_term_lets_a_stream_finish(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK).ready()
    with daemon.stream(max_tokens=100, stream_options={"include_usage": True}) as events:
        daemon.signal(signal.SIGTERM)
        rest = list(events)

    assert events.done
    assert not any("error" in event for event in rest)
    assert [choice["finish_reason"] for event in rest for choice in event["choices"]][-1] == "length"
    assert rest[-1]["usage"]["completion_tokens"] == 100
    assert daemon.exit_code() == 0


def test_a_drain_that_takes_too_long_ends_in_an_error_event_and_75(start_daemon: Start) -> None:
    daemon = start_daemon(*SLOW, "--set", "server.drain_timeout_s=0.1").ready()
    with daemon.stream(max_tokens=ENDLESS) as events:
        daemon.signal(signal.SIGTERM)
        *_, last = events

    assert "error" in last
    assert events.done
    assert daemon.exit_code() == 75
    begun = daemon.log("draining")
    assert (begun["reason"], begun["requests"]) == ("TERM", 1)
    cut_off = daemon.log("requests are cut off")
    assert (cut_off["reason"], cut_off["requests"]) == ("the drain ran out of time", 1)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_int_or_a_second_term_ends_streams_at_once(start_daemon: Start, first: signal.Signals) -> None:
    daemon = start_daemon(*SLOW).ready()
    with daemon.stream(max_tokens=ENDLESS) as events:
        daemon.signal(first)
        if first is signal.SIGTERM:
            daemon.wait_for("STOPPING", "1")
            daemon.signal(signal.SIGTERM)
        *_, last = events

    assert "error" in last
    assert events.done
    assert daemon.exit_code() == 0
    cut_off = daemon.log("requests are cut off")
    assert (cut_off["reason"], cut_off["requests"]) == ("INT" if first is signal.SIGINT else "a second TERM", 1)


def test_infdctl_drain_stops_the_daemon_like_term(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK).ready()
    command = [sys.executable, "-c", "from infd.admin.ctl import main; main()", "--socket", str(daemon.admin_socket)]
    with daemon.stream(max_tokens=50) as events:
        done = subprocess.run([*command, "drain"], capture_output=True, text=True, timeout=60, check=False)
        rest = list(events)

    assert done.returncode == 0, done.stderr
    assert daemon.log("draining")["reason"] == "infdctl drain"
    assert [choice["finish_reason"] for event in rest for choice in event["choices"]][-1] == "length"
    assert daemon.exit_code() == 0


def test_a_draining_daemon_answers_probes_and_refuses_work_until_the_last_stream_has_ended(
    start_daemon: Start,
) -> None:
    daemon = start_daemon(*SLOW).ready()
    address = daemon.address
    with daemon.stream(max_tokens=20) as events:
        daemon.signal(signal.SIGTERM)
        daemon.wait_for("STOPPING", "1")

        assert {path: daemon.get(path)[0] for path in ("/livez", "/readyz", "/metrics", "/v1/models")} == {
            "/livez": 200,
            "/readyz": 503,
            "/metrics": 200,
            "/v1/models": 200,
        }
        with pytest.raises(AssertionError, match="draining"), daemon.stream():
            pass
        assert len(list(events)) >= 19
    assert daemon.exit_code() == 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection(address):
        pass


def test_readiness_fails_while_draining(start_daemon: Start) -> None:
    daemon = start_daemon(*SLOW).ready()
    with daemon.stream(max_tokens=ENDLESS), socket.create_connection(daemon.address, timeout=60) as kept:
        kept.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200")
        daemon.signal(signal.SIGTERM)
        daemon.wait_for("STOPPING", "1")
        kept.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = kept.recv(65536)
        assert kept.recv(1) == b"", "a kept connection is closed after its answer"

    assert answer.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in answer.lower()


def test_an_idle_daemon_stops_and_leaves_nothing_behind(start_daemon: Start) -> None:
    daemon = start_daemon().ready()
    assert daemon.admin_socket.is_socket()
    daemon.signal(signal.SIGTERM)

    assert daemon.exit_code() == 0
    assert not daemon.admin_socket.exists()
    assert "Traceback" not in daemon.log_text()
    assert daemon.log("stopped")["exit_code"] == 0


def test_an_idle_daemon_exits_and_the_next_connection_starts_another(start_daemon: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as kept:
        daemon = start_daemon(*QUICK, "--set", "server.idle_exit_s=0.5", listening=kept).ready()
        with daemon.stream(max_tokens=5) as events:
            list(events)
        assert daemon.exit_code() == 0
        assert daemon.log("draining")["reason"] == "no request for 0.5 s"

        with socket.create_connection(kept.getsockname(), timeout=60) as waiting:
            waiting.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            start_daemon(listening=kept).ready()
            assert waiting.recv(65536).startswith(b"HTTP/1.1 200")


def test_without_systemds_sockets_an_idle_exit_is_refused(start_daemon: Start) -> None:
    daemon = start_daemon("--set", "server.idle_exit_s=5")

    assert daemon.exit_code() == 78
    assert "infd.socket" in daemon.log_text()


def test_term_while_starting_is_a_clean_exit(start_daemon: Start) -> None:
    daemon = start_daemon()
    daemon.wait_for("EXTEND_TIMEOUT_USEC", "30000000")
    daemon.signal(signal.SIGTERM)

    assert daemon.exit_code() == 0


def test_a_killed_daemons_socket_is_taken_over(start_daemon: Start) -> None:
    killed = start_daemon().ready()
    killed.signal(signal.SIGKILL)
    assert killed.exit_code() == -signal.SIGKILL
    assert killed.admin_socket.is_socket()

    start_daemon("--admin-socket", str(killed.admin_socket)).ready()


def test_a_living_daemons_socket_is_not_taken(start_daemon: Start) -> None:
    living = start_daemon().ready()
    second = start_daemon("--admin-socket", str(living.admin_socket))

    assert second.exit_code() == 71, "as for a port in use"
    assert f"another infd (pid {living.process.pid})" in second.log_text()
    assert living.admin_socket.is_socket()
    assert living.get("/readyz")[0] == 200


def test_a_port_in_use_is_exit_71_with_the_options_that_change_it(start_daemon: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = start_daemon("--port", str(port))
        code = daemon.exit_code()

    assert code == 71
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another" in daemon.log_text()
    assert "Traceback" not in daemon.log_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--nonsense"], 64, "No such option"),
        (["--set", "server.prot=1"], 78, "the nearest known one is server.port"),
        (["--model", "/nonexistent"], 78, "/nonexistent is not a directory"),
        (["--api-key-file", "/nonexistent"], 78, "/nonexistent cannot be read"),
    ],
)
def test_an_impossible_start_exits_with_its_code(
    start_daemon: Start, arguments: list[str], code: int, says: str
) -> None:
    daemon = start_daemon(*arguments)

    assert daemon.exit_code() == code
    assert says in daemon.log_text()
    assert "Traceback" not in daemon.log_text()


def test_quit_dumps_stacks_and_exits_134(start_daemon: Start) -> None:
    daemon = start_daemon(*SLOW).ready()
    with daemon.stream(max_tokens=ENDLESS):
        daemon.signal(signal.SIGQUIT)
        assert daemon.exit_code() == 134

    assert "task engine" in daemon.log_text()
    assert "Current thread" in daemon.log_text()


def test_usr1_logs_the_status_and_every_request(start_daemon: Start) -> None:
    daemon = start_daemon(*SLOW).ready()
    with daemon.stream(max_tokens=ENDLESS):
        daemon.signal(signal.SIGUSR1)
        daemon.signal(signal.SIGINT)
        daemon.exit_code()

    status = daemon.log("status")
    assert status["running"] == 1
    assert status["terminal_stop"] == 0
    assert datetime.fromisoformat(status["since"]).tzinfo is not None
    assert daemon.log("status of a request")["state"] == "running"


def test_hup_changes_live_settings_and_names_the_others(start_daemon: Start) -> None:
    daemon = start_daemon().ready()
    (daemon.directory / "infd.toml").write_text("[limits]\nchoices = 3\n[device]\ndepth = 2\n")
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("RELOADING", "1")
    while daemon.notified[-1].get("READY") != "1":
        assert daemon.read_notification()

    with pytest.raises(AssertionError, match="n is at most 3"), daemon.stream(n=4):
        pass
    assert daemon.log("setting changed")["new"] == 3
    assert daemon.log("this setting changes at the next start only")["key"] == "device.depth"


def test_a_hup_with_a_bad_file_changes_nothing(start_daemon: Start) -> None:
    daemon = start_daemon("--set", "limits.choices=3").ready()
    (daemon.directory / "infd.toml").write_text("[limits]\nchoices = 0\n")
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("RELOADING", "1")
    while daemon.notified[-1].get("READY") != "1":
        assert daemon.read_notification()

    assert "limits.choices = 0" in daemon.log_text()
    with daemon.stream(n=3, max_tokens=1):
        pass


def test_a_reload_over_the_admin_socket_fails_visibly(start_daemon: Start) -> None:
    daemon = start_daemon().ready()
    control = [sys.executable, "-c", "from infd.admin.ctl import main; main()", "--socket", str(daemon.admin_socket)]

    def infdctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*control, *arguments], capture_output=True, text=True, check=False)

    assert "0 settings changed" in infdctl("reload").stderr
    assert infdctl("config", "set", "log.level=debug").stdout == 'log.level: "info" -> "debug"\n'
    assert '"debug"' in infdctl("config", "get", "log.level").stdout
    assert infdctl("config", "set", "device.depth=2").returncode == 1
    assert infdctl("config", "get", "log.lvl").returncode == 2
    twice = infdctl("config", "set", "quotas.tenants=a=share=2", "quotas.tenants=b=share=1")
    assert (twice.returncode, "given twice" in twice.stderr) == (2, True)
    (daemon.directory / "keys").write_text(f"ann:{'0' * 64}\n")
    assert infdctl("config", "set", f"server.api_key_file={daemon.directory}/keys").returncode == 0
    assert "requests are served without a key now" in infdctl("reload").stderr
    infdctl("config", "set", "log.level=debug")
    (daemon.directory / "infd.toml").write_text("[limits]\nchoices = 0\n")
    failed = infdctl("reload")

    assert failed.returncode == 1
    assert "limits.choices = 0" in failed.stderr
    assert '"debug"' in infdctl("config", "get", "log").stdout


def test_an_idle_daemon_feeds_the_watchdog(start_daemon: Start) -> None:
    daemon = start_daemon(WATCHDOG_USEC="400000").ready()
    daemon.wait_for("WATCHDOG", "1")


def test_systemds_status_follows_the_load(start_daemon: Start) -> None:
    daemon = start_daemon(*SLOW, WATCHDOG_USEC="400000").ready()
    with daemon.stream(max_tokens=ENDLESS):
        while not any(
            said.get("STATUS", "").startswith("ready · 1 running · 0 waiting · KV ") for said in daemon.notified
        ):
            assert daemon.read_notification()


def test_it_answers_on_every_host_and_removes_its_socket(start_daemon: Start, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    daemon = start_daemon("--host", "127.0.0.1", "--host", f"unix:{path}").ready()

    assert daemon.get("/readyz")[0] == 200
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    daemon.signal(signal.SIGTERM)

    assert daemon.exit_code() == 0
    assert not path.exists()


def test_with_an_inherited_socket_connections_wait_for_the_successor(start_daemon: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as kept:
        first = start_daemon(*SLOW, listening=kept).ready()
        assert first.address == kept.getsockname()
        with first.stream(max_tokens=ENDLESS):
            first.signal(signal.SIGTERM)
            first.wait_for("STOPPING", "1")
            early = ask_for_readiness(kept)
        assert first.exit_code() == 0
        late = ask_for_readiness(kept)

        start_daemon(listening=kept).ready()

        for client in (early, late):
            with client:
                assert client.recv(65536).startswith(b"HTTP/1.1 ")


def ask_for_readiness(listening: socket.socket) -> socket.socket:
    client = socket.create_connection(listening.getsockname(), timeout=60)
    client.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
    return client


def test_a_key_in_the_environment_is_asked_for(start_daemon: Start) -> None:
    daemon = start_daemon(INFD_API_KEY="secret").ready()

    assert daemon.get("/readyz")[0] == 200
    status, body = daemon.get("/v1/models")
    assert status == 401
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert "secret" not in daemon.log_text()


def test_metrics_name_the_state_and_the_requests(start_daemon: Start) -> None:
    daemon = start_daemon().ready()
    with daemon.stream(max_tokens=5) as events:
        list(events)
    text = daemon.get("/metrics")[1].decode()

    assert 'infd_state{state="ready"} 1.0' in text
    assert 'infd_requests_terminal_total{model_name="embedded",reason="length"} 1.0' in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="embedded"} 5.0' in text


def test_answered_requests_leave_no_descriptor_open(start_daemon: Start) -> None:
    daemon = start_daemon().ready()
    descriptors = Path(f"/proc/{daemon.process.pid}/fd")

    def ask() -> int:
        with daemon.stream(max_tokens=5) as events:
            list(events)
        return len(list(descriptors.iterdir()))

    first = ask()
    for _ in range(5):
        ask()

    deadline = time.monotonic() + 20
    while len(list(descriptors.iterdir())) > first and time.monotonic() < deadline:
        time.sleep(0.05)  # the daemon may not have noticed the last closes
    assert len(list(descriptors.iterdir())) <= first
