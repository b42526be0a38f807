"""Bound the time and memory of one rendering of a chat template.

Each step of a template burns fuel: a unit is a byte of memory, or the time in
which a byte of text is written. The fuel that a rendering burns does not depend on
the machine. A deadline limits the time as well, checked after every CLOCK_FUEL units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable

CLOCK_FUEL: Final = 2**11  # fuel burnt between two readings of the clock


class Exhausted(Exception):
    """A rendering has reached a limit. The message is a verb phrase: callers prepend a subject, "chat template: "."""


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of one rendering. Legitimate prompts need less, because the limit of a request's body bounds them too.

    output_characters  maximum characters of the prompt, and of each intermediate text
    """

    output_characters: int = 32 * 2**20
    fuel: int = 192 * 2**20
    seconds: float = 5.0


# Limits of renderings on the event loop's thread: many times the cost of a short chat, but less time than a step takes.
BRIEF = Limits(output_characters=2**16, fuel=2**18, seconds=0.005)


class Fuel:
    """The remaining fuel of one rendering."""

    __slots__ = ("_clock", "_deadline", "_longest", "_next_look", "_remaining")

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._remaining = limits.fuel
        self._longest = limits.output_characters
        self._next_look = self._remaining - CLOCK_FUEL  # the clock is read when less than this fuel remains
        self._clock = clock
        self._deadline = clock() + limits.seconds

    def burn(self, amount: int) -> None:
        """Subtract fuel. Raises Exhausted."""
        remaining = self._remaining = self._remaining - amount
        if remaining < self._next_look:
            self._look()

    def burn_for_text(self, characters: int) -> None:
        """Burn a unit for each character of a text that is about to be built.

        Raises Exhausted, also for a text longer than `output_characters`.
        """
        if characters > self._longest:
            raise Exhausted(f"makes a text of more than {self._longest} characters")
        self.burn(characters)

    def _look(self) -> None:
        self._next_look = max(0, self._remaining - CLOCK_FUEL)
        if self._remaining < 0:
            raise Exhausted("does too much")
        if self._clock() > self._deadline:
            raise Exhausted("takes too long")
