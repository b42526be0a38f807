"""Decide which steps are short enough to be computed on the event loop's thread.

A step on the device thread costs two wake-ups, of that thread and of the loop for the result: a twentieth of a short
text in a small encoder. The loop stands still while it computes, for at most SHORT_S as foreseen. So it computes only
steps that are alone: it then has nothing else to do, and the kernels' threads use all cores in any case.
"""

from __future__ import annotations

from typing import Final

SHORT_S: Final = 0.005
LEAST_TOKENS: Final = 16  # a step of fewer tokens lasts about as long
MEMORY: Final = 8  # steps over which the pace is averaged


class ShortSteps:
    """Foresees the duration of steps from that of earlier ones, so that under load the device thread computes again.

    Only for a model without a cache on a CPU: a GPU computes beside the loop, and so does a CPU where each step follows
    the one before, as in decoding.
    """

    def __init__(self, token_s: float) -> None:
        """token_s: duration of the shortest step divided by its tokens, in seconds"""
        self._token_s = token_s

    def include(self, tokens: int) -> bool:
        """Whether a step of so many tokens is short."""
        return max(LEAST_TOKENS, tokens) * self._token_s <= SHORT_S

    def took(self, tokens: int, seconds: float) -> None:
        """Record the duration of a step that was alone, on whichever thread."""
        self._token_s += (seconds / max(LEAST_TOKENS, tokens) - self._token_s) / MEMORY
