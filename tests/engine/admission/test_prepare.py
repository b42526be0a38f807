"""A ticket's needs are acquired in order and released in reverse, however the ticket ends."""

from __future__ import annotations

import asyncio

import pytest

from infd.engine.admission.prepare import prepare
from infd.errors import AdapterUnavailable


class Recorded:
    """A need that records its calls."""

    def __init__(self, name: str, log: list[str], *, error: Exception | None = None, waits: bool = False) -> None:
        self._name = name
        self._log = log
        self._error = error
        self._waits = waits

    async def acquire(self) -> None:
        self._log.append(f"wait {self._name}")
        if self._waits:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        self._log.append(f"hold {self._name}")

    def release(self) -> None:
        self._log.append(f"free {self._name}")


async def test_needs_are_acquired_in_order_and_released_in_reverse():
    log: list[str] = []

    async with prepare([Recorded("a", log), Recorded("b", log)]):
        log.append("queue")

    assert log == ["wait a", "hold a", "wait b", "hold b", "queue", "free b", "free a"]


async def test_a_need_that_fails_releases_those_before_it_and_no_other():
    log: list[str] = []
    needs = [Recorded("a", log), Recorded("b", log, error=AdapterUnavailable("gone")), Recorded("c", log)]

    with pytest.raises(AdapterUnavailable):
        async with prepare(needs):
            log.append("queue")

    assert log == ["wait a", "hold a", "wait b", "free a"]


async def test_a_request_cancelled_while_it_waits_holds_nothing():
    log: list[str] = []

    async def ask() -> None:
        async with prepare([Recorded("a", log), Recorded("b", log, waits=True)]):
            log.append("queue")

    asking = asyncio.create_task(ask())
    while "wait b" not in log:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert log == ["wait a", "hold a", "wait b", "free a"]


async def test_needs_are_released_where_queueing_fails():
    log: list[str] = []

    with pytest.raises(AdapterUnavailable):
        async with prepare([Recorded("a", log)]):
            raise AdapterUnavailable("full")

    assert log == ["wait a", "hold a", "free a"]
