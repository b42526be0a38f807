"""Measure the rate at which all cores read memory: the limit of decoding, and a sign of load by other processes."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

_BYTES = 2**28  # more than caches hold
_PASSES = 12  # 0.1 s at 40 GB/s


class MemoryProbe:
    """One thread for each core, each of which sums a part of an array larger than the caches."""

    def __init__(self, cores: Collection[int]) -> None:
        numbers = np.ones(_BYTES // 8, dtype=np.int64)
        self._parts = np.array_split(numbers, len(cores))
        self._threads = ThreadPoolExecutor(len(cores), initializer=os.sched_setaffinity, initargs=(0, set(cores)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    def gb_s(self) -> float:
        """Return the median of _PASSES, in GB/s."""
        rates = []
        for _ in range(_PASSES):
            started = time.perf_counter()
            list(self._threads.map(np.add.reduce, self._parts))
            rates.append(_BYTES / (time.perf_counter() - started) / 1e9)
        return statistics.median(rates)
