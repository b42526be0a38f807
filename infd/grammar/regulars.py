"""Convert expressions of rules that are not recursive to regular expressions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.grammar.automata import Join, Set, Times, Union, literal
from infd.grammar.rules import Alternatives, Characters, Reference, Repeated, Sequence, Text

if TYPE_CHECKING:
    from infd.grammar.automata import Regular
    from infd.grammar.rules import Expression, Rules


class Regulars:
    """Converts expressions to regular expressions. No rule of `rules` may be recursive."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._made: dict[str, Regular] = {}

    def of(self, expression: Expression) -> Regular:
        match expression:
            case Characters(ranges):
                return Set(ranges)
            case Text(text):
                return literal(text)
            case Reference(name):
                if name not in self._made:
                    self._made[name] = self.of(self._rules[name])
                return self._made[name]
            case Sequence(items):
                return Join(tuple(map(self.of, items)))
            case Alternatives(options):
                return Union(tuple(map(self.of, options)))
            case Repeated(item, least, most):
                return Times(self.of(item), least, most)
        raise AssertionError(f"{expression} is no part of a regular expression")
