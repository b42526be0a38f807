"""Clients, adapters and memory come and go, and nothing is left: `make soak` in full, `make test` a hundredth of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from itertools import count, cycle, product
from typing import TYPE_CHECKING, Any

from infd.admin.ctl.client import AdminClient
from infd.admin.protocol import Dump, LoraChanged, Moved, Status
from tests.e2e.clients import FULL, ask, descriptors, idle_status, resident_kib, scaled, vanish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

REQUESTS = scaled(40_000)
PARTS, AT_ONCE = 8, 20
ADAPTERS = ("a", "b", "c")
QUICK = ("--set", "device.null_step_ms=1")


async def answered(address: tuple[str, int], chance: random.Random) -> str:
    """Ask for a stream, of the model or of one of its adapters. Return its status, or "left" where we did, early."""
    body = {
        "model": chance.choice(("embedded", *ADAPTERS)),
        "prompt": "x" * chance.randrange(1, 200),
        "max_tokens": chance.choice((1, 10, 60)),
        "ignore_eos": True,
        "stream": True,
    }
    leaves_after = chance.randrange(20) if chance.random() < 0.05 else None
    reader, writer = await ask(address, "/v1/completions", body)
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split()[1].decode()
    try:
        if status != "200":
            return status
        for number in count():
            if number == leaves_after:
                vanish(writer)
                return "left"
            if await reader.readline() == b"0\r\n":  # the last chunk
                return status
        raise AssertionError
    finally:
        writer.close()


class Operators:
    """Two of them, each with a verb after another for as long as clients ask."""

    def __init__(self, daemon: Daemon, busy: Callable[[], bool]) -> None:
        self._admin = AdminClient([str(daemon.admin_socket)], timeout_s=60)
        self._busy = busy
        self.verbs = Counter[str]()

    async def _do(self, verb: str, reply: type[Any], **asked: Any) -> Any:
        self.verbs[verb] += 1
        return await asyncio.to_thread(self._admin.post, f"/v1/{verb}", reply, asked, patient=True)

    async def _some_steps(self) -> None:
        """Let the daemon get on with its work."""
        goal: int | None = None
        while self._busy():
            steps = (await asyncio.to_thread(self._admin.get, "/v1/status", Status)).steps
            goal = steps + 9 if goal is None else goal
            if steps >= goal:
                return

    async def sleep_and_wake(self) -> None:
        for mode, level in cycle(product(("keep", "wait", "abort"), (1, 2))):
            if not self._busy():
                return
            assert (await self._do("sleep", Moved, mode=mode, level=level)).state == "sleeping"
            assert (await self._do("wake", Moved)).state == "ready"
            await self._some_steps()

    async def change_adapters(self, chance: random.Random) -> None:
        while self._busy():
            name, path = chance.choice(ADAPTERS), chance.choice(ADAPTERS)
            if chance.random() < 0.3:
                await self._do("loras/unload", LoraChanged, name=name)
            else:
                await self._do("loras/load", LoraChanged, name=name, path=path, in_place=True)
            await self._some_steps()


async def test_disconnects_adapters_and_sleeps_in_turn_leave_nothing_behind(
    start_daemon: Start, tmp_path: Path
) -> None:
    for number, name in enumerate(ADAPTERS, 1):
        (tmp_path / name).mkdir()
        config = {"peft_type": "LORA", "r": number, "target_modules": ["q_proj"]}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(bytes(1000 * number))
    daemon = await asyncio.to_thread(
        # On a busy machine a client of ours may be long in writing what it wants.
        lambda: start_daemon("--lora-root", str(tmp_path), *QUICK, "--set", "server.header_timeout_s=60").ready()
    )
    chance = random.Random(1)
    admin = AdminClient([str(daemon.admin_socket)], timeout_s=60)
    outcomes, verbs = Counter[str](), Counter[str]()
    resident: list[int] = []

    async def client(requests: int) -> None:
        for _ in range(requests):
            outcomes[await answered(daemon.address, chance)] += 1

    async def part() -> None:
        clients = asyncio.gather(*(client(max(1, REQUESTS // PARTS // AT_ONCE)) for _ in range(AT_ONCE)))
        operators = Operators(daemon, lambda: not clients.done())
        await asyncio.gather(clients, operators.sleep_and_wake(), operators.change_adapters(chance))
        verbs.update(operators.verbs)

    for number in range(PARTS):
        await part()
        status = await asyncio.to_thread(idle_status, daemon)
        assert (status.state, status.pages_referenced, status.terminal.get("error", 0)) == ("ready", 0, 0)
        resident.append(resident_kib(daemon))
        if number == 0:  # warm by now
            tasks = len((await asyncio.to_thread(admin.get, "/v1/dump", Dump)).tasks)
            open_before = descriptors(daemon)
    print(
        f"{sum(outcomes.values())} requests: {dict(outcomes)}; {dict(verbs)}; resident KiB after each part: {resident}"
    )

    assert outcomes.keys() <= {"200", "404", "503", "left"}
    assert min(outcomes["200"], outcomes["left"]) > 0
    assert not FULL or min(outcomes["404"], outcomes["503"]) > 0, "some came while an adapter or the memory was away"
    assert min(verbs["sleep"], verbs["wake"], verbs["loras/load"]) >= PARTS // 2
    async with asyncio.timeout(60):  # connections that were reset are closed soon after
        while descriptors(daemon) > open_before:
            await asyncio.sleep(0)
        while len((await asyncio.to_thread(admin.get, "/v1/dump", Dump)).tasks) > tasks:
            pass
    # Pages that an allocator keeps are no leak: what is asserted is the order of magnitude, what is printed the slope.
    assert resident[-1] - resident[0] < 16 * 1024
    assert "Traceback" not in daemon.log_text()
