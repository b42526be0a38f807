"""Counters, gauges and histograms.

The event loop's thread counts in plain integers and lists; only a scrape uses
prometheus_client (exposition.py), on another thread and on a copy. Warm-up and
health probes are not counted.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from copy import copy
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.telemetry.expert_loads import ExpertLoads

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.telemetry.usage import Usage

# Bounds of buckets, in seconds: from one token on a fast GPU to a long answer on a slow CPU.
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 80.0)
DURATION_S = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    480.0,
    1920.0,
)
LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
MASK_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts of values by upper bound. Needs no lock, because only the event loop's thread calls `observe`."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.bounds = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` equal values."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def __copy__(self) -> Histogram:
        twin = Histogram(self.bounds)
        twin.counts = self.counts.copy()
        twin.sum = self.sum
        return twin

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus' buckets: pairs of an upper bound and the number of values at or below that bound."""
        bounds = [repr(float(bound)) for bound in self.bounds] + ["+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class FineHistogram(Histogram):
    """A histogram for percentiles too: each of Prometheus' buckets is divided into buckets 5 % wide.

    Prometheus reads the buckets of `exposed` only. Values below the first of these are divided down to FINEST.
    """

    __slots__ = ("exposed",)

    def __init__(self, buckets: tuple[float, ...]) -> None:
        super().__init__(_divided(buckets))
        self.exposed = buckets

    def __copy__(self) -> FineHistogram:
        twin = FineHistogram(self.exposed)
        twin.counts = self.counts.copy()
        twin.sum = self.sum
        return twin

    def cumulative(self) -> list[tuple[str, float]]:
        sums = list(accumulate(self.counts))
        at = [(repr(float(bound)), float(sums[bisect_left(self.bounds, bound)])) for bound in self.exposed]
        return [*at, ("+Inf", sums[-1])]


FINEST = 2**-8  # of the first bucket: 4 us of LATENCY_S
WIDTH = 1.05  # of a fine bucket: its upper bound by its lower


@cache
def _divided(buckets: tuple[float, ...]) -> tuple[float, ...]:
    """Return bounds among which are all of `buckets`, each at most WIDTH times the one before it."""
    bounds = [buckets[0] * FINEST]
    for low, high in pairwise((bounds[0], *buckets)):
        parts = math.ceil(math.log(high / low, WIDTH))
        bounds += [low * (high / low) ** (part / parts) for part in range(1, parts)]
        bounds.append(high)
    return tuple(bounds)


class Gauges(Struct, kw_only=True):
    """Current values, read from the engine at each scrape."""

    state: str = "starting"
    running: int = 0
    waiting: int = 0
    held: int = 0  # waiting requests that are held until the engine resumes
    preparing: int = 0  # choices of requests that are not queued yet, for example because the prompt is not encoded
    sleep_level: int = 0  # the requested level; 0: awake
    pages: int = 0
    pages_referenced: int = 0
    pages_cached: int = 0
    last_step_timestamp: float = 0.0
    max_adapters: int = 0  # maximum adapters in one step
    adapters_running: tuple[str, ...] = ()
    adapters_waiting: tuple[str, ...] = ()
    adapters_bytes: int = 0  # host memory of adapters


class Metrics:
    """All counters of one engine.

    model_name  the `model_name` label
    since       when counting began, in Unix time
    """

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self.since = time.time()

        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0  # prompt tokens found in the cache
        self.generation_tokens = 0
        self.preemptions = 0
        self.steps_undone = 0
        self.drafts = 0  # spans whose drafts were verified
        self.drafted = 0  # drafts verified
        self.accepted_drafts: tuple[int, ...] = ()  # drafts kept, by their place behind the last known token
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # looked-up prompt tokens that were in the cache
        self.expert_loads = ExpertLoads()
        self.terminal = dict.fromkeys(("stop", "length", "abort", "error", "disconnect", "slow_reader"), 0)
        self.rejected: dict[str, int] = {}
        self.turned_away: dict[str, int] = {}  # refusals because of load or state; a retry may succeed
        self.adapter_requests: dict[str, int] = {}  # sequences that have ended, by adapter
        self.connections = 0  # open HTTP connections
        self.dropped = dict.fromkeys(("slow_headers", "slow_reader", "crowded", "bad_proxy_header", "bad_handshake"), 0)

        self.grammar_compiles = 0  # refused constraints included
        self.grammar_compile_s = 0.0
        self.grammar_hits = 0  # constraints whose compiled grammar was cached
        self.grammar_cache_bytes = 0
        self.grammar_masks = Histogram(MASK_S)  # seconds to fill the mask of a step with constrained choices

        self.usage: dict[str, Usage] = {}  # by the name of the API key; "" without keys

        self.http_requests: dict[tuple[str, str, str], int] = {}  # number of requests by handler, method, status
        self.http_seconds: dict[tuple[str, str], Histogram] = {}  # durations by handler, method

        self.ttft = FineHistogram(LATENCY_S)
        self.inter_token = FineHistogram(LATENCY_S)
        self.step = FineHistogram(LATENCY_S)
        self.e2e = Histogram(DURATION_S)
        self.queue = Histogram(DURATION_S)
        self.prefill = Histogram(DURATION_S)
        self.decode = Histogram(DURATION_S)
        self.inference = Histogram(DURATION_S)
        self.per_token = Histogram(LATENCY_S)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.iteration_tokens = Histogram(STEP_TOKENS)
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
        self.request_longest_tokens = Histogram(TOKENS)
        self.request_computed_tokens = Histogram(TOKENS)
        self.request_max_tokens = Histogram(TOKENS)
        self.request_choices = Histogram(CHOICES)
        self.request_preemptions = Histogram(PREEMPTIONS)
        self.loop_lag = FineHistogram(LAG_S)

        self.gauges: Callable[[], Gauges] = Gauges
        self.cache_config: dict[str, str] = {}  # constants of the cache, set once the cache is allocated

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an answered HTTP request.

        `handler` and `method` become labels of series, so their values must come from the server, not from clients.
        """
        answers = (handler, method, f"{status // 100}xx")
        self.http_requests[answers] = self.http_requests.get(answers, 0) + 1
        if (durations := self.http_seconds.get((handler, method))) is None:
            durations = self.http_seconds[handler, method] = Histogram(DURATION_S)
        durations.observe(seconds)

    def forget_adapter(self, name: str) -> None:
        """Remove the series of an adapter, so that the number of series stays bounded."""
        self.adapter_requests.pop(name, None)

    def snapshot(self) -> Metrics:
        """Return a copy for another thread to read while counting continues."""
        frozen = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                setattr(frozen, name, copy(value))
            elif isinstance(value, dict):
                setattr(frozen, name, {key: copy(each) for key, each in value.items()})
        gauges = self.gauges()
        frozen.gauges = lambda: gauges
        return frozen
