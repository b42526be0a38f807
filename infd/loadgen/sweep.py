"""The loads of a sweep: one for each rate of arrivals and each limit of requests in flight, in one run or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from infd.loadgen.datasets.spec import TRACES, File

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.loadgen.settings import Settings

_SEEDS: Final = 100_000  # seeds of two sweeps, of which one has the other's seed + 1, do not meet
DEFAULT_CONCURRENCY: Final = 8


def sweep(
    settings: Settings, concurrencies: Sequence[int | None], rates: Sequence[float | None], runs: int = 1
) -> list[Settings]:
    """Return the loads in the order given, all of them once for each run, so that other work of the machine affects all
    loads equally.

    A rate or a limit may be None, for none.

    Without rates and limits the one load has DEFAULT_CONCURRENCY; with rates or a trace's times alone no limit. Each
    load has a seed of its own, so that no random prompt of an earlier one is in the server's prefix cache.
    """
    timed = any(rates) or (isinstance(settings.dataset, File) and settings.dataset.shape in TRACES)
    limits: list[int | None] = list(concurrencies) or [None if timed else DEFAULT_CONCURRENCY]
    pairs = [(limit, rate) for limit in limits for rate in (rates or [None])] * runs
    return [
        structs.replace(settings, concurrency=limit, request_rate=rate, seed=settings.seed + _SEEDS * number)
        for number, (limit, rate) in enumerate(pairs)
    ]


def name_of(settings: Settings) -> str:
    """Return a load as people read it: its rate, its limit of requests in flight, or both."""
    rate = f"{settings.request_rate:g}/s" if settings.request_rate is not None else ""
    limit = f"{settings.concurrency} at once" if settings.concurrency is not None else ""
    return " ".join(filter(None, (rate, limit))) or "as it comes"
