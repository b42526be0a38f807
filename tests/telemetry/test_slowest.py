"""The table of the slowest ended requests."""

from __future__ import annotations

import random

from infd.telemetry.slowest import KEPT, ORDERS, PERIOD_S, PERIODS, Ended, Slowest


class Clock:
    """Unix time, set by the test."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def note(slowest: Slowest, clock: Clock, name: str, total: float, ttft: float | None, queue: float | None) -> None:
    def ended() -> Ended:
        return Ended(
            id=name,
            client="",
            tenant="",
            model="m",
            time=clock.now,
            queue_ms=queue,
            ttft_ms=ttft,
            total_ms=total,
            prompt=1,
            cached=0,
            generated=1,
            finish="stop",
            stages={},
            preemptions=0,
        )

    slowest.note({"total": total, "ttft": ttft, "queue": queue}, ended)


def test_the_slowest_in_each_order_are_those_of_a_sort_of_all():
    clock, rng = Clock(), random.Random(1)
    slowest, everything = Slowest(clock), []
    for number in range(3000):
        clock.now += rng.expovariate(1 / 10)
        took = {"total": rng.random(), "ttft": rng.choice([None, rng.random()]), "queue": rng.random()}
        everything.append((clock.now, str(number), took))
        note(slowest, clock, str(number), **took)

    first_period = int(clock.now // PERIOD_S) - PERIODS + 1
    recent = [each for each in everything if each[0] // PERIOD_S >= first_period]
    for order in ORDERS:
        known = sorted((took[order], name) for _, name, took in recent if took[order] is not None)
        assert [ended.id for ended in slowest.read(order)] == [name for _, name in known[: -KEPT - 1 : -1]]


def test_requests_that_ended_too_long_ago_are_forgotten_and_memory_is_bounded():
    clock = Clock()
    slowest = Slowest(clock)
    note(slowest, clock, "old", 1e6, 1e6, 1e6)
    for number in range(PERIODS * 40):
        clock.now += PERIOD_S / 30
        note(slowest, clock, str(number), number, number, None)

    assert "old" not in [ended.id for ended in slowest.read("total")]
    assert (PERIODS - 1) * KEPT * 2 < len(slowest) <= PERIODS * KEPT * 2
    clock.now += PERIODS * PERIOD_S
    assert slowest.read("total") == []


def test_equal_times_are_no_error_and_the_row_is_made_only_if_it_is_kept():
    clock, made = Clock(), []
    slowest = Slowest(clock)
    for number in range(KEPT + 5):
        slowest.note({"total": 1.0}, lambda number=number: made.append(number))  # type: ignore[misc,arg-type]
    assert made == list(range(KEPT))
