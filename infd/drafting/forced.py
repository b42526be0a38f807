"""Draft the tokens that a choice's grammar forces; where it forces none, the tokens of another drafter.

A step is planned before the grammar has read the tokens of the step before. So what follows a token that ends a free
part of the answer, such as the quote and comma behind a JSON string, is sought while the part is written. Where the
form of the answer is known, as a JSON text's by its schema, nothing is sought.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.drafting.drafter import LIKELY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.drafting.drafter import Drafter, Place

KEPT: Final = 4  # places whose forced tokens are remembered: masks are filled ahead of drafts that may be rejected


class ForcedDrafter:
    """Implements Drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self.sure = False
        self.run = 0
        self._drafter = drafter
        # The latest first. Replaced, never changed: the thread for masks reads while the event loop adds.
        self._forced: tuple[tuple[int, list[int], bool], ...] = ()
        # Number of tokens, and what is forced behind tokens that may end the free part that follows.
        self._ahead: tuple[int, dict[int, list[int]]] = (0, {})
        self._begin: Callable[[], Place] | None = None  # called by the next draft
        self._place: Place | None = None
        self._read = 0  # tokens of the choice before the place

    def follow(self, begin: Callable[[], Place], start: int) -> None:
        """Draft what a place tells to follow.

        begin  returns the place of the answer's beginning
        start  the choice's tokens before it
        """
        self._begin, self._read = begin, start

    @property
    def foretold(self) -> bool:
        """Whether it is known without masks what may follow. Any thread may ask."""
        return self._begin is not None or (self._place is not None and self._place.known)

    def force(self, start: int, tokens: list[int], *, sure: bool = True) -> None:
        """Remember that `tokens` follow the first `start` tokens of the choice.

        sure  whether the grammar forces them; otherwise they are likely
        """
        self._forced = ((start, tokens, sure), *self._forced[: KEPT - 1])

    def expect(self, start: int, runs: dict[int, list[int]]) -> None:
        """Remember what follows each token of `runs`, if it is the first of them behind the first `start` tokens."""
        self._ahead = (start, runs)

    def expects(self, tokens: Sequence[int]) -> bool:
        """Return whether `expect` was called for the free part that `tokens` end in. Any thread may ask."""
        start, runs = self._ahead
        return start > 0 and self._ended(tokens, start, runs) is None

    @staticmethod
    def _ended(tokens: Sequence[int], start: int, runs: dict[int, list[int]]) -> int | None:
        """Return the place behind the first token from `start` on that ends the free part; None if none does."""
        return next((at + 1 for at in range(start, len(tokens)) if runs.get(tokens[at])), None)

    def forced(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """Return the tokens that are known to follow `tokens`, and whether they are sure. Any thread may ask."""
        for start, forced, sure in self._forced:
            known = len(tokens) - start
            if 0 <= known < len(forced) and forced[:known] == tokens[start:]:
                return forced[known:], sure
        return [], False

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        if self._begin is not None:
            self._place, self._begin = self._begin(), None
        if self._place is not None:
            self._place.read(tokens[self._read :])
            self._read = len(tokens)
            if self._place.known:
                return self._draft_at(self._place, tokens, most)
        start, runs = self._ahead
        if runs and (place := self._ended(tokens, start, runs)) is not None:
            self.force(place, runs[tokens[place - 1]], sure=False)
            self._ahead, runs = (0, {}), {}
        elif start:
            self._ahead = (len(tokens), runs)  # no token is compared twice
        forced, self.sure = self.forced(tokens)
        if forced:
            self._ahead = (0, {})  # another free part follows
            self.run = LIKELY
            return forced[:most]
        drafted = self._drafter.draft(tokens, most)
        self.run = self._drafter.run
        if runs and (place := self._ended(drafted, 0, runs)) is not None:
            drafted = [*drafted[:place], *runs[drafted[place - 1]]][:most]
        return drafted

    def _draft_at(self, place: Place, tokens: Sequence[int], most: int) -> list[int]:
        """Draft at a place that tells what may follow."""
        self.sure = False
        if guess := place.guess(most):
            self.run = LIKELY if place.likely else 0
            return guess
        drafted = self._drafter.draft(tokens, most)
        extended = place.extended(drafted, most)
        self.run = self._drafter.run if extended[:1] == drafted[:1] else 0
        return extended

    def finish(self, tokens: Sequence[int]) -> None:
        self._drafter.finish(tokens)
