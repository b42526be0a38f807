"""Write rules in xgrammar's dialect of GBNF, with tokens as numbers, and avoid three faults of xgrammar 0.2.

- `\\x` in a text consumes all hexadecimal digits that follow: characters are written with `\\u` and `\\U`.
- Negated classes are wrong beyond ASCII: a class lists its members.
- The expression after a rule is the rule's look-ahead, by which masks admit tokens that extend beyond the rule. A
  look-ahead truncates the bounds of a class to eight bits: for [\\ue000-\\uffff] the mask admits all ASCII characters,
  but the matcher then rejects them. The automaton of a rule has exact bounds. So a class beyond ASCII is written as a
  rule if it follows a rule. The rule has two alternatives, because xgrammar would inline a rule of one alternative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.grammar.rules import ROOT, Alternatives, Characters, Reference, Repeated, Sequence, Text, Token

if TYPE_CHECKING:
    from infd.grammar.rules import Expression, Ranges, Rules


def write(rules: Rules) -> str:
    """Return rules as a grammar in GBNF. Every alternative must derive some text, as after `rules.trimmed`."""
    names = {name: ROOT if name == ROOT else f"r{number}" for number, name in enumerate(rules)}
    writer = _Writer(names)
    lines = [f"{names[name]} ::= {writer.written(each)}" for name, each in rules.items()]
    for ranges, name in writer.classes.items():
        one, two = _halves(ranges)
        lines.append(f"{name} ::= {_class(one)} | {_class(two)}")
    return "\n".join(lines)


class _Writer:
    """Writes expressions. `classes` collects the classes that become rules, with the names of the rules."""

    def __init__(self, names: dict[str, str]) -> None:
        self.classes: dict[Ranges, str] = {}
        self._names = names

    def written(self, expression: Expression, *, after: bool = False) -> str:
        """Return an expression in GBNF. after: whether a rule precedes the expression in a sequence."""
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
                    after = after or _contains_rule(item)
                return "(" + " ".join(parts) + ")" if parts else '""'
            case Alternatives(options):
                return "(" + " | ".join(self.written(option, after=after) for option in options) + ")"
            case Repeated(item, least, most):
                times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
                inner = self.written(item, after=after or times is None)
                return f"({inner}){times or f'{{{least},{str() if most is None else most}}}'}"
        raise AssertionError(f"{expression} is not written as characters")


def _contains_rule(expression: Expression) -> bool:
    """Return whether an expression contains a reference to a rule, or a part that xgrammar turns into a rule."""
    match expression:
        case Characters() | Text() | Token():
            return False
        case Sequence(items):
            return any(map(_contains_rule, items))
    return True


def _halves(ranges: Ranges) -> tuple[Ranges, Ranges]:
    """Split a set of at least two characters into two sets."""
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
