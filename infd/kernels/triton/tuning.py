"""Search for the fastest tiling of kernels for one shape, by measurement on the installed GPU.

Tiles of few and of many tokens are searched separately. Tilings that fail or compute wrong results are discarded. A
tiling replaces the default only if steps take at most WORTHWHILE times as long as with the default. What is varied and
measured: `tuning_attention.py`, `tuning_experts.py`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from msgspec import Struct

from infd.kernels.triton.tilings import ShapeT, Tilings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from infd.kernels.triton.blocks import Gpu

log = logging.getLogger("infd.kernels")

WORTHWHILE: Final = 0.97  # largest time of a tiling that replaces the default, as a fraction of the default's time
ROUNDS: Final = 20  # timed calls; the median is the result
FLUSHED: Final = 2**28  # bytes overwritten to flush caches: the largest last-level caches of GPUs have 256 MiB

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
Step: TypeAlias = "Callable[[T], Callable[[], Tensor]]"  # returns a step's work with a tiling


class Cost(Protocol[T_contra]):
    """The measured time of tilings."""

    def few(self, tiling: T_contra) -> float | None:
        """Return the seconds of steps with few tokens; None if they fail or compute wrong results."""

    def many(self, tiling: T_contra) -> float | None:
        """Return the seconds of steps with many tokens; None if they fail or compute wrong results."""


class Found(Struct, Generic[T], frozen=True):
    """The tiling for one shape.

    few, many  time of steps with few tokens, and with many, as a fraction of the default tiling's time; 1 if the
               tiling is the default for such steps
    """

    tiling: T
    few: float
    many: float


class Variations(NamedTuple, Generic[T]):
    """The tilings to try.

    few, many  each yields variations of the best tiling so far that change the time of steps with few tokens only, or
               with many
    """

    few: Sequence[Callable[[T], Iterable[T]]]
    many: Sequence[Callable[[T], Iterable[T]]]


def search(default: T, variations: Variations[T], cost: Cost[T]) -> Found[T]:
    """Return the fastest tiling found, or the default for few or for many tokens if the gain there is too small.

    The default tiling must work.
    """
    tiling, few = _best(cost.few, default, variations.few)
    tiling, many = _best(cost.many, tiling, variations.many)
    return Found(tiling, few, many)


def _best(
    cost: Callable[[T], float | None], default: T, variations: Sequence[Callable[[T], Iterable[T]]]
) -> tuple[T, float]:
    """Apply each variation to the best tiling so far. Return the fastest, and its share of the default's time.

    Returns the default, and 1, if the fastest tiling takes more than WORTHWHILE times as long as the default.
    """
    reference = cost(default)
    assert reference is not None, "the kernels fail with the default tiling"
    best, least = default, reference
    for vary in variations:
        for tiling in vary(best):
            seconds = cost(tiling)
            if seconds is not None and seconds < least:
                best, least = tiling, seconds
    return (best, least / reference) if least <= WORTHWHILE * reference else (default, 1.0)


class Measured(Generic[T]):
    """Costs of steps with random values, measured on a device. Implements `Cost`.

    A step is the work of a tiling: a function that returns the step's result.
    """

    def __init__(
        self,
        timer: Callable[[Callable[[], object]], float],
        tolerance: float,
        default: T,
        few: Sequence[Step[T]],
        many: Sequence[Step[T]],
    ) -> None:
        """timer: measures the seconds that a call takes. tolerance: of results, from those of the default tiling."""
        self._timer, self._tolerance = timer, tolerance
        self._few, self._many = ([(step, step(default)()) for step in steps] for steps in (few, many))

    def few(self, tiling: T) -> float | None:
        return self._seconds(tiling, self._few)

    def many(self, tiling: T) -> float | None:
        return self._seconds(tiling, self._many)

    def _seconds(self, tiling: T, steps: Sequence[tuple[Step[T], Tensor]]) -> float | None:
        try:
            return sum(self._timed(step(tiling), expected) for step, expected in steps)
        except Exception as error:  # from Triton's compiler or launcher, or a wrong result
            log.debug("tiling %s is discarded: %s", tiling, error)
            return None

    def _timed(self, work: Callable[[], Tensor], expected: Tensor) -> float:
        torch.testing.assert_close(work(), expected, rtol=self._tolerance, atol=self._tolerance)
        return self._timer(work)


class Fixed(Tilings[ShapeT, T]):
    """One tiling for all shapes."""

    def __init__(self, gpu: Gpu, tiling: T) -> None:
        super().__init__(gpu)
        self._tiling = tiling

    def __getitem__(self, shape: ShapeT) -> T:
        return self._tiling


def on_device(work: Callable[[], object]) -> float:
    """Return the median seconds that `work` takes on the current GPU.

    Before each run the GPU's caches are overwritten, as reading weights does between two layers' work.
    """
    others = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for begin, end in events:
        others.zero_()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[ROUNDS // 2] / 1e3
