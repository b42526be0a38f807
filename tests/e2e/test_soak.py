"""After misbehaving clients the daemon holds no resources: `make soak` in full, `make test` a hundredth."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from tests.e2e.clients import FULL, Neighbour, ask, descriptors, idle_status, resident_kib, scaled, vanish

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

pytestmark = pytest.mark.exhaustive

CLIENTS = scaled(10_000)
AT_ONCE = 50


async def killed(address: tuple[str, int], chance: random.Random) -> None:
    """Request a long stream and disconnect before the answer, at its headers, or within it."""
    body = {
        "messages": [{"role": "user", "content": "x" * chance.randrange(400)}],
        "max_tokens": 500,
        "n": chance.choice([1, 1, 2]),
        "ignore_eos": True,
        "stream": chance.random() < 0.8,
        "temperature": 1.0,
    }
    reader, writer = await ask(address, "/v1/chat/completions", body)
    if body["stream"]:
        for _ in range(chance.choice([0, 1, 8, 30])):
            await reader.readline()
    vanish(writer)


@pytest.mark.parametrize("step_ms", [0, 2])
async def test_clients_killed_at_any_moment_leak_nothing_and_change_no_neighbours_token(
    start_daemon: Start, step_ms: int
) -> None:
    daemon = await asyncio.to_thread(lambda: start_daemon("--set", f"device.null_step_ms={step_ms}").ready())
    address = daemon.address
    alone = await Neighbour(address, 300).text()
    await asyncio.to_thread(idle_status, daemon)
    descriptors_before, resident_before = descriptors(daemon), resident_kib(daemon)
    chance = random.Random(step_ms)

    async def some(count: int) -> None:
        for _ in range(count):
            await killed(address, chance)

    beside = asyncio.create_task(Neighbour(address, 300).text())
    await asyncio.gather(*(some(CLIENTS // AT_ONCE) for _ in range(AT_ONCE)))
    assert await beside == alone

    status = await asyncio.to_thread(idle_status, daemon)
    assert status.pages_referenced == 0
    assert status.terminal["disconnect"] > CLIENTS // 10  # other clients had their answer, or had sent no request
    assert status.terminal["error"] == 0
    assert "Traceback" not in daemon.log_text()
    async with asyncio.timeout(60):  # resets are noticed soon after
        while descriptors(daemon) > descriptors_before:
            await asyncio.sleep(0)
    grown = resident_kib(daemon) - resident_before
    print(f"{CLIENTS} clients killed, steps of {step_ms} ms: resident memory grew by {grown} KiB")
    assert grown < 64 * 1024


async def dripping(address: tuple[str, int]) -> float:
    """Send endless headers slowly. Return the seconds until the daemon closes the connection."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(*address)
    began = loop.time()
    writer.write(b"GET /readyz HTTP/1.1\r\n")
    closed = asyncio.ensure_future(reader.read())
    while not (await asyncio.wait([closed], timeout=1))[0]:
        writer.write(b"X-More: x\r\n")
    assert closed.exception() is not None or closed.result() == b"", "nothing was asked"
    writer.close()
    return loop.time() - began


async def probe(address: tuple[str, int]) -> float:
    """Request /readyz on a new connection, as a load balancer does. Return the seconds taken."""
    began = asyncio.get_running_loop().time()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: infd\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return asyncio.get_running_loop().time() - began


async def test_connections_whose_headers_never_end_are_closed_and_probes_stay_quick(start_daemon: Start) -> None:
    hurry = () if FULL else ("--set", "server.header_timeout_s=0.3")
    daemon = await asyncio.to_thread(lambda: start_daemon(*hurry).ready())
    descriptors_before = descriptors(daemon)

    slow = [asyncio.create_task(dripping(daemon.address)) for _ in range(scaled(2_000))]
    probes = [await probe(daemon.address)]
    while not all(task.done() for task in slow):
        probes.append(await probe(daemon.address))
        await asyncio.sleep(0.01)

    longest, p99 = max(task.result() for task in slow), sorted(probes)[int(len(probes) * 0.99)]
    print(
        f"{len(slow)} slow connections: closed within {longest:.1f} s; /readyz p99 {p99 * 1e3:.1f} ms of {len(probes)}"
    )
    assert not FULL or (longest < 15 and p99 < 0.1)
    async with asyncio.timeout(60):
        while descriptors(daemon) > descriptors_before:
            await asyncio.sleep(0)
