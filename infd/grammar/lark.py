"""Check a client's Lark grammar: its size, the options of its rules, and the JSON schemas in it; write rules as Lark.

llguidance parses the grammar. A schema in `%json {...}` passes the same checks and rewriting as a request's schema.
The rule options that make rollback impossible are refused; the error names the option. Of the options of `%llguidance`
only _ALLOWED_OPTIONS are accepted, because others may admit text that is not UTF-8.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from infd.errors import GrammarFailed
from infd.grammar import bounds
from infd.grammar.rules import (
    ANY,
    ROOT,
    Alternatives,
    Characters,
    Document,
    Lacking,
    Pattern,
    Reference,
    Repeated,
    Sequence,
    Text,
    Token,
    Until,
    Without,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.grammar.protocol import Limits
    from infd.grammar.rules import Expression, Rules

_ANYTHING = "/(?s:.)*/"
# A search cannot be interrupted. So quantifiers are possessive, and an unclosed string or bracket extends to the end of
# its line. Otherwise n unclosed quotes or brackets would take time proportional to n^2.
_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*+|\#[^\n]*+)
  | (?P<string>"(?:\\.|[^"\\\n])*+"?)
  | (?P<regex>/(?:\\.|[^/\\\n])++/?)
  | (?P<special><[^<>\s]*+>)
  | (?P<json>%json\b)
  | (?P<options>%llguidance\b)
  | (?P<attributes>(?<=[\w!?-])\[[^\]\n]*+\]?)
  | (?P<or>\|)
    """,
    re.VERBOSE | re.DOTALL,
)
_REFUSED_ATTRIBUTE = re.compile(r"\b(max_tokens|temperature|stop)\s*=")
_ALLOWED_OPTIONS = {"no_forcing", "ignore_once", "allow_initial_skip"}


def checked(grammar: str, limits: Limits, schema: Callable[[Any], Any]) -> str:
    """Return a Lark grammar in which `schema` has rewritten each `%json` schema. Raises GrammarFailed."""
    bounds.check_text(grammar, limits)
    parts, at, alternatives = [], 0, 0
    while (match := _TOKEN.search(grammar, at)) is not None:
        parts.append(grammar[at : match.start()])
        at = match.end()
        kind = match.lastgroup
        if kind in ("json", "options"):
            value, end = _json(grammar, at)
            if kind == "json":
                value = schema(value)
            elif not isinstance(value, dict) or value.keys() - _ALLOWED_OPTIONS:
                _refuse(f"%llguidance options other than {', '.join(sorted(_ALLOWED_OPTIONS))}")
            parts.append(f"{match[0]} {json.dumps(value)}")
            at = end
            continue
        if kind == "attributes" and (option := _REFUSED_ATTRIBUTE.search(match[0])) is not None:
            _refuse(f"the option {option[1]} of a rule")
        if kind == "regex":
            bounds.check_nesting(match[0], limits)
        alternatives += kind == "or"
        parts.append(match[0])
    parts.append(grammar[at:])
    bounds.check_enumerated(alternatives, limits)
    bounds.check_nesting(_TOKEN.sub(" ", grammar), limits)
    return "".join(parts)


def without_specials(grammar: str) -> str:
    """Return a Lark grammar in which token 0 replaces every token given by name or number.

    llguidance refuses a grammar that names a token outside of the vocabulary, before it compiles the other rules. Every
    vocabulary has token 0.
    """
    return _TOKEN.sub(lambda match: "<[0]>" if match.lastgroup == "special" else match[0], grammar)


def write(rules: Rules) -> str:
    """Return rules as a Lark grammar. A reference to a name without a rule refers to another grammar.

    A rule with a name in capitals is a terminal: llguidance uses its longest match. An Until becomes a lazy terminal:
    llguidance uses its shortest match.
    """
    lines = []
    for name, expression in rules.items():
        left = "start" if name == ROOT else name
        match expression:
            case Until(mark, marks, within):
                before = f"({_without(marks, within)})" if within or len(marks) > 1 else _ANYTHING
                lines.append(f"{left}[lazy]: {before} {string(mark)}")
            case Without(marks, within):
                lines.append(f"{left}: {_without(marks, within)}")
            case Lacking(whole, marks):
                lines.append(f"{left}: {whole} & {_without(marks, ())}")
            case Pattern(pattern):
                lines.append(f"{left}: {regex(pattern)}")
            case Document(schema):
                lines.append(f"{left}: %json {json.dumps(schema)}")
            case _:
                lines.append(f"{left}: {_written(expression, rules)}")
    return "\n".join(lines)


def _without(marks: tuple[str, ...], within: tuple[str, ...]) -> str:
    kept = " & ".join(map(regex, within)) if within else _ANYTHING
    return f"{kept} & ~({_ANYTHING} ({' | '.join(map(string, marks))}) {_ANYTHING})"


def _written(expression: Expression, rules: Rules) -> str:
    match expression:
        case Text(text) if len(text) == 1:
            return f"/{_character(ord(text))}/"
        case Text(text):
            return string(text)
        case Characters(ranges):
            if ranges == ANY:
                return "/(?s:.)/"
            members = [
                f"{_character(low)}-{_character(high)}" if low < high else _character(low) for low, high in ranges
            ]
            return f"/[{''.join(members)}]/" if members else "/[^\\s\\S]/"
        case Token(number):
            return f"<[{number}]>"
        case Reference(name):
            return name if name in rules else f"@{name}"
        case Sequence(()):
            return '""'
        case Sequence(items):
            return "(" + " ".join(_written(item, rules) for item in items) + ")"
        case Alternatives(options):
            return "(" + " | ".join(_written(option, rules) for option in options) + ")"
        case Repeated(item, least, most):
            times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
            return f"({_written(item, rules)}){times or f'{{{least},{most if most is not None else str()}}}'}"
    raise AssertionError(f"{expression} is no part of a rule")


def _character(code: int) -> str:
    """Return a character escaped for a regular expression of Lark."""
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"


def string(text: str) -> str:
    """Return a text as a string literal of Lark."""
    return re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def regex(pattern: str) -> str:
    """Return a regular expression as a terminal of Lark."""
    escaped = re.sub(r"\\(.)|/|\n", _escaped, pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def _escaped(match: re.Match[str]) -> str:
    if (character := match[1]) is None:
        character = match[0]
        return {"/": r"\/", "\n": r"\n"}[character]
    return r"\n" if character == "\n" else match[0]


def _json(grammar: str, at: int) -> tuple[Any, int]:
    start = at + len(grammar[at:]) - len(grammar[at:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(grammar, start)
    except RecursionError as error:
        raise GrammarFailed("a schema nests too deep", code="grammar_too_large") from error
    except ValueError as error:
        line = grammar.count("\n", 0, at) + 1
        raise GrammarFailed(f"line {line}: not JSON: {error}", code="invalid_grammar") from error


def _refuse(what: str) -> NoReturn:
    raise GrammarFailed(f"{what}: not supported", code="unsupported_grammar")
