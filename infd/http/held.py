"""Bound the memory that large answers hold together, by kind of contents, from before they are computed until they
are sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from infd.config import LiveConfig, SchedulerConfig

# Larger answers are counted. Smaller ones are always accepted, so that large ones never cause refusals of these.
SMALL_BYTES: Final = 2**16


class HeldBytes:
    """Counts the bytes that large answers hold of one kind of contents against a setting of `scheduler`.

    size  bytes held by the answers in progress
    """

    def __init__(
        self, live: LiveConfig, most: Callable[[SchedulerConfig], int], setting: str, contents: str, advice: str
    ) -> None:
        """Count nothing yet.

        most      returns the value of the setting
        contents  the kind of contents, for the refusal
        advice    which requests need fewer bytes, for the refusal
        """
        self.size = 0
        self._live = live
        self._most = most
        self._setting = setting
        self._contents = contents
        self._advice = advice

    def hold(self, size: int, held: ExitStack) -> None:
        """Count an answer's bytes until `held` is closed. Raises Overloaded; an answer fits in any case if it is alone.

        size  most bytes that the answer holds of the contents
        """
        if size <= SMALL_BYTES:
            return
        most = self._most(self._live.now.scheduler)
        if self.size and self.size + size > most:
            raise Overloaded(
                f"answers in progress hold up to {self.size} bytes of {self._contents}, of at most {most}"
                f" (scheduler.{self._setting}): {size} more would be too many; {self._advice} need fewer"
            )
        self.size += size
        held.callback(self._release, size)

    def _release(self, size: int) -> None:
        self.size -= size


class Held:
    """The bytes that large answers hold: pooled numbers, log-probabilities of prompts, experts that tokens chose."""

    def __init__(self, live: LiveConfig) -> None:
        self.numbers = HeldBytes(
            live, lambda now: now.max_pooled_bytes, "max_pooled_bytes", "numbers", "fewer or shorter inputs"
        )
        self.prompt_logprobs = HeldBytes(
            live,
            lambda now: now.max_prompt_logprobs_bytes,
            "max_prompt_logprobs_bytes",
            "log-probabilities of prompts",
            "fewer log-probabilities, and fewer or shorter prompts,",
        )
        self.experts = HeldBytes(
            live,
            lambda now: now.max_routed_bytes,
            "max_routed_bytes",
            "experts",
            "a smaller max_tokens or n, and fewer or shorter prompts,",
        )
