"""Find the longest run of tokens at the end of a text that occurred before.

Each place is chained to the place before it that follows the same two tokens. A search compares the runs before a few
of these places, the latest first. So a token costs one entry of a table, although runs of all lengths are found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

AT_ONCE: Final = 256  # tokens that one call reads at most, because it runs on the event loop: 0.05 to 0.2 ms
MOST_INDEXED: Final = 16384  # tokens at the end of a prompt that are read: 1 to 4 MB for each choice
MOST_COMPARED: Final = 16  # places that one search considers
ENTRY_BYTES: Final = 200  # most memory of a token, approximately; of text half as much


class Occurrences:
    """The places in one text by the tokens before them. The text may grow.

    longest  tokens up to which runs are compared
    since    number of tokens at the text's beginning that are not read
    read     number of tokens at the text's beginning that are read or skipped
    """

    def __init__(self, longest: int, since: int = 0) -> None:
        self.read = max(0, since)
        self._longest = longest
        self._latest: dict[int | tuple[int, int], int] = {}  # one or two tokens -> the latest place behind them
        self._before: dict[int, int] = {}  # place -> the place before it that follows the same two tokens

    def extend(self, text: Sequence[int], end: int) -> None:
        """Read the text's tokens before `end`, at most AT_ONCE of them."""
        start, end = max(1, self.read), min(end, self.read + AT_ONCE)
        latest, before = self._latest, self._before
        for place, pair in enumerate(zip(text[start - 1 : end - 1], text[start:end], strict=False), start + 1):
            if (earlier := latest.get(pair)) is not None:
                before[place] = earlier
            latest[pair] = latest[pair[1]] = place
        self.read = max(self.read, end)

    def find(self, tokens: Sequence[int], text: Sequence[int]) -> tuple[int, int] | None:
        """Return the longest run at the end of `tokens` that the text contains: its length, and the place behind it.

        text  the text that was read
        """
        if len(tokens) < 2 or (place := self._latest.get((tokens[-2], tokens[-1]))) is None:
            place = self._latest.get(tokens[-1]) if tokens else None
            return None if place is None else (1, place)
        longest, length, found = min(self._longest, len(tokens)), 0, place
        for _ in range(MOST_COMPARED):
            # A run that is longer than the longest so far includes the token before that.
            if length < place and text[place - 1 - length] == tokens[-1 - length]:
                run = agreeing(tokens, text, place, longest)
                if run > length:
                    length, found = run, place
            if length == longest or (earlier := self._before.get(place)) is None:
                break
            place = earlier
        return length, found


def agreeing(tokens: Sequence[int], text: Sequence[int], place: int, most: int) -> int:
    """Return how many tokens at the end of `tokens` equal those before `place` in a text; `most` at most."""
    count, end, most = 0, len(tokens), min(most, place, len(tokens))
    while count < most and tokens[end - 1 - count] == text[place - 1 - count]:
        count += 1
    return count


def continued(text: Sequence[int], place: int, most: int) -> list[int]:
    """Return `most` tokens of a text from `place` on. At the text's end the tokens from `place` on are repeated."""
    found = list(text[place : place + most])
    while found and len(found) < most:
        found += found[: most - len(found)]
    return found
