"""Decide whether rules of characters derive a text, by trying every way to cut the text.

Shares no code with the writers of grammars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.grammar.rules import ROOT, Alternatives, Characters, Reference, Repeated, Sequence, Text

if TYPE_CHECKING:
    from infd.grammar.rules import Expression, Rules


class Recogniser:
    """Finds where the texts of expressions end in one text, from what is found so far, until nothing is added."""

    def __init__(self, rules: Rules, text: str) -> None:
        self._rules = rules
        self._text = text
        self._ends: dict[tuple[str, int], frozenset[int]] = {(ROOT, 0): frozenset()}

    def derives(self) -> bool:
        """Return whether the rules derive the text. Takes time cubic in its length."""
        before: dict[tuple[str, int], frozenset[int]] = {}
        while self._ends != before:
            before = dict(self._ends)
            for name, at in sorted(before, key=lambda each: -each[1]):
                self._ends[name, at] = self._of(self._rules[name], at)
        return len(self._text) in self._ends[ROOT, 0]

    def _of(self, expression: Expression, at: int) -> frozenset[int]:
        match expression:
            case Characters(ranges):
                here = ord(self._text[at]) if at < len(self._text) else -1
                return frozenset((at + 1,) if any(low <= here <= high for low, high in ranges) else ())
            case Text(text):
                return frozenset((at + len(text),) if self._text.startswith(text, at) else ())
            case Reference(name):
                return self._ends.setdefault((name, at), frozenset())
            case Sequence(items):
                reached = frozenset((at,))
                for item in items:
                    reached = self._after(item, reached)
                return reached
            case Alternatives(options):
                return frozenset().union(*(self._of(option, at) for option in options))
            case Repeated(item, least, most):
                reached = frozenset((at,))
                for _ in range(least):
                    reached = self._after(item, reached)
                found, times = reached, least
                while reached and (most is None or times < most):
                    reached = self._after(item, reached) - found
                    found |= reached
                    times += 1
                return found
        raise AssertionError(expression)

    def _after(self, item: Expression, reached: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(self._of(item, at) for at in reached))
