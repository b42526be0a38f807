"""Service level objectives, and the rate of requests that meet all of them.

Source: Zhong et al. 2024, DistServe (goodput).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infd.loadgen.samples import Sample

OBJECTIVES: Final[dict[str, Callable[[Sample], float]]] = {
    "ttft": lambda sample: sample.ttft_s,
    "tpot": lambda sample: sample.per_token_s or 0.0,
    "itl": lambda sample: max(sample.gaps_s, default=0.0),
    "e2el": lambda sample: sample.e2e_s,
}
"""Seconds of a request that an objective bounds; `itl` bounds the longest gap."""


class Goodput(Struct, frozen=True):
    """Requests that met every objective; a failed request meets none.

    missed  requests that missed each objective, without the failed ones
    share   of all requests that ended
    """

    objectives_ms: dict[str, float]
    met: int
    missed: dict[str, int]
    requests_s: float
    share: float


def parse(text: str) -> tuple[str, float]:
    """Return name and milliseconds of an objective such as `ttft:200`. Raises ValueError."""
    name, _, value = text.partition(":")
    name = {"e2e": "e2el"}.get(name, name)
    if name not in OBJECTIVES:
        raise ValueError(f"{text!r} is not NAME:MILLISECONDS with a name of {', '.join(OBJECTIVES)}")
    try:
        limit_ms = float(value)
    except ValueError:
        limit_ms = 0.0
    if not 0 < limit_ms < float("inf"):
        raise ValueError(f"{text!r} needs a number of milliseconds above 0, such as {name}:200")
    return name, limit_ms


def goodput(
    objectives_ms: Mapping[str, float], samples: Sequence[Sample], failed: int, duration_s: float
) -> Goodput | None:
    """Return the goodput of a run; None without objectives."""
    if not objectives_ms:
        return None
    missed = dict.fromkeys(objectives_ms, 0)
    met = 0
    for sample in samples:
        late = [name for name, limit_ms in objectives_ms.items() if 1000 * OBJECTIVES[name](sample) > limit_ms]
        for name in late:
            missed[name] += 1
        met += not late
    ended = len(samples) + failed
    return Goodput(dict(objectives_ms), met, missed, met / duration_s, met / ended if ended else 0.0)
