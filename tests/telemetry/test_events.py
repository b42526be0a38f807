"""Which events are kept, and which followers read them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from infd.telemetry.events import LONGEST, Events


async def heard(events: Events, since: int = 0, *, follow: bool = False) -> list[tuple[int, str, int]]:
    return [(event.seq, event.message, missing) async for event, missing in events.read(since, follow=follow)]


async def test_the_oldest_are_forgotten_and_numbers_go_on():
    events = Events(most=2, clock=lambda: 7.0)
    assert await heard(events) == []
    for word in ("one", "two", "three"):
        events.publish("state", word)
    assert await heard(events) == [(2, "two", 1), (3, "three", 0)]
    assert await heard(events, 1) == [(2, "two", 0), (3, "three", 0)]
    assert await heard(events, 2) == [(3, "three", 0)]
    assert await heard(events, 3) == []


async def test_a_number_of_an_earlier_process_starts_at_the_first_event():
    events = Events()
    following = asyncio.ensure_future(heard(events, 900, follow=True))
    await asyncio.sleep(0)
    events.publish("state", "ready")
    events.close()
    assert await following == await heard(events, 900) == [(1, "ready", 0)]


async def test_facts_are_short_and_plain():
    events = Events(clock=lambda: 7.0)
    facts = {"path": Path("/a"), "count": 3, "took_s": 0.5, "done": True, "asked": "y" * 70_000, "left": None}
    events.publish("verb", "x" * 5000, **facts)
    ((event, _),) = [each async for each in events.read()]
    assert event.facts == {**facts, "path": "/a", "asked": "y" * LONGEST + "..."}
    assert (event.time, event.message) == (7.0, "x" * LONGEST + "...")
    assert len(msgspec.json.encode(event)) < 4 * LONGEST


async def test_each_follower_reads_every_event_and_ends():
    events = Events()
    following = [asyncio.ensure_future(heard(events, since, follow=True)) for since in (0, 0, 1)]
    for word in ("one", "two"):
        await asyncio.sleep(0)
        events.publish("state", word)
    await asyncio.sleep(0)
    assert not any(each.done() for each in following)
    events.publish("state", "three")
    events.close()
    every = [(1, "one", 0), (2, "two", 0), (3, "three", 0)]
    # The third named a number that was not reached yet when it came.
    assert await asyncio.gather(*following) == [every] * 3


async def test_a_slow_follower_is_given_the_number_of_missed_events():
    events = Events(most=2)
    events.publish("state", "one")
    reading = events.read(follow=True)
    assert (await anext(reading))[0].message == "one"
    for word in ("two", "three", "four"):
        events.publish("state", word)
    event, missing = await anext(reading)
    assert (event.message, missing) == ("three", 1)
