"""Write rules in xgrammar's dialect of GBNF, with tokens by number, around three faults of xgrammar 0.2.

- `\\x` in a text reads all hexadecimal digits that follow: characters are written with `\\u` and `\\U`.
- Negated classes are wrong beyond ASCII: a class lists its members.
- What follows a rule in a sequence is its look-ahead, by which masks admit tokens that reach beyond the rule. In a
  look-ahead the bounds of a class are cut to eight bits: with [\\ue000-\\uffff] every ASCII character passes, and
  the matcher then refuses the token. An automaton reads a class that is a rule of its own, with right bounds; so a
  class beyond ASCII is one where it follows a rule. It gets two alternatives, since a single one would be inlined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.grammar.rules import ROOT, Alternatives, Characters, Reference, Repeated, Sequence, Text, Token

if TYPE_CHECKING:
    from infd.grammar.rules import Expression, Ranges, Rules


def write(rules: Rules) -> str:
    """Return the grammar of trimmed rules."""
    names = {name: ROOT if name == ROOT else f"r{number}" for number, name in enumerate(rules)}
    writer = _Writer(names)
    lines = [f"{names[name]} ::= {writer.written(each)}" for name, each in rules.items()]
    for ranges, name in writer.classes.items():
        one, two = _halves(ranges)
        lines.append(f"{name} ::= {_class(one)} | {_class(two)}")
    return "\n".join(lines)


class _Writer:
    """Writes expressions, and collects the classes that become rules."""

    def __init__(self, names: dict[str, str]) -> None:
        self.classes: dict[Ranges, str] = {}
        self._names = names

    def written(self, expression: Expression, *, after: bool = False) -> str:
        """Return an expression. after: whether it follows a rule in its sequence."""
        match expression:
            case Characters(((low, high),)) if low == high:
                return f'"{_character(low)}"'
            case Characters(ranges):
                if after and ranges[-1][1] > 127:
                    return self.classes.setdefault(ranges, f"c{len(self.classes)}")
                return _class(ranges)
            case Text(text):
                return '"' + "".join(map(_character, text)) + '"'
            case Token(number):
                return f"Token({number})"
            case Reference(name):
                return self._names[name]
            case Sequence(items):
                parts = []
                for item in items:
                    parts.append(self.written(item, after=after))
                    after = after or _holds_rule(item)
                return "(" + " ".join(parts) + ")" if parts else '""'
            case Alternatives(options):
                return "(" + " | ".join(self.written(option, after=after) for option in options) + ")"
            case Repeated(item, least, most):
                times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
                inner = self.written(item, after=after or times is None)
                return f"({inner}){times or f'{{{least},{str() if most is None else most}}}'}"
        raise AssertionError(f"{expression} is not written as characters")


def _holds_rule(expression: Expression) -> bool:
    """Return whether an expression refers to a rule, or to one that xgrammar makes of a part of it."""
    match expression:
        case Characters() | Text() | Token():
            return False
        case Sequence(items):
            return any(map(_holds_rule, items))
    return True


def _halves(ranges: Ranges) -> tuple[Ranges, Ranges]:
    """Part a set of at least two characters."""
    if len(ranges) > 1:
        return ranges[:1], ranges[1:]
    ((low, high),) = ranges
    return ((low, low),), ((low + 1, high),)


def _class(ranges: Ranges) -> str:
    return "[" + "".join(f"{_character(low)}-{_character(high)}" for low, high in ranges) + "]"


def _character(of: str | int) -> str:
    code = ord(of) if isinstance(of, str) else of
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
