"""Figures of speculation: what was counted of answers, and how ratios of rates are shown."""

from __future__ import annotations

import random
from statistics import median
from typing import NamedTuple

DRAWS = 2000


class Count(NamedTuple):
    """Tokens decoded behind first tokens, seconds, spans with drafts, drafts verified and kept."""

    tokens: int = 0
    seconds: float = 0.0
    spans: int = 0
    drafted: int = 0
    kept: int = 0

    def plus(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Answered(NamedTuple):
    """Answers to requests at once. tokens: of each answer; a peer's are not known."""

    count: Count
    tokens: list[list[int]]


def spread(ratios: list[float]) -> str:
    """Return the median, the interval that nine tenths of medians of redrawn ratios are in, and the number."""
    draw = random.Random(1)  # noqa: S311 - intervals are no secrets
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    twentieth = DRAWS // 20
    return f"{median(ratios):.3f} ({medians[twentieth]:.3f} to {medians[-1 - twentieth]:.3f}; {len(ratios)})"


def drafts(count: Count) -> str:
    kept = f"{count.kept / count.drafted if count.drafted else 0:4.0%} kept"
    if not count.spans:
        return f"{count.drafted} drafts, {kept}"
    return (
        f"{count.drafted / count.spans:.1f} drafts a span that has any, {kept}, {1 + count.kept / count.spans:.2f}"
        f" tokens; {count.spans} such spans"
    )
