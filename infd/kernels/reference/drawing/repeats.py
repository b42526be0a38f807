"""The DRY penalty, token by token on the host.

Source: llama.cpp's sampler DRY, by p-e-w and pi6am.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from infd.kernels.families.draw import LONGEST_REPETITION

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.draw import History, Repeats

LARGEST_LOG: Final = 88.7228391  # of a float32


def penalize(logits: Tensor, rows: Tensor, history: History, repeats: Repeats) -> None:
    """Implements families.draw.Draw.penalize_repeats."""
    heads, tails = repeats.heads, [[token for token in tail if token >= 0] for tail in repeats.tails.tolist()]
    for i, row in enumerate(rows.tolist()):
        end, window, allowed = int(history.end[i]), int(repeats.window[i]), int(repeats.allowed[i])
        latest = history.tokens[history.sequence[i], max(0, end - window) : end].tolist()[::-1]
        longest = min(_until_breaker(latest, heads, tails), allowed + LONGEST_REPETITION)
        lengths: dict[int, int] = {}
        for back in range(1, len(latest)):
            length = 0
            while length < min(longest, len(latest) - back) and latest[length] == latest[back + length]:
                length += 1
            if length >= allowed:
                lengths[latest[back - 1]] = max(length, lengths.get(latest[back - 1], 0))
        multiplier, base = float(repeats.multiplier[i]), float(repeats.base[i])
        most = int(LARGEST_LOG / math.log(base)) if base > 1.000001 else None
        for token, length in lengths.items():
            if not heads[token] & 1:
                exponent = length - allowed if most is None else min(length - allowed, most)
                logits[row, token] -= multiplier * base**exponent


def _until_breaker(latest: list[int], heads: Tensor, tails: list[list[int]]) -> int:
    """Return the number of tokens after the last breaker, or of all tokens; the latest token is first."""
    for back, token in enumerate(latest):
        bits = int(heads[token])
        found = [0] if bits & 1 else []
        for number, tail in enumerate(tails):
            if bits >> number + 1 & 1 and len(tail) <= back and latest[back - len(tail) : back] == tail[::-1]:
                found.append(len(tail))
        if found:
            return back - max(found)
    return len(latest)
