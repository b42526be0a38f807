"""The latest log records, in memory."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from infd.telemetry.recent import LONGEST, RecentLogs, Record

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("infd.test_recent")
    logger.setLevel(logging.INFO)
    yield logger
    logger.handlers.clear()


async def read(logs: RecentLogs, last: int = 100, **options: Any) -> list[tuple[Record, int]]:
    return [each async for each in logs.read(last, **options)]


async def test_records_keep_level_fields_and_traceback(logger: logging.Logger) -> None:
    logger.addHandler(logs := RecentLogs())
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("failed %d times", 3, extra={"request_id": "a", "ms": 1.5, "absent": None, "path": object})
    [(record, dropped)] = await read(logs)

    assert (record.seq, record.level, record.logger, record.message) == (
        1,
        "ERROR",
        "infd.test_recent",
        "failed 3 times",
    )
    assert record.fields == {"request_id": "a", "ms": 1.5, "path": str(object)}
    assert record.trace.endswith("ValueError: wrong")
    assert dropped == 0


async def test_the_last_records_of_a_level_are_read_with_their_numbers(logger: logging.Logger) -> None:
    logger.addHandler(logs := RecentLogs())
    for number in range(4):
        logger.info("info %d", number)
        logger.warning("warning %d", number)

    assert [each.message for each, _ in await read(logs, 3)] == ["warning 2", "info 3", "warning 3"]
    found = await read(logs, 2, level=logging.WARNING)
    assert [(each.seq, each.message, dropped) for each, dropped in found] == [(6, "warning 2", 0), (8, "warning 3", 0)]
    assert await read(logs, 0) == []
    assert [each.seq for each, _ in await read(logs, since=6)] == [7, 8]
    assert [each.seq for each, _ in await read(logs, since=99)] == [*range(1, 9)]


async def test_a_slow_follower_learns_how_many_records_it_missed(logger: logging.Logger) -> None:
    logger.addHandler(logs := RecentLogs(most=3))
    async with aclosing(logs.read(0, follow=True)) as news:
        first = asyncio.ensure_future(anext(news))
        await asyncio.sleep(0)
        logger.info("first")
        assert (await first)[0].seq == 1
        for _ in range(5):
            logger.info("more")
        assert [(each.seq, dropped) for each, dropped in [await anext(news), await anext(news)]] == [(4, 2), (5, 0)]


async def test_memory_is_bounded_by_characters_too(logger: logging.Logger) -> None:
    logger.addHandler(logs := RecentLogs(most_characters=3 * LONGEST))
    for _ in range(5):
        logger.info("x" * 10 * LONGEST)

    assert [each.seq for each, _ in await read(logs)] == [4, 5]


async def test_another_thread_wakes_a_follower_and_the_end_ends_it(logger: logging.Logger) -> None:
    logger.addHandler(logs := RecentLogs())
    following = asyncio.ensure_future(read(logs, follow=True))
    await asyncio.sleep(0)
    thread = Thread(target=logger.info, args=("from a thread",))
    thread.start()
    while logs.last == 0:
        await asyncio.sleep(0)
    logs.end()

    assert [each.message for each, _ in await following] == ["from a thread"]
    thread.join()
