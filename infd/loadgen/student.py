"""Student's t distribution with whole degrees of freedom.

Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
"""

from __future__ import annotations

import math


def within(t: float, freedom: int) -> float:
    """Return the probability that |T| is below t >= 0."""
    if math.isinf(t):
        return 1.0
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def quantile(probability: float, freedom: int) -> float:
    """Return the t below which |T| is with this probability, below 1."""
    low, high = 0.0, 1.0
    while within(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < probability else (low, middle)
    return high
