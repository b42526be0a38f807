"""Divide a grammar of characters into terminals that a lexer reads exactly.

llguidance's lexer matches the longest terminal that may come next, as a programming language's lexer does: of the three
terminals in `("a" | "ab") "b"` it rejects the text "ab". A grammar of characters has no lexer. With terminals none of
which can continue where another one may end, the lexer divides each text as the grammar does.

At first the largest parts without recursion are terminals. A terminal that can continue where another one may end is
divided there, if need be into single characters, which cannot continue. Large terminals are needed because
llguidance parses the terminals of every token that a mask may allow: with characters as terminals, a string that may
contain anything exceeds its limit of 50,000 items in a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from infd.errors import GrammarFailed
from infd.grammar.automata import automaton
from infd.grammar.loops import without_loops
from infd.grammar.order import Order
from infd.grammar.regulars import Regulars
from infd.grammar.rules import (
    EMPTY,
    ROOT,
    Alternatives,
    Characters,
    Reference,
    Repeated,
    Sequence,
    Text,
    alternatives,
    children,
    derives_empty,
    nullable,
    recursive,
    references,
    renamed,
    sequence,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.grammar.automata import Automaton
    from infd.grammar.rules import Expression, Rules

_AUTOMATON_WORK: Final = 30_000  # most steps of one automaton
_WORK: Final = 150_000  # most steps of all comparisons of terminals
_OPTIONAL: Final = 50  # most items of a sequence before the first that cannot be empty


def divided(rules: Rules) -> Rules:
    """Return an equivalent grammar: rules, and terminals, which have names in capitals.

    One terminal alone may derive the empty text.

    rules  of characters, texts of one character, and references; all reachable from ROOT
    """
    looped = {name: without_loops(name, expression) for name, expression in rules.items()}
    letter = "r" if recursive(looped) else "R"
    numbered = {name: f"{letter}{number}" for number, name in enumerate(rules)}
    ours, start = renamed(looped, numbered), numbered[ROOT]
    if letter == "r":
        lexer = _Lexer(Regulars(ours))
        with suppress(GrammarFailed, RecursionError):  # too large to compare: every character is a terminal
            lexer.spend(15 * sum(map(_size, ours.values())))
            division = _Division(ours, start)
            while longer := lexer.longer(division.rules(), division.terminals):
                division.cuts |= longer
            return division.rules()
    return {ROOT: Reference(start)} | ours


class _Division:
    """A division of rules into terminals.

    terminals  name -> expression, which may derive the empty text
    cuts       expressions without recursion that are no terminals; of a sequence, the number of items before the cut
    """

    def __init__(self, rules: Rules, start: str) -> None:
        self.terminals: dict[str, Expression] = {}
        self.cuts: dict[Expression, int] = {}
        self._names: dict[Expression, str] = {}
        self._mixed: dict[str, Repeated] = {}  # rule of a repetition with runs -> the repetition
        self._rules = rules
        self._start = start
        self._recursive = recursive(rules)
        self._empty = nullable(rules)

    def rules(self) -> Rules:
        """Return the rules and terminals. A rule that is part of a terminal is a terminal with its name in capitals."""
        self.terminals, self._names, self._mixed = {}, {}, {}
        found: Rules = {ROOT: self._part(Reference(self._start))}
        todo = [*references(found[ROOT])]
        while todo:
            if (name := todo.pop()) not in found and name not in self.terminals:
                found[name] = self._runs(name) if name in self._mixed else self._part(self._rules[name])
                todo += references(found[name])
        bodies: Rules = {}
        for name, expression in self.terminals.items():
            body = self._nonempty(expression)
            assert body is not None
            bodies[name] = body
            todo += references(body)
        while todo:
            if (name := todo.pop()) not in bodies:
                bodies[name] = self._rules[name]
                todo += references(bodies[name])
        return found | renamed(bodies, {name: name.upper() for name in self._rules})

    def _part(self, expression: Expression) -> Expression:
        """Return an expression of terminals and rules in place of an expression of characters."""
        if self._whole(expression):
            return self._terminal(expression)
        match expression:
            case Reference():
                return expression
            case Sequence(items):
                return sequence(map(self._part, self._divided(expression, items)))
            case Alternatives(options):
                flat = () if self._flat(expression) else tuple(filter(self._flat, options))
                others = [option for option in options if not self._flat(option)]
                return alternatives(map(self._part, [Alternatives(flat), *others] if flat[1:] else options))
            case Repeated(_, least, None) if least < 2 and self._run(expression) is not None:
                name = next((name for name, each in self._mixed.items() if each == expression), None)
                if name is None:
                    name = f"m{len(self._mixed)}"
                    self._mixed[name] = expression
                return Reference(name)
            case Repeated(item, least, most):
                return Repeated(self._part(item), least, most)
        raise AssertionError(f"{expression} is no part of a grammar of characters")

    def _divided(self, expression: Expression, items: tuple[Expression, ...]) -> Iterator[Expression]:
        """Yield the parts of a sequence. Items without recursion that follow each other are one part."""
        if self._flat(expression):
            yield sequence(items[: self.cuts[expression]])
            yield sequence(items[self.cuts[expression] :])
        else:
            for flat, run in groupby(items, self._flat):
                if flat:
                    yield sequence(run)
                else:
                    yield from run

    def _run(self, repeated: Repeated) -> Expression | None:
        """Return the runs in a repetition of items with and without recursion; None if there are none, or if cut."""
        options = self._options(repeated.item)
        flat = tuple(filter(self._flat, options))
        run = Repeated(alternatives(flat), 1, None)
        return run if flat and len(flat) < len(options) and self._whole(run) else None

    def _runs(self, name: str) -> Expression:
        """Return the rule of a repetition: runs of items without recursion between items with recursion."""
        repeated = self._mixed[name]
        run = self._run(repeated)
        assert run is not None
        once = self._terminal(run)
        rest = alternatives(self._part(each) for each in self._options(repeated.item) if not self._flat(each))
        several = Repeated(sequence((Repeated(once, 0, 1), rest)), repeated.least, None)
        mixed = sequence((several, Repeated(once, 0, 1)))
        return mixed if repeated.least == 0 else Alternatives((once, mixed))

    def _options(self, item: Expression) -> tuple[Expression, ...]:
        """Return the options of an expression, or of the rule to which the expression refers."""
        known: set[Expression] = set()
        while isinstance(item, Reference) and not self._flat(item) and item not in known:
            known.add(item)
            item = self._rules[item.name]
        return item.options if isinstance(item, Alternatives) else (item,)

    def _flat(self, expression: Expression) -> bool:
        """Return whether an expression refers to no recursive rule."""
        return self._recursive.isdisjoint(references(expression))

    def _whole(self, expression: Expression) -> bool:
        """Return whether an expression is a terminal."""
        match expression:
            case Characters() | Text():
                return True
        return self._flat(expression) and expression not in self.cuts

    def _terminal(self, expression: Expression) -> Expression:
        if expression not in self._names:
            if self._nonempty(expression) is None:
                return EMPTY
            name = self._names[expression] = f"T{len(self._names)}"
            self.terminals[name] = expression
        reference = Reference(self._names[expression])
        return Repeated(reference, 0, 1) if derives_empty(expression, self._empty) else reference

    def _nonempty(self, expression: Expression) -> Expression | None:
        """Return an expression without recursion that derives the same texts but the empty one; None for no text."""
        if not derives_empty(expression, self._empty):
            return expression
        match expression:
            case Reference(name):
                return self._nonempty(self._rules[name])
            case Sequence(items):
                options = []
                for at, item in enumerate(items):
                    if at == _OPTIONAL:
                        raise GrammarFailed("too many optional parts", code="grammar_too_large")
                    if (first := self._nonempty(item)) is not None:
                        options.append(sequence((first, *items[at + 1 :])))
                    if not derives_empty(item, self._empty):
                        break
            case Alternatives(items):
                options = [found for each in items if (found := self._nonempty(each)) is not None]
            case Repeated(item, _, most) if most != 0 and (once := self._nonempty(item)) is not None:
                return once if most == 1 else Repeated(once, 1, most)
            case _:
                return None
        return alternatives(options) if options else None


class _Lexer:
    """Finds terminals that the lexer would read beyond the end of another one."""

    def __init__(self, regulars: Regulars) -> None:
        self._regulars = regulars
        self._numbers: dict[Expression, int] = {}
        self._automata: list[Automaton] = []
        self._known: dict[tuple[int, int], _Overlap] = {}
        self._left = _WORK

    def longer(self, rules: Rules, terminals: dict[str, Expression]) -> dict[Expression, int]:
        """Return the terminals that can continue where another one may end, and where to cut them, see _Division.

        Raises GrammarFailed if the terminals are too many or too large to compare.
        """
        self.spend(40 * len(rules))
        order = Order(rules)
        numbers = {name: self._number(terminals[name]) for name in order.terminals}
        begins = {name: _leads(self._automata[number], 0) for name, number in numbers.items()}
        found: dict[Expression, int] = {}
        for name, others in self._together(order, numbers).items():
            following = 0
            self.spend(len(others))
            for each in order.following[name]:
                following |= begins[each]
            for other in others:
                if self._overlap(numbers[name], numbers[other]).beyond & following:
                    longer = terminals[other]
                    found[longer] = min(self._cut(longer, numbers[name], following), found.get(longer, 2**31))
        return found

    def _cut(self, longer: Expression, number: int, following: int) -> int:
        """Return how many items of a sequence do not continue where another terminal may end; at least one.

        number, following  of the other terminal, and the first bytes that may come after it
        """
        items = longer.items if isinstance(longer, Sequence) else ()
        for end in range(1, len(items)):
            if self._overlap(number, self._number(sequence(items[:end]))).beyond & following:
                return max(1, end - 1)
        return max(1, len(items) - 1)

    def _together(self, order: Order, numbers: dict[str, int]) -> dict[str, set[str]]:
        """Return for each terminal a superset of the terminals that may begin at the same place."""
        found: dict[str, set[str]] = {name: set() for name in numbers}
        places = {order.first, *map(frozenset, order.following.values())}  # terminals that may follow a text
        todo = [(each, each) for each in places]
        alike: set[tuple[str, str]] = set()  # terminals at one place that match one text
        while todo:
            for some, others in todo:
                self.spend(len(some) * len(others))
                for name in some:
                    found[name] |= others
                for name in others:
                    found[name] |= some
            self.spend(sum(map(len, found.values())))
            pairs = ((one, two) for one, others in found.items() for two in others if one < two)
            fresh = [
                pair for pair in pairs if pair not in alike and self._overlap(numbers[pair[0]], numbers[pair[1]]).common
            ]
            alike.update(fresh)
            todo = [(frozenset(order.following[one]), frozenset(order.following[two])) for one, two in fresh]
        return found

    def _number(self, expression: Expression) -> int:
        if expression not in self._numbers:
            self._numbers[expression] = len(self._automata)
            self._automata.append(automaton(self._regulars.of(expression), _AUTOMATON_WORK, minimal=False))
            self.spend(sum(map(len, self._automata[-1].edges)))
        return self._numbers[expression]

    def _overlap(self, one: int, two: int) -> _Overlap:
        if (one, two) not in self._known:
            self._known[one, two] = self._compared(self._automata[one], self._automata[two])
        return self._known[one, two]

    def _compared(self, one: Automaton, two: Automaton) -> _Overlap:
        common, beyond = False, 0
        seen: set[tuple[int, int]] = set()
        todo = _steps(one, two, 0, 0)
        while todo:
            if (states := todo.pop()) in seen:
                continue
            seen.add(states)
            self.spend(1)
            if one.accepting[states[0]]:
                common = common or two.accepting[states[1]]
                beyond |= _leads(two, states[1])
            todo += _steps(one, two, *states)
        return _Overlap(common, beyond)

    def spend(self, work: int) -> None:
        """Count work. Raises GrammarFailed if it is too much."""
        self._left -= work
        if self._left < 0:
            raise GrammarFailed("too many or too large terminals", code="grammar_too_large")


class _Overlap(NamedTuple):
    """The overlap of two terminals.

    common  whether both match some text
    beyond  bytes with which the second may continue a text of the first, as bits: the first bytes of characters
    """

    common: bool
    beyond: int


def _size(expression: Expression) -> int:
    return 1 + sum(map(_size, children(expression)))


def _steps(one: Automaton, two: Automaton, state: int, other: int) -> list[tuple[int, int]]:
    """Return the pairs of states to which some character leads from a pair."""
    return [
        (target, reached)
        for low, high, target in one.edges[state]
        for first, last, reached in two.edges[other]
        if first <= high and low <= last
    ]


def _leads(texts: Automaton, state: int) -> int:
    """Return the first bytes, as bits, of the characters that may come next: the lexer reads bytes."""
    bits = 0
    for low, high, _ in texts.edges[state]:
        bits |= (2 << _lead(high)) - (1 << _lead(low))
    return bits


def _lead(code: int) -> int:
    """Return the first byte of a character in UTF-8."""
    if code < 0x80:
        return code
    if code < 0x800:
        return 0xC0 | code >> 6
    return 0xE0 | code >> 12 if code < 0x10000 else 0xF0 | code >> 18
