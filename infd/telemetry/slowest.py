"""The slowest of the requests that ended lately, in bounded memory.

Time is divided into periods. Each period keeps its KEPT slowest requests in each order, so the KEPT slowest of all
periods together are exact, and a request costs a few comparisons when it ends.
"""

from __future__ import annotations

import time
from collections import deque
from heapq import heappush, heappushpop
from itertools import count
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.telemetry.causes import cause

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infd.telemetry.causes import Order

KEPT: Final = 20
PERIOD_S: Final = 900
PERIODS: Final = 24
ORDERS: Final[tuple[Order, ...]] = ("total", "ttft", "queue")


class Ended(Struct, frozen=True, kw_only=True):
    """A request that was queued and has ended.

    id         as in the log's `request_id`
    client     name of the API key
    model      served name of the model or adapter
    time       Unix time of the end
    queue_ms   from the arrival to the first step; None: no step computed the request
    ttft_ms    from the arrival to the first token; None: there was none
    prompt     prompt tokens; `cached` of them were found in the cache
    generated  tokens delivered
    stages     milliseconds of each stage, as Ticket.stages gives them
    """

    id: str
    client: str
    tenant: str
    model: str
    time: float
    queue_ms: float | None
    ttft_ms: float | None
    total_ms: float
    prompt: int
    cached: int
    generated: int
    finish: str
    stages: Mapping[str, float]
    preemptions: int

    def cause(self, order: Order) -> str:
        """Return the stages that took most of the time that `order` compares, in words."""
        computed = self.prompt - self.cached
        return cause(self.stages, order, computed=computed, generated=self.generated, preemptions=self.preemptions)


class _Period:
    """The slowest requests of one period: a heap for each order, whose first entry is the fastest."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.heaps: dict[Order, list[tuple[float, int, Ended]]] = {order: [] for order in ORDERS}


class Slowest:
    """The slowest requests of the last PERIODS periods."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Begin with none. clock: Unix time."""
        self._clock = clock
        self._periods: deque[_Period] = deque(maxlen=PERIODS)
        self._ended = count()  # breaks ties between equal times

    def note(self, measures: Mapping[Order, float | None], ended: Callable[[], Ended]) -> None:
        """Keep an ended request if it is among the slowest of its period in any order.

        measures  its milliseconds by order; None: it is left out of that order
        ended     called if the request is kept
        """
        heaps = self._now().heaps
        kept: Ended | None = None
        for order, took in measures.items():
            heap = heaps[order]
            if took is None or (len(heap) == KEPT and took <= heap[0][0]):
                continue
            kept = kept or ended()
            (heappush if len(heap) < KEPT else heappushpop)(heap, (took, next(self._ended), kept))

    def read(self, order: Order, since: float = 0.0) -> list[Ended]:
        """Return at most KEPT requests, the slowest first.

        since  Unix time. Of the period that it divides, only requests among that period's KEPT slowest are known
        """
        oldest = self._number() - PERIODS
        heaps = (period.heaps[order] for period in self._periods if period.number > oldest)
        ended = (each for heap in heaps for each in heap if each[2].time >= since)
        return [each for _, _, each in sorted(ended, reverse=True)[:KEPT]]

    def __len__(self) -> int:
        """Return the number of entries kept in all orders."""
        return sum(len(heap) for period in self._periods for heap in period.heaps.values())

    def _number(self) -> int:
        return int(self._clock() // PERIOD_S)

    def _now(self) -> _Period:
        number = self._number()
        if not self._periods or self._periods[-1].number != number:
            self._periods.append(_Period(number))
        return self._periods[-1]
