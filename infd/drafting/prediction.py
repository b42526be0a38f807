"""Draft the text that the client predicts: OpenAI's `prediction`.

The drafter follows the answer through the prediction. Where the answer differs, the drafter first assumes that one
token was replaced. After further differences it searches the prediction for the answer's last tokens, first behind the
place where the answer differed, because edited texts keep their order.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from infd.drafting.occurrences import AT_ONCE, MOST_INDEXED

if TYPE_CHECKING:
    from collections.abc import Sequence


LENGTHS: Final = (4, 2)


class PredictionDrafter:
    """Implements Drafter."""

    sure = False
    run = 0

    def __init__(self, prediction: Sequence[int], prompt_tokens: int) -> None:
        self._prediction = prediction
        self._read = prompt_tokens  # tokens of the choice that were compared with the prediction
        self._place = 0  # of the prediction's token that is expected next
        self._lost = False  # whether the answer's last two tokens or more are not those of the prediction
        self._differs = False  # whether the answer's last token is not that of the prediction
        # For each length: run of tokens -> places behind the run in the prediction, ascending.
        self._places: list[tuple[int, dict[int, list[int]]]] = [(length, {}) for length in LENGTHS]
        self._indexed = 0

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        self._index()
        for at in range(self._read, len(tokens)):
            self._follow(tokens, at)
        self._read = len(tokens)
        return [] if self._lost else list(self._prediction[self._place : self._place + most])

    def finish(self, tokens: Sequence[int]) -> None:
        """No-op: answers are not remembered."""

    def _follow(self, tokens: Sequence[int], at: int) -> None:
        """Find the place in the prediction behind the choice's token number `at`."""
        inside = not self._lost and self._place < len(self._prediction)
        if inside and self._prediction[self._place] == tokens[at]:
            self._place += 1
            self._differs = False
            return
        place = self._find(tokens[max(0, at + 1 - LENGTHS[0]) : at + 1])
        if place is not None:
            self._place, self._lost, self._differs = place, False, False
        elif not self._lost:
            self._lost = self._differs
            self._place, self._differs = self._place + 1, True

    def _find(self, last: Sequence[int]) -> int | None:
        """Return the place behind the longest run at the end of `last` that the prediction contains."""
        for length, places in self._places:
            if len(last) >= length and (found := places.get(hash(tuple(last[-length:])))):
                behind = bisect_left(found, self._place)
                return found[behind] if behind < len(found) else found[-1]
        return None

    def _index(self) -> None:
        """Index AT_ONCE more tokens of the prediction."""
        end = min(len(self._prediction), self._indexed + AT_ONCE, MOST_INDEXED)
        for length, places in self._places:
            for at in range(max(self._indexed + 1, length), end + 1):
                places.setdefault(hash(tuple(self._prediction[at - length : at])), []).append(at)
        self._indexed = max(self._indexed, end)
