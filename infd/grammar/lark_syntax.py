"""Read a grammar in the part of Lark that OpenAI's API keeps for custom tools, as rules.

Kept: rules and terminals, alternatives, groups, `[optional]`, `? * + ~n ~n..m {n,m}`, strings, ranges "a".."z", regular
expressions, their flags i, s and x, aliases (no effect), comments, `%ignore`, and `%import common.NAME`. Refused by
name: priorities, templates, other imports and directives, look-around and anchors in regular expressions. A lazy
repetition in a regular expression is read as a greedy one.
Source: the documentation of lark 1.2, "Grammar Reference"; the terminals of its `common.lark`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final, NoReturn

from msgspec import Struct

from infd.errors import GrammarFailed, shorten
from infd.grammar import bounds, regexes
from infd.grammar.automata import Join, Set, Times, Union
from infd.grammar.ebnf import unescaped
from infd.grammar.protocol import Limits
from infd.grammar.regex_syntax import spelled
from infd.grammar.rule_parser import RuleParser
from infd.grammar.rules import (
    ROOT,
    Characters,
    Reference,
    Repeated,
    Sequence,
    Text,
    alternatives,
    ranges_of,
    references,
    renamed,
)

if TYPE_CHECKING:
    from infd.grammar.automata import Regular
    from infd.grammar.rules import Expression, Rules

# Quantifiers are possessive, because a search cannot be interrupted.
_TOKEN: Final = re.compile(
    r"""
    (?P<space>\s++|//[^\n]*+|\#[^\n]*+)
  | (?P<rule>[?!]{0,2}+[A-Za-z_]\w*+)(?=\s*+:)
  | (?P<priority>[?!]{0,2}+[A-Za-z_]\w*+\.-?\d+)(?=\s*+:)
  | (?P<template>[A-Za-z_]\w*+\{[^}"\nA-Za-z_]*+[A-Za-z_][^}"\n]*+\})
  | (?P<directive>%\w++)
  | (?P<name>[A-Za-z_]\w*+)
  | "(?P<string>(?:\\.|[^"\\\n])*+)"(?P<any_case>i?+)
  | /(?P<regex>(?:\\.|[^/\\\n])++)/(?P<flags>[a-z]*+)
  | ~\s*+(?P<times>\d{1,9}+)(?:\s*+\.\.(?P<most>\d{1,9}+))?+
  | \{(?P<least>\d{0,9}+)\s*+(?P<range>,)?+\s*+(?P<bound>\d{0,9}+)\}
  | (?P<mark>->|\.\.|[()\[\]|*+?:.,])
    """,
    re.VERBOSE | re.ASCII,
)
_RANGES: Final = 20_000  # each is written out; \w alone has 760
_ESCAPED: Final = "nrtbfxuU\"\\/'"
_TIMES: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_COMMON: Final = r"""
DIGIT: "0".."9"
HEXDIGIT: "a".."f" | "A".."F" | DIGIT
INT: DIGIT+
SIGNED_INT: ["+"|"-"] INT
DECIMAL: INT "." INT? | "." INT
_EXP: ("e"|"E") SIGNED_INT
FLOAT: INT _EXP | DECIMAL _EXP?
SIGNED_FLOAT: ["+"|"-"] FLOAT
NUMBER: FLOAT | INT
SIGNED_NUMBER: ["+"|"-"] NUMBER
ESCAPED_STRING: /"([^"\\\n]|\\.)*"/
LCASE_LETTER: "a".."z"
UCASE_LETTER: "A".."Z"
LETTER: UCASE_LETTER | LCASE_LETTER
WORD: LETTER+
CNAME: ("_"|LETTER) ("_"|LETTER|DIGIT)*
WS_INLINE: (" "|/\t/)+
WS: /[ \t\f\r\n]/+
CR: /\r/
LF: /\n/
NEWLINE: (CR? LF)+
SH_COMMENT: /#[^\n]*/
CPP_COMMENT: /\/\/[^\n]*/
C_COMMENT: /\/\*([^*]|\*+[^*\/])*\*+\//
SQL_COMMENT: /--[^\n]*/
"""


class LarkGrammar(Struct, frozen=True):
    """A grammar whose lexer matches the longest terminal.

    rules    a rule is a terminal if its name is in capitals; each string and regular expression is part of a terminal
    ignored  names of terminals that may stand between other terminals
    """

    rules: Rules
    ignored: tuple[str, ...]


def parse(grammar: str, limits: Limits) -> LarkGrammar:
    """Return the grammar. Raises GrammarFailed, which names the line."""
    bounds.check_text(grammar, limits)
    return _Parser(grammar, limits).grammar()


class _Parser(RuleParser):
    def __init__(self, grammar: str, limits: Limits) -> None:
        self._ranges = 0  # of all classes in regular expressions
        self._rules: Rules = {}
        self._names: dict[str, str] = {}  # the client's name -> ours
        self._imported: dict[str, str] = {}  # the client's name -> its name in `common`
        self._ignored: list[Expression] = []
        self._terminals: dict[Expression, str] = {}  # of strings and regular expressions within rules
        self._within_terminal = False
        super().__init__(grammar, limits)

    def grammar(self) -> LarkGrammar:
        while self._kind:
            if self._kind == "directive":
                self._directive()
            elif self._kind == "rule":
                self._rule()
            elif self._kind == "priority":
                self._refuse("priorities of terminals and rules")
            else:
                self._fail("a rule `name: ...` is expected")
        if self._imported:
            self._add_common()
        if (start := self._names.get("start")) is None:
            self._fail("no rule is named start")
        for name, expression in self._rules.items():
            for used in references(expression):
                if used not in self._rules:
                    wanted = next(each for each, ours in self._names.items() if ours == used)
                    raise GrammarFailed(f"no rule is named {shorten(wanted)}", code="invalid_grammar")
                if name.isupper() and not used.isupper():
                    raise GrammarFailed("a terminal refers to a rule", code="invalid_grammar")
        self._refuse_recursive_terminals()
        ignored = tuple(self._terminal(each) for each in self._ignored)
        return LarkGrammar({ROOT: Reference(start), **self._rules}, ignored)

    def terminals(self) -> Rules:
        """Return the rules of a grammar without directives, with their own names."""
        while self._kind:
            self._rule()
        return renamed(self._rules, {ours: name for name, ours in self._names.items()})

    def _rule(self) -> None:
        name = self._value.lstrip("?!")
        ours = self._named(name)
        if ours in self._rules or name in self._imported:
            self._fail(f"the rule {shorten(name)} is defined twice")
        self._next()
        self._next()  # the colon
        self._within_terminal = ours.isupper()
        self._rules[ours] = self._options()
        self._within_terminal = False

    def _directive(self) -> None:
        directive = self._value
        if directive not in ("%ignore", "%import"):
            self._refuse(shorten(directive))
        self._next()
        if directive == "%ignore":
            self._within_terminal = True
            self._ignored.append(self._options())
            self._within_terminal = False
        else:
            self._import()

    def _import(self) -> None:
        if (self._kind, self._value) != ("name", "common"):
            self._refuse("%import of other terminals than those of common")
        self._next()
        several = self._is_mark("(")
        if not several and not self._is_mark("."):
            self._fail("%import common.NAME is expected")
        self._next()
        while True:
            if self._kind != "name":
                self._fail("%import common.NAME is expected")
            common, name = self._value, self._value
            if common not in _common() or common.startswith("_"):
                self._fail(f"common has no terminal {shorten(common)}")
            self._next()
            if not several and self._is_mark("->"):
                self._next()
                name = self._value
                self._next()
            if self._named(name) in self._rules or not self._named(name).isupper():
                self._fail(f"{shorten(name)} is no new terminal")
            self._imported[name] = common
            if not several:
                return
            if self._is_mark(")"):
                self._next()
                return
            if not self._is_mark(","):
                self._fail("a ) is missing")
            self._next()

    def _add_common(self) -> None:
        """Add the imported terminals, and those to which they refer."""
        names = {each: f"COMMON_{each}" for each in _common()}
        for name, common in self._imported.items():
            self._rules[self._named(name)] = Reference(names[common])
        todo = list(self._imported.values())
        while todo:
            common = todo.pop()
            if names[common] not in self._rules:
                expression = _common()[common]
                self._rules |= renamed({common: expression}, names)
                todo += references(expression)

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while True:
            match self._kind, self._value:
                case "string", _:
                    items.append(self._string())
                    continue
                case "regex", value:
                    items.append(self._literal(self._regex(value)))
                case "name", value:
                    items.append(Reference(self._named(value)))
                case "mark", "(":
                    items.append(self._group(")"))
                case "mark", "[":
                    items.append(Repeated(self._group("]"), 0, 1))
                case ("mark", "*" | "+" | "?") | ("times", _):
                    if not items:
                        self._fail(f"{self._value} repeats nothing")
                    items.append(Repeated(items.pop(), *self._bounds))
                case "mark", "->":
                    self._next()
                    self._expect_alias()
                case _:
                    return items[0] if len(items) == 1 else Sequence(tuple(items))
            self._next()

    def _expect_alias(self) -> None:
        if self._kind != "name":
            self._fail("an alias is a name")

    def _string(self) -> Expression:
        """Read a string, or a range of characters."""
        any_case, first = self._any_case, self._characters()
        self._next()
        if self._is_mark(".."):
            self._next()
            if self._kind != "string":
                self._fail("a range ends with a string")
            last = self._characters()
            self._next()
            if len(first) != 1 or len(last) != 1 or first > last:
                self._fail("a range is from a character to a later one")
            return self._literal(Characters(ranges_of([(ord(first), ord(last))])))
        if not any_case:
            return self._literal(Text(first)) if first else Sequence(())
        either = (ranges_of([(ord(each), ord(each)) for each in {c, *_cases(c)}]) for c in first)
        return self._literal(Sequence(tuple(map(Characters, either))))

    def _characters(self) -> str:
        for escaped in re.findall(r"\\(.)", self._value):
            if escaped not in _ESCAPED:
                self._fail(f"a string with the escape \\{escaped}")
        return "".join(unescaped(self._value, self._fail))

    def _regex(self, written: str) -> Expression:
        if unknown := set(self._flags) - set("isxu"):
            self._refuse(f"the flag {min(unknown)} of a regular expression")
        flags = self._flags.replace("u", "")
        bounds.check_nesting(written, self._limits)
        pattern = spelled(re.sub(r"\\/", "/", written))
        return self._expression(regexes.parse(f"(?{flags}){pattern}" if flags else pattern))

    def _expression(self, regular: Regular) -> Expression:
        match regular:
            case Set(ranges):
                self._ranges += len(ranges)
                if self._ranges > _RANGES:
                    raise GrammarFailed("too many or too large classes of characters", code="grammar_too_large")
                return Characters(ranges)
            case Join(items):
                return Sequence(tuple(map(self._expression, items)))
            case Union(options):
                return alternatives(map(self._expression, options))
            case Times(item, least, most):
                return Repeated(self._expression(item), least, most)
        return self._refuse("anchors in a regular expression")

    def _literal(self, expression: Expression) -> Expression:
        """Return the expression within a terminal; within a rule, a reference to a terminal of its own."""
        return expression if self._within_terminal else Reference(self._terminal(expression))

    def _terminal(self, expression: Expression) -> str:
        if isinstance(expression, Reference):
            return expression.name
        if expression not in self._terminals:
            name = self._terminals[expression] = f"LITERAL_{len(self._terminals)}"
            self._rules[name] = expression
        return self._terminals[expression]

    def _named(self, name: str) -> str:
        if name not in self._names:
            terminal = name.lstrip("_")[:1].isupper()
            self._names[name] = f"{'T' if terminal else 'r'}{len(self._names)}"
        return self._names[name]

    def _refuse_recursive_terminals(self) -> None:
        terminals = {name: set(references(each)) for name, each in self._rules.items() if name.isupper()}
        known: set[str] = set()
        while fresh := [name for name, used in terminals.items() if name not in known and used <= known]:
            known.update(fresh)
        if len(known) < len(terminals):
            raise GrammarFailed("a terminal refers to itself", code="invalid_grammar")

    def _next(self) -> None:
        while self._at < len(self._grammar):
            match = _TOKEN.match(self._grammar, self._at)
            if match is None:
                self._fail(f"{self._grammar[self._at]!r} is not expected")
            self._at = match.end()
            if match["space"] is not None:
                continue
            if match["template"] is not None:
                self._refuse("templates")
            self._any_case, self._flags = bool(match["any_case"]), match["flags"] or ""
            if match["times"] is not None:
                self._set_times(int(match["times"]), int(match["most"] or match["times"]), match[0])
                return
            if match["least"] is not None:
                least, most = match["least"], match["bound"] if match["range"] else match["least"]
                if not (least or most):
                    self._fail(f"{match[0]} has no number")
                self._set_times(int(least or 0), int(most) if most else None, match[0])
                return
            kinds = ("rule", "priority", "directive", "name", "string", "regex", "mark")
            self._kind = next(kind for kind in kinds if match[kind] is not None)
            self._value = match[self._kind]
            self._bounds = _TIMES.get(self._value, (1, 1)) if self._kind == "mark" else (1, 1)
            return
        self._kind, self._value = "", ""

    def _set_times(self, least: int, most: int | None, written: str) -> None:
        if most is not None and most < least:
            self._fail(f"{written} is empty")
        self._kind, self._value, self._bounds = "times", written, (least, most)

    def _refuse(self, what: str) -> NoReturn:
        raise GrammarFailed(f"line {self._line()}: {what}: not supported", code="unsupported_grammar")


def _cases(character: str) -> list[str]:
    return [each for each in (character.lower(), character.upper()) if len(each) == 1]


@cache
def _common() -> Rules:
    """Return the terminals of `common`, with the names that `common` gives them."""
    return _Parser(_COMMON, Limits()).terminals()
