"""Draft the tokens that a choice's grammar forces; where it forces none, the tokens of another drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.drafting.drafter import LIKELY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.drafting.drafter import Drafter

KEPT: Final = 4  # places whose forced tokens are remembered: masks are filled ahead of drafts that may be rejected


class ForcedDrafter:
    """Implements Drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self.sure = False
        self.run = 0
        self._drafter = drafter
        # The latest first. Replaced, never changed: the thread for masks reads while the event loop adds.
        self._forced: tuple[tuple[int, list[int], bool], ...] = ()

    def force(self, start: int, tokens: list[int], *, sure: bool = True) -> None:
        """Remember that `tokens` follow the first `start` tokens of the choice.

        sure  whether the grammar forces them; otherwise they are likely
        """
        self._forced = ((start, tokens, sure), *self._forced[: KEPT - 1])

    def forced(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """Return the tokens that are known to follow `tokens`, and whether they are sure. Any thread may ask."""
        for start, forced, sure in self._forced:
            known = len(tokens) - start
            if 0 <= known < len(forced) and forced[:known] == tokens[start:]:
                return forced[known:], sure
        return [], False

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        forced, self.sure = self.forced(tokens)
        if forced:
            self.run = LIKELY
            return forced[:most]
        drafted = self._drafter.draft(tokens, most)
        self.run = self._drafter.run
        return drafted

    def finish(self, tokens: Sequence[int]) -> None:
        self._drafter.finish(tokens)
