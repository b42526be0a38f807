"""Find where a text's last tokens occurred before, in constant time per token.

A table maps the hash of each run of n tokens to the place behind its latest occurrence, for a few lengths n. Unequal
runs with equal hashes yield a wrong draft, which costs time and changes no answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

AT_ONCE = 128  # tokens that one call reads at most, because it runs on the event loop: 0.15 to 0.3 ms
MOST_INDEXED = 16384  # tokens at the end of a prompt that are read: about 2 MB with two tables, for each choice
ENTRY_BYTES = 200  # approximate memory of a token in one table


class Occurrences:
    """The runs of tokens of one text. The text may grow.

    lengths  lengths of the runs, the longest first
    since    number of tokens at the text's beginning that are not read
    read     number of tokens at the text's beginning that are read or skipped
    """

    def __init__(self, lengths: Sequence[int], since: int = 0) -> None:
        self.read = max(0, since)
        self._tables: list[tuple[int, dict[int, int]]] = [(length, {}) for length in lengths]

    def extend(self, text: Sequence[int], end: int) -> None:
        """Read the text's tokens before `end`, at most AT_ONCE of them."""
        end = min(end, self.read + AT_ONCE)
        for length, table in self._tables:
            for at in range(max(self.read + 1, length), end + 1):
                table[hash(tuple(text[at - length : at]))] = at
        self.read = max(self.read, end)

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the longest run at the end of `tokens` that the text contains: its length, and the place behind it."""
        found = None
        for length, table in reversed(self._tables):  # a text that lacks a run lacks the longer ones that end with it
            if len(tokens) < length or (place := table.get(hash(tuple(tokens[-length:])))) is None:
                break
            found = length, place
        return found


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
