"""Prove that no string matches several regular expressions, and match strings without backtracking.

The dialects of JSON Schema, of the engines and of Python differ in some character classes, such as `\\d` and `.`. So
each expression has two readings. The narrow reading matches the texts that every dialect matches; the wide reading
matches the texts that some dialect matches. If the wide reading does not match a text, no dialect matches the text; if
the narrow reading matches a text, every dialect matches the text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from infd.errors import GrammarFailed
from infd.grammar.automata import Anchor, Join, Positions, Set, Times, disjoint
from infd.grammar.regexes import Parser
from infd.grammar.rules import ANY, LAST, opposite, ranges_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infd.grammar.automata import Regular
    from infd.grammar.rules import Ranges

_NODES: Final = 2000  # most nodes of the automaton of one expression
_PROOF_STEPS: Final = 20_000  # most transitions of one proof; about 0.1 s
_ALL_STEPS: Final = 100_000  # most transitions of all proofs about one schema together


class Languages:
    """Proofs about the regular expressions of one schema. All proofs together take a bounded number of steps."""

    def __init__(self) -> None:
        self._automata: dict[tuple[str, bool], Positions | None] = {}
        self._disjoint: dict[frozenset[str], bool] = {}
        self._steps = 0

    def matches(self, pattern: str, text: str) -> bool | None:
        """Return whether an expression matches somewhere in a text; None if uncertain."""
        for wide in (True, False):
            automaton = self._automaton(pattern, wide=wide)
            if automaton is None or len(text) > _PROOF_STEPS or not self._afford(len(text)):
                return None
            if automaton.matches(text) != wide:
                return not wide
        return None

    def disjoint(self, patterns: Iterable[str]) -> bool:
        """Return whether no string matches all expressions; False if there is no proof."""
        known = frozenset(patterns)
        if known not in self._disjoint:
            read = [self._automaton(pattern, wide=True) for pattern in sorted(known)]
            # Unreadable expressions are left out: a proof about the others holds for all expressions together.
            automata = [each for each in read if each is not None]
            last = self._steps + _PROOF_STEPS
            proved = bool(automata) and disjoint(automata, lambda steps: self._afford(steps) and self._steps <= last)
            self._disjoint[known] = proved
        return self._disjoint[known]

    def _automaton(self, pattern: str, *, wide: bool) -> Positions | None:
        """Return the automaton of the texts in which an expression matches; None if unreadable or too large."""
        if (pattern, wide) not in self._automata:
            anything = Times(Set(ANY), 0, None)
            try:
                whole = Join((anything, _Common(pattern, wide=wide).whole(), anything))
                found = Positions(whole, _NODES)
            except GrammarFailed:
                found = None
            self._automata[pattern, wide] = found
        return self._automata[pattern, wide]

    def _afford(self, steps: int) -> bool:
        self._steps += steps
        return self._steps <= _ALL_STEPS


def ascii_members(class_: str) -> frozenset[str] | None:
    """Return the ASCII characters of a class, such as [a-z], in the narrow reading.

    Returns None if the class is unreadable, or if the wide reading adds ASCII characters other than control characters.
    """
    found = []
    for wide in (False, True):
        try:
            read = _Common(class_, wide=wide).whole()
        except GrammarFailed:
            return None
        if not isinstance(read, Set):
            return None
        found.append({chr(code) for low, high in read.ranges for code in range(low, min(high, 0x7F) + 1)})
    narrow, wide_ = found
    return frozenset(narrow) if all(character < " " for character in wide_ - narrow) else None


_NOT_ASCII: Final = (0x80, LAST)
_DIGITS: Final = ((0x30, 0x39),)
_WORD: Final = (*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))

# Letter of an escape -> character class in the narrow reading, in the wide reading.
_CLASSES: Final = {
    "d": (_DIGITS, (*_DIGITS, _NOT_ASCII)),
    "w": (_WORD, (*_WORD, _NOT_ASCII)),
    "s": (((0x09, 0x0D), (0x20, 0x20)), ((0x09, 0x0D), (0x1C, 0x20), _NOT_ASCII)),
}
_DOT: Final = (
    opposite(((0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029))),
    opposite(((0x0A, 0x0A),)),
)
_CONTROL: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_ESCAPE: Final = re.compile(
    r"([dDwWsS])|([tnvfr])|[pP]\{[A-Za-z_=]*\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|([^A-Za-z0-9\s])"
)
_REPEATS: Final = re.compile(r"[*+?]|\{\d{1,5}(,\d{0,5})?\}")


class _Common(Parser):
    """A parser, in the narrow or the wide reading, of the syntax that all dialects share."""

    def __init__(self, pattern: str, *, wide: bool) -> None:
        super().__init__(pattern)
        self._wide = wide
        self._letters: set[str] = set()  # letters of the class escapes, such as d and S, in the current class

    def _times(self, item: Regular) -> Regular:
        if self._text[self._at - 1] in "^$" and isinstance(item, Anchor):
            self._fail("a repetition of an anchor")
        if not _REPEATS.match(self._text, self._at):
            self._fail("a repetition that some dialect refuses")
        times = super()._times(item)
        if self._peek() in ("*", "+", "?", "{"):  # `a*+` is possessive in some dialects
            self._fail("two repetitions")
        return times

    def _item(self) -> list[Regular]:
        if self._peek() == ".":
            self._at += 1
            return [Set(_DOT[self._wide])]
        return super()._item()

    def _group(self) -> list[Regular]:
        if self._peek() == "?" and not self._text.startswith("?:", self._at):
            self._unsupported("a group with a flag")
        return super()._group()

    def _class(self) -> Ranges:
        negated = self._peek() == "^"
        self._at += negated
        # The narrow reading of a negated class is the complement of the wide reading of its members, and conversely.
        self._wide ^= negated
        pairs: list[tuple[int, int]] = []
        self._letters = set()
        first = True
        while first or self._peek() != "]":
            if self._peek() in ("", "[", "]") or self._text[self._at : self._at + 2] in ("&&", "--", "~~"):
                self._fail("a class that dialects read in different ways")
            pairs += self._member()
            first = False
        self._at += 1
        self._wide ^= negated
        complementary = any(each.swapcase() in self._letters for each in self._letters)  # such as [\s\S]
        found = ANY if complementary else ranges_of(pairs)
        if not negated:
            return found
        # The wide reading includes U+0000, because `patterns.kept_pattern` may have added U+0000 to the members.
        return ranges_of([*opposite(found), *([(0, 0)] if self._wide else [])])

    def _escape(self) -> Regular:
        return Set(self._escaped())

    def _escaped(self) -> Ranges:
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            self._fail("an escape that some dialect refuses")
        self._at = found.end()
        of, control, two, four, itself = found.groups()
        if of:
            self._letters.add(of)
            if of.islower():
                return ranges_of([*_CLASSES[of][self._wide]])
            return opposite(ranges_of([*_CLASSES[of.lower()][not self._wide]]))
        if digits := two or four:
            code = int(digits, 16)
            if 0xD800 <= code <= 0xDFFF:
                self._fail("half a character")
            return ((code, code),)
        if control or itself:
            code = _CONTROL[control] if control else ord(itself)
            return ((code, code),)
        return ANY if self._wide else ()  # \p{...} or \P{...}: no set of characters is looked up
