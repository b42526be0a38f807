"""Write rules in xgrammar's dialect of GBNF, with tokens by number.

xgrammar's negated classes are wrong beyond ASCII, and its `\\x` reads all hexadecimal digits that follow. So classes
list their members, and characters are escaped with `\\u` and `\\U`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.grammar.rules import ROOT, Alternatives, Characters, Reference, Repeated, Sequence, Text, Token

if TYPE_CHECKING:
    from infd.grammar.rules import Expression, Ranges, Rules


def write(rules: Rules) -> str:
    """Return the grammar of trimmed rules."""
    names = {name: ROOT if name == ROOT else f"r{number}" for number, name in enumerate(rules)}
    return "\n".join(f"{names[name]} ::= {_written(each, names)}" for name, each in rules.items())


def _written(expression: Expression, names: dict[str, str]) -> str:
    match expression:
        case Characters(ranges):
            return _class(ranges)
        case Text(text):
            return '"' + "".join(map(_character, text)) + '"'
        case Token(number):
            return f"Token({number})"
        case Reference(name):
            return names[name]
        case Sequence(()):
            return '""'
        case Sequence(items):
            return "(" + " ".join(_written(item, names) for item in items) + ")"
        case Alternatives(options):
            return "(" + " | ".join(_written(option, names) for option in options) + ")"
        case Repeated(item, least, most):
            times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
                (least, most), f"{{{least},{'' if most is None else most}}}"
            )
            return f"({_written(item, names)}){times}"
    raise AssertionError(f"{expression} is not written as characters")


def _class(ranges: Ranges) -> str:
    return "[" + "".join(f"{_character(low)}-{_character(high)}" for low, high in ranges) + "]"


def _character(of: str | int) -> str:
    code = ord(of) if isinstance(of, str) else of
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
