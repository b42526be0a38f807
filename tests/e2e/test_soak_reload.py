"""Settings that cannot be right change nothing, under load: `make soak` in full, `make test-all` a hundredth."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from infd.admin.ctl.client import AdminClient, Refused
from infd.admin.protocol import Reloaded, Settings
from tests.e2e.clients import Neighbour, descriptors, idle_status, resident_kib, scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

pytestmark = pytest.mark.exhaustive

CLIENTS = 8
GOOD = (
    b"[limits]\nchoices = 5\n[scheduler]\nmax_waiting = 64\n[log]\naccess = false\n"
    b'[quotas]\ntenants = { team = "share=2" }\n'
)
# Each has a right setting too, which must not be taken, and what the refusal names.
BAD = {
    b"[limits]\nchoices = 9\n[limits\n": "infd.toml",
    b"[limits]\nchoices = 9\nchoises = 1\n": "choises",
    b"[limits]\nchoices = 9\n[scheduler]\nmax_waiting = 0\n": "scheduler.max_waiting",
    b'[limits]\nchoices = 9\n[scheduler]\nmax_waiting = "many"\n': "scheduler.max_waiting",
    b"[limits]\nchoices = 9\n[server]\nidle_timeout_s = nan\n": "server.idle_timeout_s",
    b'[limits]\nchoices = 9\n[server]\napi_key_file = "/nonexistent"\n': "/nonexistent",
    b'[limits]\nchoices = 9\n[server]\ntls_certificate = "/nonexistent"\ntls_key = "/nonexistent"\n': "tls",
    b'[limits]\nchoices = 9\n[server]\ntrusted_proxies = ["nowhere"]\n': "nowhere",
    b'[limits]\nchoices = 9\n[quotas]\ntenants = { team = "share=0" }\n': "quotas.tenants.team",
    b'[limits]\nchoices = 9\n[log]\nlevel = "loud"\n': "log.level",
    b"[limits]\nchoices = 9\n\xff\xfe\n": "infd.toml",
}
RELOADS = max(len(BAD), scaled(1_000))


async def settings(admin: AdminClient) -> Settings:
    return await asyncio.to_thread(admin.get, "/v1/config", Settings)


async def hung_up(daemon: Daemon) -> None:
    """Send HUP, and wait until systemd hears that the reload is over."""
    heard = len(daemon.notified)
    daemon.signal(signal.SIGHUP)
    while not any(said.get("READY") == "1" for said in daemon.notified[heard:]):
        assert await asyncio.to_thread(daemon.read_notification)


async def test_bad_reloads_under_load_change_nothing_and_the_next_good_one_does(start_daemon: Start) -> None:
    daemon = await asyncio.to_thread(lambda: start_daemon("--set", "device.null_step_ms=1"))
    file = daemon.directory / "infd.toml"
    await asyncio.to_thread(daemon.ready)
    file.write_bytes(GOOD)
    await hung_up(daemon)
    admin, chance = AdminClient([str(daemon.admin_socket)], timeout_s=60), random.Random(1)
    before = await settings(admin)
    alone = await Neighbour(daemon.address, 60).text()
    await asyncio.to_thread(idle_status, daemon)
    open_before, resident_before = descriptors(daemon), resident_kib(daemon)
    texts, told, over = Counter[str](), Counter[str](), asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            texts[await Neighbour(daemon.address, 60).text()] += 1

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    bad = list(BAD.items())
    for number in range(RELOADS):
        text, named = bad[number % len(bad)]
        file.write_bytes(text)
        if chance.random() < 0.5:
            await hung_up(daemon)
        else:
            with pytest.raises(Refused, match=named):
                await asyncio.to_thread(admin.post, "/v1/reload", Reloaded, {})
        told[named] += 1
        if number % 50 == 0:
            assert await settings(admin) == before
    assert await settings(admin) == before
    over.set()
    await asyncio.gather(*clients)

    status = await asyncio.to_thread(idle_status, daemon)
    grown = resident_kib(daemon) - resident_before
    print(
        f"{RELOADS} bad reloads beside {CLIENTS} clients, {texts.total()} answers: {dict(told)}; resident +{grown} KiB"
    )
    assert set(texts) == {alone}
    assert (status.state, status.terminal.get("error", 0)) == ("ready", 0)
    assert grown < 16 * 1024
    assert descriptors(daemon) <= open_before + 1
    assert "Traceback" not in daemon.log_text()

    file.write_bytes(GOOD.replace(b"choices = 5", b"choices = 6"))
    done = await asyncio.to_thread(admin.post, "/v1/reload", Reloaded, {})
    assert [(change.key, change.old, change.new) for change in done.applied] == [("limits.choices", 5, 6)]
