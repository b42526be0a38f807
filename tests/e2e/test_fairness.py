"""Tenants that flood a daemon over sockets: the others' service, and everybody's share.

`pytest -s` prints the figures. On a quiet machine a tenant within its share keeps 95 % of its goodput and 1.5 times its
TTFT (bench/LOG.md); the bounds here leave room for a busy one. Without shares the tenant waits for seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING

import aiohttp
import pytest

from infd.admin.ctl.client import AdminClient
from infd.admin.protocol import UsageRows
from tests.e2e.process import Daemon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.exhaustive

ROWS, STEP_MS = 8, 10
SHARES = {"ann": 1.0, "bob": 1.0, "cy": 2.0}


class Client:
    """Sends one request after another with one key. `ttft_s` and `tokens` are those of the requests that ended."""

    def __init__(self, url: str, key: str, prompt: int, answer: int) -> None:
        self.ttft_s: list[float] = []
        self.tokens = 0
        self._url = url
        self._key = key
        self._sizes = prompt, answer

    async def run(self) -> None:
        draw, (prompt, answer) = random.Random(id(self)), self._sizes
        async with aiohttp.ClientSession(self._url, headers={"Authorization": f"Bearer {self._key}"}) as session:
            while True:
                ids = [draw.randrange(300, 2000) for _ in range(prompt)]
                body = {"prompt": ids, "max_tokens": answer, "ignore_eos": True, "stream": True}
                began, first = time.monotonic(), 0.0
                async with session.post("/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    async for _ in response.content:
                        first = first or time.monotonic()
                self.ttft_s.append(first - began)
                self.tokens += prompt + answer


@asynccontextmanager
async def clients(url: str, key: str, count: int, prompt: int, answer: int) -> AsyncIterator[list[Client]]:
    """Run `count` clients until the end of the block."""
    running = [Client(url, key, prompt, answer) for _ in range(count)]
    tasks = [asyncio.ensure_future(client.run()) for client in running]
    try:
        yield running
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def served(url: str, seconds: float) -> tuple[float, float, float]:
    """Return tokens a second of a tenant that asks for two rows, and the median and 99th percentile of its TTFT."""
    async with clients(url, "ann", 2, 16, 16) as asking:
        await asyncio.sleep(0.3)
        before = [(client.tokens, len(client.ttft_s)) for client in asking]
        await asyncio.sleep(seconds)
        tokens = sum(client.tokens - tokens for client, (tokens, _) in zip(asking, before, strict=True))
        times = sorted(
            taken for client, (_, count) in zip(asking, before, strict=True) for taken in client.ttft_s[count:]
        )
    return tokens / seconds, times[len(times) // 2], times[int(len(times) * 0.99)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("fairness")
    keys = directory / "keys"
    keys.write_text("".join(f"{key}:{sha256(key.encode()).hexdigest()}\n" for key in SHARES))
    settings = {
        "server.api_key_file": keys,
        "device.null_step_ms": STEP_MS,
        "scheduler.max_num_seqs": ROWS,
        "scheduler.step_tokens": 256,
        "log.access": "false",
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    (directory / "infd.toml").write_text(
        "[quotas.tenants]\n" + "".join(f'{tenant} = "share={share}"\n' for tenant, share in SHARES.items())
    )
    daemon = Daemon(directory, arguments, {})
    try:
        yield daemon.ready()
    finally:
        daemon.close()


async def test_a_flood_takes_no_share_from_a_tenant_within_its_own(daemon: Daemon):
    url = "http://{}:{}".format(*daemon.address)
    alone = await served(url, 2.5)
    async with clients(url, "bob", 40, 48, 60) as flood:
        await asyncio.sleep(0.5)
        beside = await served(url, 2.5)
        flooded = sum(client.tokens for client in flood)

    print(json.dumps({"alone": alone, "beside a flood": beside, "flood": flooded}))
    assert flooded > 1000, "the flood is served too"
    assert beside[0] >= 0.8 * alone[0]
    assert beside[2] <= 1.5 * alone[2] + 5 * STEP_MS / 1000


async def test_tenants_that_flood_get_their_shares(daemon: Daemon):
    url = "http://{}:{}".format(*daemon.address)
    admin = AdminClient((str(daemon.admin_socket),))

    async def work() -> dict[str, int]:
        answer = await asyncio.to_thread(admin.get, "/v1/usage", UsageRows)
        return {row.key: row.prompt - row.cached + row.generated for row in answer.usage}

    async with clients(url, "ann", 24, 16, 20), clients(url, "bob", 30, 60, 10), clients(url, "cy", 24, 16, 30):
        await asyncio.sleep(1)
        before = await work()
        await asyncio.sleep(4)
        after = await work()

    done = {key: after[key] - before[key] for key in SHARES}
    found = {key: tokens / sum(done.values()) for key, tokens in done.items()}
    print(json.dumps(found))
    for key, share in SHARES.items():
        assert found[key] == pytest.approx(share / sum(SHARES.values()), rel=0.1)
