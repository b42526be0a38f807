"""Read a grammar of rules `name ::= ...` (GBNF of llama.cpp, EBNF of xgrammar), and write it in llguidance's Lark."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NoReturn

from infd.errors import GrammarFailed, shorten
from infd.grammar import bounds, lark, lexing
from infd.grammar.rule_parser import RuleParser
from infd.grammar.rules import (
    ANY,
    ROOT,
    Characters,
    Reference,
    Repeated,
    Sequence,
    Text,
    opposite,
    ranges_of,
    references,
    sequence,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.grammar.protocol import Limits
    from infd.grammar.rules import Expression, Ranges, Rules

# Quantifiers are possessive, because a search cannot be interrupted. Otherwise n spaces would take time proportional
# to n^4.
_TOKEN: Final = re.compile(
    r"""
    (?P<space>\s++|\#[^\n]*+)
  | (?P<rule>[A-Za-z0-9_-]++)(?=\s*+::=)
  | (?P<defined>::=)
  | (?P<name>[A-Za-z_][A-Za-z0-9_-]*+)
  | "(?P<text>(?:\\.|[^"\\\n])*+)"
  | \[(?P<characters>(?:\\.|[^\]\\\n])*+)\]
  | \{\s*+(?P<least>\d{0,9}+)\s*+(?:(?P<range>,)\s*+(?P<most>\d{0,9}+)\s*+)?\}
  | (?P<mark>[()|*+?.])
    """,
    re.VERBOSE,
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_NAMED: Final = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}


def to_lark(grammar: str, limits: Limits) -> str:
    """Return an equivalent grammar in llguidance's Lark. Raises GrammarFailed."""
    return lark.write(lexing.divided(parse(grammar, limits)))


def parse(grammar: str, limits: Limits) -> Rules:
    """Return the rules of a grammar that are reachable from its root. Raises GrammarFailed."""
    bounds.check_text(grammar, limits)
    return _reached(_Parser(grammar, limits).rules())


class _Parser(RuleParser):
    def rules(self) -> Rules:
        rules: Rules = {}
        while self._kind == "rule":
            name = self._value
            if name in rules:
                self._fail(f"the rule {shorten(name)} is defined twice")
            self._next()
            self._next()  # ::=
            rules[name] = self._options()
        if self._kind:
            self._fail("a rule `name ::= ...` is expected")
        if ROOT not in rules:
            self._fail(f"no rule is named {ROOT}")
        return rules

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while True:
            match self._kind, self._value:
                case "text", value:
                    items.append(sequence(map(Text, self._characters(value))))
                case "characters", value:
                    items.append(Characters(self._class(value)))
                case "mark", ".":
                    items.append(Characters(ANY))
                case "name", value:
                    items.append(Reference(value))
                case "mark", "(":
                    items.append(self._group(")"))
                case ("mark", "*" | "+" | "?") | ("times", _):
                    if not items:
                        self._fail(f"{self._value} repeats nothing")
                    items.append(Repeated(items.pop(), *self._bounds))
                case _:
                    return items[0] if len(items) == 1 else Sequence(tuple(items))
            self._next()

    def _class(self, written: str) -> Ranges:
        negated = written.startswith("^")
        characters = self._characters(written[negated:])
        pairs, at = [], 0
        while at < len(characters):
            ranging = characters[at + 1 : at + 2] == ["-"] and at + 2 < len(characters)
            first, last = characters[at], characters[at + 2 * ranging]
            if first > last:
                self._fail(f"the range {first}-{last} is empty")
            pairs.append((ord(first), ord(last)))
            at += 3 if ranging else 1
        if not pairs and not negated:
            self._fail("a class without characters")
        return opposite(ranges_of(pairs)) if negated else ranges_of(pairs)

    def _characters(self, written: str) -> list[str]:
        return unescaped(written, self._fail)

    def _next(self) -> None:
        while self._at < len(self._grammar):
            match = _TOKEN.match(self._grammar, self._at)
            if match is None:
                self._fail(f"{self._grammar[self._at]!r} is not expected")
            self._at = match.end()
            if match["space"] is not None:
                continue
            if match["least"] is not None:
                self._kind, self._value, self._bounds = "times", match[0], self._times(match)
                return
            self._kind = match.lastgroup or ""
            self._value = match[self._kind]
            self._bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._value, (1, 1))
            return
        self._kind, self._value = "", ""

    def _times(self, match: re.Match[str]) -> tuple[int, int | None]:
        least, most = match["least"], match["most"] or ""
        if not match["range"]:
            return (int(least), int(least)) if least else self._fail("{} repeats nothing")
        if least and most and int(least) > int(most):
            self._fail(f"{match[0]} is empty")
        return int(least or 0), int(most) if most else None


def unescaped(written: str, fail: Callable[[str], NoReturn]) -> list[str]:
    """Return the characters of a text with escapes; `fail` raises the error of an escape that is no character."""
    characters = []
    for hex2, hex4, hex8, escaped, plain in _ESCAPE.findall(written):
        if number := hex2 or hex4 or hex8:
            code = int(number, 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                fail(f"{number} is no character")
            characters.append(chr(code))
        elif escaped in ("x", "u", "U"):
            fail(f"an escape \\{escaped} without its digits")
        else:
            characters.append(_NAMED.get(escaped, escaped) if escaped else plain)
    return characters


def _reached(rules: Rules) -> Rules:
    """Return the rules that are reachable from the root."""
    reached: Rules = {}
    todo = [ROOT]
    while todo:
        if (name := todo.pop()) in reached:
            continue
        if name not in rules:
            raise GrammarFailed(f"no rule is named {shorten(name)}", code="invalid_grammar")
        reached[name] = rules[name]
        todo += references(rules[name])
    return reached
