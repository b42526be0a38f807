from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest
from bare_sse import __file__ as bare_sse
from overhead import Readers
from plan_commit import plan_commit_us
from server_process import Scrape, ServerProcess, free_port, quantile

from infd.telemetry.exposition import expose
from infd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def test_a_quantile_counts_the_samples_between_two_readings() -> None:
    inf = float("inf")
    before = {0.01: 100.0, 0.02: 100.0, inf: 100.0}
    after = {0.01: 190.0, 0.02: 200.0, inf: 200.0}
    assert quantile(before, after, 0.5) == pytest.approx(0.01 * 50 / 90)
    assert quantile(before, after, 0.99) == pytest.approx(0.01 + 0.01 * 9 / 10)
    assert quantile(after, after, 0.99) is None


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile({}, {0.01: 1.0, float("inf"): 10.0}, 0.99) == 0.01


def test_infds_metrics_have_the_series_that_the_benchmark_reads() -> None:
    metrics = Metrics("m")
    metrics.generation_tokens = 41
    for lag in (0.003, 0.003, 0.015):
        metrics.loop_lag.observe(lag)
    scrape = Scrape(expose(metrics).decode())

    assert scrape.value("infd_generation_tokens_total") == 41
    lags = scrape.buckets("infd_event_loop_lag_seconds")
    assert lags[0.005] == 2
    assert lags[float("inf")] == 3
    assert 0.01 < (quantile({}, lags, 0.99) or 0) <= 0.02


def test_a_series_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError, match="no_such_series"):
        Scrape("").value("no_such_series")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session


async def test_the_bare_server_sends_chunks_of_the_asked_size_to_every_stream(session: aiohttp.ClientSession) -> None:
    port = free_port()
    readers = Readers(3)
    async with ServerProcess("bare", [sys.executable, bare_sse, str(port), "1"], port) as server:
        await readers.start(session, "GET", f"{server.url}/stream?bytes=100", None)
        while readers.chunks < 30:
            readers.check()
            await asyncio.sleep(0)
        assert readers.bytes == 100 * readers.chunks
        loop_s = server.loop_cpu_s()
        assert loop_s > 0
        assert server.cpu_s() > loop_s - 0.03  # the kernel rounds user and system time of either to ticks
        await readers.stop()


async def test_a_stream_that_ends_spoils_the_window(session: aiohttp.ClientSession) -> None:
    port = free_port()
    readers = Readers(1)
    async with ServerProcess("bare", [sys.executable, bare_sse, str(port), "1"], port) as server:
        with pytest.raises(RuntimeError, match="ended early"):
            await readers.start(session, "GET", f"{server.url}/nothing", None)
        await readers.stop()


async def test_a_server_that_does_not_start_is_reported() -> None:
    with pytest.raises(RuntimeError, match="exited with 3"):
        async with ServerProcess("broken", [sys.executable, "-c", "raise SystemExit(3)"], 1):
            pass


def test_every_running_sequence_is_planned_in_every_timed_step() -> None:
    figures = plan_commit_us(sequences=8, steps=40, repeats=2)
    assert len(figures) == 2
    assert all(figure > 0 for figure in figures)
