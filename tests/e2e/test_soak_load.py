"""Overload and scarce resources: `make soak` in full, `make test` a hundredth."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from infd.admin.ctl.client import AdminClient
from infd.admin.protocol import Reloaded, Status
from tests.e2e.clients import FULL, Neighbour, ask, descriptors, idle_status, resident_kib, scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

pytestmark = pytest.mark.exhaustive

QUICK = ("--set", "device.null_step_ms=2")
SLOW_READERS = max(10, scaled(50))
BUFFERED_KIB = 256  # each, on our side


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


async def gaps(address: tuple[str, int], tokens: int) -> list[float]:
    """Read a stream, and return the seconds between its events."""
    loop, body = asyncio.get_running_loop(), {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    reader, writer = await ask(address, "/v1/completions", body)
    times = []
    async for line in reader:
        if line.startswith(b"data: "):
            times.append(loop.time())
        if line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return [after - before for before, after in pairwise(times)]


def reading_nothing(address: tuple[str, int]) -> socket.socket:
    """Request a long stream with large events, and read none of it."""
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 4}
    data = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    return client


async def at_rest(daemon: Daemon) -> Status:
    """Return the daemon's status once no choice runs or waits."""
    client = AdminClient([str(daemon.admin_socket)], timeout_s=60)
    while (status := await asyncio.to_thread(client.get, "/v1/status", Status)).running or status.waiting:
        pass
    return status


async def test_slow_readers_hold_little_and_cost_a_neighbour_no_token(start_daemon: Start) -> None:
    daemon = await asyncio.to_thread(lambda: start_daemon(*QUICK).ready())
    address, tokens = daemon.address, 600 if FULL else 300
    alone, gaps_alone = await Neighbour(address, tokens).text(), await gaps(address, tokens)
    await asyncio.to_thread(idle_status, daemon)
    resident_before = resident_kib(daemon)

    with ExitStack() as stack:
        clients = [stack.enter_context(await asyncio.to_thread(reading_nothing, address)) for _ in range(SLOW_READERS)]
        status = await at_rest(daemon)
        assert status.accepted - sum(status.terminal.values()) == 4 * SLOW_READERS, "all of them are still served"
        assert status.pages_referenced == 0, "and hold no page while they do not read"
        grown = resident_kib(daemon) - resident_before
        assert await Neighbour(address, tokens).text() == alone
        gaps_beside = await gaps(address, tokens)
        while FULL and (await at_rest(daemon)).terminal["slow_reader"] < 4 * SLOW_READERS:
            for client in clients:
                with suppress(ConnectionError):
                    client.recv(1)
            await asyncio.sleep(1)
    assert (await asyncio.to_thread(idle_status, daemon)).pages_referenced == 0
    p99 = [percentile(values, 0.99) * 1e3 for values in (gaps_alone, gaps_beside)]
    print(
        f"{SLOW_READERS} slow readers of 4 choices with logprobs=20: resident memory grew by {grown / SLOW_READERS:.0f}"
        f" KiB each; a neighbour's p99 token gap {p99[0]:.1f} ms alone, {p99[1]:.1f} ms beside them"
    )
    # The allocator retains pages beside buffers, so only the order of magnitude is asserted.
    assert grown < 2 * BUFFERED_KIB * SLOW_READERS


ROWS, WAITING = 8, 16
TOKENS = (20, 40)  # an answer has; drawn, or all rows would end in one step
ANSWERS, ANSWERS_IN_OVERLOAD = scaled(10_000), scaled(72_000)  # the latter take ten minutes
REFUSED_WITHIN_MS = 20.0
# The clients that find no place then ask for twice as many answers as there are; without times the test hurries.
BACKOFF_S = 0.2 if FULL else 0.02


async def completed(address: tuple[str, int], tokens: int) -> tuple[bool, float]:
    """Request a completion of that many tokens. Return (answered rather than 429, seconds taken)."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    reader, writer = await ask(address, "/v1/completions", {"prompt": "x", "max_tokens": tokens, "ignore_eos": True})
    head = await reader.readuntil(b"\r\n\r\n")
    took = loop.time() - began
    writer.close()
    assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 429")), head
    return head.startswith(b"HTTP/1.1 200"), took


class Load(NamedTuple):
    """What a load came to: mean tokens of a step and of a second, the longest queue seen, the refusals' times."""

    step_tokens: float
    second_tokens: float
    longest_queue: int
    refusals_s: list[float]


async def offered(daemon: Daemon, clients: int, wanted: int) -> Load:
    """Send requests from concurrent clients until there are `wanted` answers."""
    address, admin = daemon.address, AdminClient([str(daemon.admin_socket)], timeout_s=60)
    before = await asyncio.to_thread(admin.get, "/v1/status", Status)
    answers, tokens, longest, refusals = 0, 0, 0, list[float]()
    draw = random.Random(7)

    async def client() -> None:
        nonlocal answers, tokens
        while answers < wanted:
            asked = draw.randint(*TOKENS)
            answered, took = await completed(address, asked)
            if answered:
                answers += 1
                tokens += asked
            else:
                refusals.append(took)
                await asyncio.sleep(BACKOFF_S * draw.uniform(0.5, 1.5))

    began = asyncio.get_running_loop().time()
    asking = [asyncio.create_task(client()) for _ in range(clients)]
    while not all(task.done() for task in asking):
        status = await asyncio.to_thread(admin.get, "/v1/status", Status)
        longest = max(longest, status.waiting)
        await asyncio.sleep(0.05 if FULL else 0)  # the questions must not be the load
    await asyncio.gather(*asking)
    after = await asyncio.to_thread(idle_status, daemon)
    took_s = asyncio.get_running_loop().time() - began
    assert after.terminal["length"] - before.terminal.get("length", 0) == answers
    return Load(tokens / (after.steps - before.steps), tokens / took_s, longest, refusals)


async def test_three_times_the_load_costs_no_work_and_the_queue_stays_short(start_daemon: Start) -> None:
    limits = ("--set", f"scheduler.max_num_seqs={ROWS}", "--set", f"scheduler.max_waiting={WAITING}")
    daemon = await asyncio.to_thread(lambda: start_daemon(*QUICK, *limits).ready())

    # At the start all clients may arrive before the first plan, so the queue's bound is the largest number of clients
    # without refusals; twice as many clients as rows keep all rows busy.
    peak = await offered(daemon, WAITING, ANSWERS)
    over = await offered(daemon, 3 * (ROWS + WAITING), ANSWERS_IN_OVERLOAD)

    p50, p99 = (percentile(over.refusals_s, share) * 1e3 for share in (0.5, 0.99))
    print(
        f"{ANSWERS} and {ANSWERS_IN_OVERLOAD} answers: {peak.step_tokens:.2f} tokens a step and"
        f" {peak.second_tokens:.0f} a second at the peak, {over.step_tokens:.2f} and {over.second_tokens:.0f} at three"
        f" times the load; at most {over.longest_queue} waited; {len(over.refusals_s)} refused, p50 {p50:.1f} ms,"
        f" p99 {p99:.1f} ms, at most {max(over.refusals_s) * 1e3:.1f} ms"
    )
    assert not peak.refusals_s
    assert over.step_tokens >= 0.9 * peak.step_tokens
    assert over.refusals_s
    assert over.longest_queue <= WAITING
    assert not FULL or over.second_tokens >= 0.9 * peak.second_tokens
    assert not FULL or p99 < REFUSED_WITHIN_MS
    assert "Traceback" not in daemon.log_text()


def begin_with(code: str, directory: Path) -> dict[str, str]:
    """Return environment variables that make a Python process run `code` first."""
    (directory / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(directory)}


FEW = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"


async def test_with_few_descriptors_streams_continue_and_operators_are_served(
    start_daemon: Start, tmp_path: Path
) -> None:
    as_many_as_fit = ("--set", "server.max_connections_per_address=9999")
    few = begin_with(FEW, tmp_path)
    daemon = await asyncio.to_thread(lambda: start_daemon(*QUICK, *as_many_as_fit, **few).ready())
    address = daemon.address
    alone = await Neighbour(address, 100).text()
    beside = asyncio.create_task(Neighbour(address, 100).text())
    admin = AdminClient([str(daemon.admin_socket)], timeout_s=60)
    for _ in range(scaled(100)):
        with ExitStack() as clients:
            for _ in range(300):
                clients.enter_context(socket.create_connection(address))
            status = await asyncio.to_thread(admin.get, "/v1/status", Status)
            assert status.state == "ready"
            assert descriptors(daemon) <= 128
            assert (await asyncio.to_thread(daemon.get, "/readyz"))[0] == 200
    assert await beside == alone
    assert "Traceback" not in daemon.log_text()


FULL_DISK = """
import ctypes, os, sys
disk, libc = {disk!r}, ctypes.CDLL(None)
if not os.path.ismount(disk):
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None) or libc.mount(
        b"none", disk.encode(), b"tmpfs", 0, b"size=1m"
    ):
        os._exit(99)
    log = os.open(disk + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
"""  # a mount namespace of the daemon's own, with its log on a small file system


def fill(disk: Path) -> int:
    """Write until nothing more fits; return the bytes written."""
    with suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(512))
    return (disk / "filler").stat().st_size


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system that is full")
async def test_on_a_full_disk_clients_and_operators_are_served_and_the_log_goes_on_once_there_is_room(
    start_daemon: Start, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    real = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--set",
        "device.threads=1",
        "--set",
        f"device.kernel_cache={disk}",
    )
    daemon = start_daemon(*real, **begin_with(FULL_DISK.format(disk=str(disk)), tmp_path))
    inside = Path(f"/proc/{daemon.process.pid}/root{disk}")
    while not (inside / "log").exists():
        if daemon.process.poll() is not None:
            pytest.skip("this process may not mount")
    daemon.log_file = inside / "log"
    while not daemon.log_text().count("listening"):
        assert daemon.process.poll() is None
    address = daemon.address
    assert fill(inside) > 500_000, "before the model is loaded, so that nothing measured at the start can be kept"
    await asyncio.to_thread(daemon.ready)

    admin = AdminClient([str(daemon.admin_socket)], timeout_s=60)
    alone, written = await Neighbour(address, 10).text(), daemon.log_text()
    for number in range(scaled(100)):
        assert await Neighbour(address, 10).text() == alone
        daemon.signal(signal.SIGUSR1)
        assert (await asyncio.to_thread(admin.get, "/v1/status", Status)).state == "ready"
        level = "debug" if number % 2 else "info"
        await asyncio.to_thread(admin.post, "/v1/config/set", Reloaded, {"values": {"log.level": level}})
        fill(inside)
    assert (await asyncio.to_thread(daemon.get, "/readyz"))[0] == 200
    assert set(os.listdir(inside)) == {"filler", "log"}, "no part of a file is left"
    assert len(daemon.log_text()) - len(written) < 4096, "so the disk was full"

    (inside / "filler").unlink()
    daemon.signal(signal.SIGUSR1)
    while len(daemon.log_text()) <= len(written) + 4096:
        assert await Neighbour(address, 10).text() == alone
    daemon.signal(signal.SIGTERM)
    assert await asyncio.to_thread(daemon.exit_code) == os.EX_OK


JUMPING = """
import time

_real, _looks = time.time, 0

def _jumping():
    global _looks
    _looks += 1
    return _real() + (3600 if _looks % 2 else -3600)

time.time = _jumping
"""


async def test_a_clock_that_jumps_by_an_hour_disturbs_no_request(start_daemon: Start, tmp_path: Path) -> None:
    timers = [f"server.{name}_timeout_s=60" for name in ("queue", "request", "header", "idle", "drain")]
    arguments = [argument for timer in timers for argument in ("--set", timer)]
    variables = {**begin_with(JUMPING, tmp_path), "WATCHDOG_USEC": "2000000"}
    steady = await asyncio.to_thread(lambda: start_daemon(*QUICK).ready())
    daemon = await asyncio.to_thread(lambda: start_daemon(*QUICK, *arguments, **variables).ready())

    alone = await Neighbour(steady.address, 300).text()
    texts = await asyncio.gather(*(Neighbour(daemon.address, 300).text() for _ in range(8)))
    assert set(texts) == {alone}
    admin = AdminClient([str(daemon.admin_socket)], timeout_s=60)
    status = await asyncio.to_thread(admin.get, "/v1/status", Status)
    assert status.last_step_age_s is not None
    assert 0 <= status.last_step_age_s < 60
    assert (await asyncio.to_thread(daemon.get, "/livez"))[0] == 200
    await asyncio.to_thread(daemon.wait_for, "WATCHDOG", "1")
    beside = asyncio.create_task(Neighbour(daemon.address, 300).text())
    while (await asyncio.to_thread(admin.get, "/v1/status", Status)).running == 0:
        assert not beside.done()
    daemon.signal(signal.SIGTERM)
    assert await asyncio.to_thread(daemon.exit_code) == 0
    assert await beside == alone, "the drain let it finish"
    assert "Traceback" not in daemon.log_text()
