"""The order of a grammar's terminals: which terminals may follow which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from infd.grammar.rules import ROOT, Alternatives, Reference, Repeated, Sequence, nullable, references

if TYPE_CHECKING:
    from infd.grammar.rules import Expression, Rules


class Order:
    """The order of the terminals of rules. A rule with a name in capitals is a terminal.

    terminals  names of the terminals to which rules refer
    following  for each, the terminals that may follow it
    first      terminals with which a text may begin
    last       terminals with which a text may end
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = {name: each for name, each in rules.items() if not name.isupper()}
        self._ends: dict[str, _Ends] = dict.fromkeys(self._rules, _Ends(frozenset(), frozenset(), empty=False))
        self._empty = nullable(rules)
        self.terminals: set[str] = set()
        users: dict[str, set[str]] = {name: set() for name in self._rules}
        for name, each in self._rules.items():
            for used in references(each):
                if used.isupper():
                    self.terminals.add(used)
                else:
                    users[used].add(name)
        self.following: dict[str, set[str]] = {name: set() for name in self.terminals}
        todo = dict.fromkeys(self._rules)  # the last rule is the next
        while todo:
            name, _ = todo.popitem()
            if (found := self._found(self._rules[name])) != self._ends[name]:
                self._ends[name] = found
                todo |= dict.fromkeys(users[name])
        self.first, self.last = self._ends[ROOT].first, self._ends[ROOT].last

    def _found(self, expression: Expression) -> _Ends:
        """Return the first and last terminals of an expression; record which terminals follow each other in it."""
        match expression:
            case Reference(name) if name.isupper():
                return _Ends(frozenset((name,)), frozenset((name,)), empty=name in self._empty)
            case Reference(name):
                return self._ends[name]
            case Sequence(items):
                whole = _Ends(frozenset(), frozenset(), empty=True)
                for item in items:
                    whole = self._joined(whole, self._found(item))
                return whole
            case Alternatives(options):
                found = [self._found(option) for option in options]
                return _Ends(
                    frozenset().union(*(each.first for each in found)),
                    frozenset().union(*(each.last for each in found)),
                    empty=any(each.empty for each in found),
                )
            case Repeated(item, least, most):
                once = self._found(item)
                if most is None or most > 1:
                    self._joined(once, once)
                return _Ends(once.first, once.last, empty=once.empty or not least)
        raise AssertionError(f"{expression} is no part of a rule")

    def _joined(self, one: _Ends, two: _Ends) -> _Ends:
        for name in one.last:
            self.following[name] |= two.first
        return _Ends(
            one.first | two.first if one.empty else one.first,
            two.last | one.last if two.empty else two.last,
            empty=one.empty and two.empty,
        )


class _Ends(Struct, frozen=True):
    """Terminals with which texts of an expression begin and end. empty: whether it derives the empty text."""

    first: frozenset[str]
    last: frozenset[str]
    empty: bool
