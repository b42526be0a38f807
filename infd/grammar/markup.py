"""Write thoughts and tool calls as Lark: free text up to a mark, and constrained text after the mark.

If one token of the vocabulary spells a mark, the grammar admits only that token, and no free text before the token
that contains the mark. So a parser that searches the answer for marks finds them only where the grammar has them.
Other marks are matched by their bytes, across the boundaries of tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.grammar import lark

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.request import Calls, Thought

    TokenOf = Callable[[str], int | None]


class Rules(Struct):
    """The rules of a Lark grammar; `start` is the expression of its first rule."""

    start: str
    rules: list[str] = []

    def text(self) -> str:
        return "\n".join([f"start: {self.start}", *self.rules])


def after_thought(thought: Thought, answer: str, token_of: TokenOf) -> Rules:
    """Return the rules of a thought followed by an answer.

    answer    name of the answer's grammar
    token_of  returns the id of the token that spells a mark; None if no token does
    """
    inside, rules = _text_to(thought.closing, "thought", token_of)
    if thought.newlines:
        rules.append(f"NEWLINES: /\\n{{1,{thought.newlines}}}/")
        inside += " NEWLINES?"
    if thought.inside:
        return Rules(f"{inside} @{answer}", rules)
    return Rules(f"({_mark(thought.opening, token_of)} {inside})? @{answer}", rules)


def calls(called: Calls, arguments: Sequence[str], otherwise: str | None, token_of: TokenOf) -> Rules:
    """Return the rules of an answer with tool calls.

    arguments  for each tool, the Lark expression of its arguments
    otherwise  name of the grammar of an answer without calls; None: any text
    token_of   as in `after_thought`
    """
    syntax = called.syntax
    head, _, rest = syntax.call.partition("$name")
    middle, _, tail = rest.partition("$arguments")

    def spelled(text: str) -> str:
        return _spelled(text, syntax.marks, token_of)

    named = " | ".join(f"{spelled(tool.name + middle)} arguments_{number}" for number, tool in enumerate(called.tools))
    first = syntax.begin + head
    assert first.startswith(syntax.trigger)
    rules = [f"arguments_{number}: {expression}" for number, expression in enumerate(arguments)]
    rules.append(f"called: ({named}) {spelled(tail)}")
    several = f"called ({spelled(syntax.between + head)} called)*" if called.parallel else "called"
    rules.append(f"calls: {several} {spelled(syntax.end)}")
    if called.required:
        return Rules(f"{spelled(first)} calls", rules)
    if otherwise is not None:
        return Rules(f"{spelled(first)} calls | @{otherwise}", rules)
    to_call, free = _text_to(syntax.trigger, "free", token_of)
    begun = f"{to_call} {spelled(first.removeprefix(syntax.trigger))} calls"
    rest = _without(syntax.trigger, "REST")
    return Rules(f"({begun}){'*' if called.parallel else '?'} REST", [*rules, *free, rest])


def _text_to(mark: str, name: str, token_of: TokenOf) -> tuple[str, list[str]]:
    """Return an expression of any text that ends with the first `mark`, and the rules that it uses.

    name  name of the rule, or in capitals of the terminal
    """
    if token_of(mark) is None:
        return name, [f"{name}[lazy]: /(.|\\n)*{_escaped(mark)}/"]
    terminal = name.upper()
    return f"{terminal} {_mark(mark, token_of)}", [_without(mark, terminal)]


def _without(mark: str, terminal: str) -> str:
    """Return the rule of a terminal that matches any text without `mark`."""
    return f"{terminal}: /(.|\\n)*/ & ~/(.|\\n)*{_escaped(mark)}(.|\\n)*/"


def _spelled(text: str, marks: Sequence[str], token_of: TokenOf) -> str:
    """Return a text as a Lark expression, in which a mark is a token if a token of the vocabulary spells it."""
    known = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True) if token_of(mark) is not None)
    if not known:
        return lark.string(text) if text else ""
    parts = re.split(f"({known})", text)
    return " ".join(_mark(part, token_of) if at % 2 else lark.string(part) for at, part in enumerate(parts) if part)


def _mark(mark: str, token_of: TokenOf) -> str:
    token = token_of(mark)
    return lark.string(mark) if token is None else f"<[{token}]>"


def _escaped(mark: str) -> str:
    """Return a mark escaped for a regular expression of Lark."""
    return re.sub(r"[^\w\s]", lambda found: f"\\x{{{ord(found[0]):x}}}", mark).replace("\n", "\\n")
