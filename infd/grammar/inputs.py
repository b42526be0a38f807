"""Write the input of a custom tool, a text that a client's grammar derives, within the syntax of a model's calls.

In most syntaxes the input is a JSON string: then the characters of each terminal are escaped. In the others it extends
to a mark, so no terminal may match the mark, and no derived text may contain it. The lexer takes the longest terminal,
so no last terminal may continue with the first character of the mark's text.

Ignored terminals are written before each other terminal. So none ends the input, where it would match the newline that
belongs to the mark.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn

from msgspec import Struct

from infd.errors import GrammarFailed
from infd.grammar import lark, lark_syntax
from infd.grammar.automata import Join, Set, Times, Union, automaton, literal
from infd.grammar.json_rules import UNESCAPED, spelled
from infd.grammar.order import Order
from infd.grammar.regulars import Regulars
from infd.grammar.rules import (
    ANY,
    ROOT,
    Alternatives,
    Characters,
    Lacking,
    Reference,
    Repeated,
    Sequence,
    Text,
    common,
    opposite,
    renamed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from infd.constraint import CallSyntax
    from infd.grammar.automata import Automaton
    from infd.grammar.lark_syntax import LarkGrammar
    from infd.grammar.protocol import Limits
    from infd.grammar.rules import Expression, Ranges, Rules

INPUT: Final = "input"  # name of the only argument of a custom tool


class Input(Struct, frozen=True):
    """The argument `input` of a custom tool. name: of the grammar of its text."""

    name: str


def write(grammar: str, limits: Limits, syntax: CallSyntax, marks: Mapping[str, int]) -> str:
    """Return the grammar of the input's text as llguidance's Lark. Raises GrammarFailed.

    marks  mark -> token id, for those marks of the syntax that a single token spells
    """
    try:
        return _write(grammar, limits, syntax, marks)
    except RecursionError:
        raise GrammarFailed("the grammar nests too deep", code="grammar_too_large") from None


def _write(grammar: str, limits: Limits, syntax: CallSyntax, marks: Mapping[str, int]) -> str:
    parsed = lark_syntax.parse(grammar, limits)
    rules = _with_ignored(parsed)
    if not syntax.parameter or syntax.quoted:
        rules = _divided(rules)
        return lark.write({name: _escaped(each) if name.isupper() else each for name, each in rules.items()})
    tail = syntax.parameter.partition("$value")[2].replace("$key", INPUT)
    follow = None if any(tail.startswith(mark) for mark in marks) else tail[:1]
    return _before(rules, (tail.strip(), *syntax.excluded), follow)


def _with_ignored(grammar: LarkGrammar) -> Rules:
    """Return the rules with ignored terminals before each terminal."""
    rules = grammar.rules
    if not grammar.ignored:
        return rules
    between = Repeated(Alternatives(tuple(map(Reference, grammar.ignored))), 0, None)

    def added(expression: Expression) -> Expression:
        match expression:
            case Reference(name) if name.isupper():
                return Sequence((between, expression))
            case Sequence(items):
                return Sequence(tuple(map(added, items)))
            case Alternatives(options):
                return Alternatives(tuple(map(added, options)))
            case Repeated(item, least, most):
                return Repeated(added(item), least, most)
        return expression

    return {name: each if name.isupper() else added(each) for name, each in rules.items()}


def _divided(rules: Rules) -> Rules:
    """Return the rules with some terminals divided, so that the lexer can read their texts in a JSON string.

    In a JSON string the texts of escaped characters, such as the line feed and the quote, begin with a backslash. If a
    terminal can continue with a line feed, and a terminal that begins with a quote may follow, the lexer would read the
    quote's backslash as part of the first terminal. Such a terminal becomes a rule, in which each escape is a terminal.
    """
    order, regulars = Order(rules), Regulars(rules)
    terminals = {name: automaton(regulars.of(Reference(name))) for name in order.terminals}
    found = dict(rules)
    names = {}
    for name, texts in terminals.items():
        follow = frozenset().union(*(_escapes(terminals[each], 0) for each in order.following[name]))
        ends = (_escapes(texts, state) for state, end in enumerate(texts.accepting) if end)
        if any(after and not follow <= after for after in ends):
            names[name] = f"divided_{name.lower()}"
            found[names[name]] = _Pieces(rules, found).of(rules[name])
    return {name: each if name.isupper() else _referring(each, names) for name, each in found.items()}


def _escapes(texts: Automaton, state: int) -> frozenset[int]:
    """Return the characters that may follow in a state, of those that are escaped in a JSON string."""
    return frozenset(code for code in (*range(32), ord('"'), ord("\\")) if _after(texts, state, chr(code)) is not None)


class _Pieces:
    """Divides the expression of a terminal; adds the parts to `found` as terminals."""

    def __init__(self, rules: Rules, found: Rules) -> None:
        self._rules = rules
        self._found = found

    def of(self, expression: Expression) -> Expression:
        match expression:
            case Characters(ranges):
                return Alternatives(tuple(self._terminals(ranges)))
            case Text():
                return self._terminal(expression)
            case Reference(name):
                return self.of(self._rules[name])
            case Sequence(items):
                return Sequence(tuple(map(self.of, items)))
            case Alternatives(options):
                return Alternatives(tuple(map(self.of, options)))
            case Repeated(Characters(ranges), least, None) if least < 2:
                # As many characters without escapes as follow each other are one terminal.
                return Repeated(Alternatives(tuple(self._terminals(ranges, runs=True))), least, None)
            case Repeated(item, least, most):
                return Repeated(self.of(item), least, most)
        raise AssertionError(f"{expression} is no part of a terminal")

    def _terminals(self, ranges: Ranges, *, runs: bool = False) -> Iterator[Expression]:
        bare = common(ranges, UNESCAPED)
        if bare:
            yield self._terminal(Repeated(Characters(bare), 1, None) if runs else Characters(bare))
        if escaped := common(ranges, opposite(UNESCAPED)):
            yield self._terminal(Characters(escaped))

    def _terminal(self, expression: Expression) -> Expression:
        if expression == Text(""):
            return expression
        self._found[name := f"PIECE_{len(self._found)}"] = expression
        return Reference(name)


def _referring(expression: Expression, names: Mapping[str, str]) -> Expression:
    """Return an expression with other names of rules."""
    return renamed({ROOT: expression}, {**names, ROOT: ROOT})[ROOT]


def _escaped(expression: Expression) -> Expression:
    """Return the expression of a terminal's texts within a JSON string."""
    match expression:
        case Characters(ranges):
            return spelled(ranges)
        case Text(text):
            return Sequence(tuple(spelled(((ord(each), ord(each)),)) for each in text))
        case Sequence(items):
            return Sequence(tuple(map(_escaped, items)))
        case Alternatives(options):
            return Alternatives(tuple(map(_escaped, options)))
        case Repeated(item, least, most):
            return Repeated(_escaped(item), least, most)
    return expression


def _before(rules: Rules, marks: tuple[str, ...], follow: str | None) -> str:
    """Return the grammar of texts that a mark ends.

    marks   texts that the input may not contain
    follow  first character after the input; None: a token that no text matches
    """
    order, regulars = Order(rules), Regulars(rules)
    anywhere = Times(Set(ANY), 0, None)
    marked = automaton(Join((anywhere, Union(tuple(map(literal, marks))), anywhere)))
    terminals: dict[str, Automaton] = {}
    written = dict(rules)
    for name in order.terminals:
        terminals[name] = automaton(regulars.of(Reference(name)))
        if not terminals[name].both(marked).empty:
            terminals[name] = terminals[name].without(marked)
            written |= {f"{name}_ALL": rules[name], name: Lacking(f"{name}_ALL", marks)}
    for mark in marks:
        _refuse_spelled(mark, terminals, order)
    for name in order.last if follow is not None else ():
        if follow is not None and _goes_on(terminals[name], follow):
            _refuse(f"a text whose last terminal can go on with {follow!r}")
    return lark.write(written)


def _refuse_spelled(mark: str, terminals: Mapping[str, Automaton], order: Order) -> None:
    """Raise GrammarFailed if terminals that follow each other can spell a mark that none of them contains."""
    anywhere = Times(Set(ANY), 0, None)
    todo: deque[tuple[str, int]] = deque()  # a terminal, and how much of the mark a text may end with after it
    for length in range(1, len(mark)):
        ending = automaton(Join((anywhere, literal(mark[:length]))))
        todo += ((name, length) for name, each in terminals.items() if not each.both(ending).empty)
    known = set(todo)
    while todo:
        name, length = todo.popleft()
        for following in order.following[name]:
            if _begins(terminals[following], mark[length:]):
                _refuse(f"texts that contain {mark!r}, which ends the input,")
            for longer in range(length + 1, len(mark)):
                after = following, longer
                if after not in known and terminals[following].accepts(mark[length:longer]):
                    known.add(after)
                    todo.append(after)


def _begins(texts: Automaton, text: str) -> bool:
    """Return whether a text of an automaton begins with `text`."""
    state: int | None = 0
    for each in text:
        state = None if state is None else _after(texts, state, each)
    return state is not None and not texts.empty


def _goes_on(texts: Automaton, character: str) -> bool:
    """Return whether a text of an automaton, followed by `character`, begins another text of the automaton."""
    return any(end and _after(texts, state, character) is not None for state, end in enumerate(texts.accepting))


def _after(texts: Automaton, state: int, character: str) -> int | None:
    """Return the state to which a character leads; None if the automaton rejects the character."""
    code = ord(character)
    return next((target for low, high, target in texts.edges[state] if low <= code <= high), None)


def _refuse(what: str) -> NoReturn:
    raise GrammarFailed(f"{what}: not supported in this model's call syntax", code="unsupported_grammar")
