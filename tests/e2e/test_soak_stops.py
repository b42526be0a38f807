"""A daemon stopped under load leaves no accepted request unanswered: `make soak` in full, `make test` a hundredth."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tests.e2e.clients import ask, scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

pytestmark = pytest.mark.exhaustive

ROUNDS, RESTARTS = scaled(200), scaled(50)
CLIENTS = 12
STEPS = ("--set", "device.null_step_ms=1", "--set", "scheduler.max_num_seqs=8")
# Not accepted: connection refused, closed without an answer, or 503.
NOT_ACCEPTED = {"refused", "closed", "503"}


async def outcome(address: tuple[str, int], tokens: int, *, stream: bool) -> str:
    """Request a completion on a new connection. Return its finish reason or the failure."""
    body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    try:
        reader, writer = await ask(address, "/v1/completions", body)
    except ConnectionError:
        return "refused"
    answer = b""
    try:
        answer = await reader.readuntil(b"\r\n\r\n")
        if answer.startswith(b"HTTP/1.1 503"):
            return "503"
        assert answer.startswith(b"HTTP/1.1 200"), answer
        if stream:
            events = (await reader.readuntil(b"data: [DONE]")).split(b"data: ")
            return str(json.loads(events[-2].partition(b"\n")[0])["choices"][0]["finish_reason"])
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        return str(json.loads(await reader.readexactly(length))["choices"][0]["finish_reason"])
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        return f"cut by {error!r}" if answer else "closed"
    finally:
        writer.close()


async def test_term_under_load_cuts_off_no_request(start_daemon: Start) -> None:
    chance = random.Random(3)
    ends: dict[str, int] = {}
    for _ in range(ROUNDS):
        daemon = await asyncio.to_thread(lambda: start_daemon(*STEPS).ready())
        address, begun = daemon.address, asyncio.Semaphore(0)

        async def client(address: tuple[str, int] = address, begun: asyncio.Semaphore = begun) -> None:
            end = ""
            while end not in NOT_ACCEPTED:
                begun.release()
                end = await outcome(address, chance.randint(1, 80), stream=chance.random() < 0.8)
                ends[end] = ends.get(end, 0) + 1

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        for _ in range(chance.randint(CLIENTS, 4 * CLIENTS)):
            await begun.acquire()
        daemon.signal(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.exit_code) == os.EX_OK
        await asyncio.gather(*clients)
        assert "cut off" not in daemon.log_text()

    print(f"TERM {ROUNDS} times beside {CLIENTS} clients: {ends}")
    assert ends.keys() <= NOT_ACCEPTED | {"length"}
    assert ends["length"] >= ROUNDS * CLIENTS


async def test_a_restart_with_activated_sockets_refuses_no_connection(start_daemon: Start) -> None:
    ends: dict[str, int] = {}
    stopping = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as kept:

        async def client() -> None:
            while not stopping.is_set():
                end = await outcome(kept.getsockname(), 20, stream=True)
                ends[end] = ends.get(end, 0) + 1

        daemon = await asyncio.to_thread(lambda: start_daemon(*STEPS, listening=kept).ready())
        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        for number in range(1, RESTARTS + 1):
            async with asyncio.timeout(60):  # reached only by a failing test
                while ends.get("length", 0) < number * 3 * CLIENTS:
                    await asyncio.sleep(0.001)
            daemon.signal(signal.SIGTERM)
            assert await asyncio.to_thread(daemon.exit_code) == os.EX_OK
            daemon = await asyncio.to_thread(lambda: start_daemon(*STEPS, listening=kept).ready())
        stopping.set()
        await asyncio.gather(*clients)

    print(f"{RESTARTS} restarts beside {CLIENTS} clients: {ends}")
    assert set(ends) == {"length"}
