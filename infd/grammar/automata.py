"""Finite automata over characters, for engines whose grammars have neither intersections nor complements.

A `Regular` is a syntax tree. `automaton` turns a tree into a nondeterministic automaton and then, by subset
construction, into a deterministic automaton. An anchor becomes an edge without a character, passable only at the
beginning or only at the end of the text. So an expression may contain anchors anywhere.
Subset constructions and products count their steps, and raise GrammarFailed after about half a second.
"""

from __future__ import annotations

import bisect
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from msgspec import Struct

from infd.errors import GrammarFailed
from infd.grammar.rules import (
    EMPTY,
    LAST,
    Alternatives,
    Characters,
    Expression,
    Ranges,
    Reference,
    Rules,
    Sequence,
    Text,
    ranges_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

State = TypeVar("State", bound="Hashable")

# Most states of an automaton, except an automaton of listed texts: an engine computes masks for each state.
STATES: Final = 2000
_NODES: Final = 20_000  # most nodes of a nondeterministic automaton
_WORK: Final = 400_000  # most steps of one construction, about half a second


class Set(Struct, frozen=True):
    """Any one character of a set."""

    ranges: Ranges


class Anchor(Struct, frozen=True):
    """The empty text at the beginning of the whole text or, if `end`, at the end of the whole text."""

    end: bool


class Join(Struct, frozen=True):
    items: tuple[Regular, ...]


class Union(Struct, frozen=True):
    options: tuple[Regular, ...]


class Times(Struct, frozen=True):
    """A repeated expression. most: None means without bound."""

    item: Regular
    least: int
    most: int | None


Regular = Set | Anchor | Join | Union | Times
NOTHING: Final = Union(())


def literal(text: str) -> Regular:
    """Return the regular expression of one text."""
    return Join(tuple(Set(((ord(each), ord(each)),)) for each in text))


class Automaton(Struct, frozen=True, eq=False):
    """A deterministic automaton that starts in state 0. Every state, except perhaps 0, leads to an accepting state.

    edges      for each state its edges (first character, last character, next state), sorted; a character without an
               edge is rejected
    accepting  for each state, whether a text may end in the state
    """

    edges: list[list[tuple[int, int, int]]]
    accepting: list[bool]

    @property
    def empty(self) -> bool:
        """Whether the automaton accepts no text."""
        return not self.accepting[0] and not self.edges[0]

    def accepts(self, text: str) -> bool:
        state = 0
        for each in text:
            code = ord(each)
            at = bisect.bisect_right(self.edges[state], (code, LAST + 1, 0)) - 1
            if at < 0 or self.edges[state][at][1] < code:
                return False
            state = self.edges[state][at][2]
        return self.accepting[state]

    def both(self, other: Automaton) -> Automaton:
        """Return the intersection. Raises GrammarFailed for too large a result."""
        return _product(self, other, lambda one, two: one and two)

    def without(self, other: Automaton) -> Automaton:
        """Return the difference. Raises GrammarFailed for too large a result."""
        return _product(self, other, lambda one, two: one and not two)

    def rules(self, prefix: str, spell: Callable[[Ranges], Expression], end: Expression = EMPTY) -> Rules:
        """Return the automaton as rules `prefix0`, `prefix1`, ..., numbered by state.

        The start has a rule. Of the states with edges, each with several predecessors or successors, or in which a text
        may end, has a rule. Every other state is part of the rules of its predecessors.

        spell  returns the expression of one character of a set
        end    expression after each accepted text
        """
        users = [0] * len(self.edges)
        for edges in self.edges:
            for target in {target for _, _, target in edges}:
                users[target] += 1
        own = [
            state == 0 or bool(edges and (users[state] > 1 or self.accepting[state] or len({e[2] for e in edges}) > 1))
            for state, edges in enumerate(self.edges)
        ]
        written: Rules = {}
        for state in range(len(self.edges)):
            if own[state]:
                options: list[Expression] = [end] if self.accepting[state] else []
                for target, ranges in self._by_target(state).items():
                    items: list[Expression] = [spell(ranges)]
                    at = target
                    while not own[at] and self.edges[at]:
                        ((at, following),) = self._by_target(at).items()
                        items.append(spell(following))
                    items.append(Reference(f"{prefix}{at}") if own[at] else end)
                    options.append(Sequence(tuple(items)))
                written[f"{prefix}{state}"] = options[0] if len(options) == 1 else Alternatives(tuple(options))
        return written

    def _by_target(self, state: int) -> dict[int, Ranges]:
        found: dict[int, list[tuple[int, int]]] = {}
        for low, high, target in self.edges[state]:
            found.setdefault(target, []).append((low, high))
        return {target: ranges_of(ranges) for target, ranges in found.items()}


def automaton(regular: Regular, work: int = _WORK, *, minimal: bool = True) -> Automaton:
    """Return the automaton of the texts that an expression matches as a whole.

    work     most steps of the construction
    minimal  whether equivalent states are merged, which takes time quadratic in the bounds of repetitions

    Raises GrammarFailed if the automaton is too large.
    """
    return _deterministic(Positions(regular, min(work // 10, _NODES)), work, minimal=minimal)


def automaton_of(texts: Iterable[str]) -> Automaton:
    """Return the automaton of listed texts: their trie, with equal suffixes merged."""
    tree: list[dict[int, int]] = [{}]
    accepting = [False]
    for text in texts:
        state = 0
        for each in text:
            following = tree[state].setdefault(ord(each), len(tree))
            if following == len(tree):
                tree.append({})
                accepting.append(False)
            state = following
        accepting[state] = True
    return _minimal([sorted((c, c, target) for c, target in row.items()) for row in tree], accepting, len(tree))


class Positions:
    """A nondeterministic automaton: nodes, edges with a set of characters, and edges without a character.

    start  nodes in which the automaton may be before the first character
    """

    def __init__(self, regular: Regular, nodes: int = _NODES) -> None:
        """Build the automaton. Raises GrammarFailed if it has more than `nodes` nodes."""
        self._most = nodes
        self._parts = 4 * nodes  # most parts to add: repetitions of nothing add parts without nodes
        self.steps: list[list[tuple[Ranges, int]]] = []
        self.empty: list[list[tuple[int, bool | None]]] = []  # next node; the anchor's `end`, None: no anchor
        self.first = self._node()
        self.last = self._add(regular, self.first)
        self.start = self.closure([self.first], begin=True, end=False)

    def _node(self) -> int:
        if len(self.steps) >= self._most:
            _too_large()
        self.steps.append([])
        self.empty.append([])
        return len(self.steps) - 1

    def _add(self, regular: Regular, at: int) -> int:
        """Add an expression that begins at a node; return the node at which the expression ends."""
        self._parts -= 1
        if self._parts < 0:
            _too_large()
        match regular:
            case Set(ranges):
                after = self._node()
                self.steps[at].append((ranges, after))
                return after
            case Anchor(end):
                after = self._node()
                self.empty[at].append((after, end))
                return after
            case Join(items):
                for item in items:
                    at = self._add(item, at)
                return at
            case Union(options):
                after = self._node()
                for option in options:
                    begin = self._node()
                    self.empty[at].append((begin, None))
                    self.empty[self._add(option, begin)].append((after, None))
                return after
            case Times(item, least, most):
                for _ in range(least):
                    at = self._add(item, at)
                if most is None:
                    begin, after = self._node(), self._node()
                    self.empty[at].append((begin, None))
                    self.empty[begin].append((after, None))
                    self.empty[self._add(item, begin)].append((begin, None))
                    return after
                after = self._node()
                for _ in range(most - least):
                    self.empty[at].append((after, None))
                    at = self._add(item, at)
                self.empty[at].append((after, None))
                return after

    def closure(self, nodes: Iterable[int], *, begin: bool, end: bool) -> frozenset[int]:
        found, todo = set(nodes), list(nodes)
        while todo:
            for after, anchor in self.empty[todo.pop()]:
                if after not in found and (anchor is None or (end if anchor else begin)):
                    found.add(after)
                    todo.append(after)
        return frozenset(found)

    def after(self, nodes: frozenset[int], code: int) -> frozenset[int]:
        """Return the nodes reached by one more character, without nodes from which no text leads to a match."""
        found = [
            after
            for node in nodes
            for ranges, after in self.steps[node]
            if after in self._live and any(low <= code <= high for low, high in ranges)
        ]
        return self.closure(found, begin=False, end=False) & self._live

    def accepts(self, nodes: frozenset[int], *, begin: bool = False) -> bool:
        """Return whether the text that led to the nodes matches. begin: whether this text is empty."""
        return self.last in self.closure(nodes, begin=begin, end=True)

    def matches(self, text: str) -> bool:
        nodes = self.start
        for each in text:
            nodes = self.after(nodes, ord(each))
        return self.accepts(nodes, begin=not text)

    @cached_property
    def _live(self) -> frozenset[int]:
        """The nodes from which some text leads to a match if at least one character precedes."""
        before: list[list[int]] = [[] for _ in self.steps]
        for node, (steps, empty) in enumerate(zip(self.steps, self.empty, strict=True)):
            for after in [*(after for _, after in steps), *(after for after, anchor in empty if anchor is not False)]:
                before[after].append(node)
        found, todo = {self.last}, [self.last]
        while todo:
            for node in before[todo.pop()]:
                if node not in found:
                    found.add(node)
                    todo.append(node)
        return frozenset(found)


def disjoint(automata: Iterable[Positions], afford: Callable[[int], bool]) -> bool:
    """Return whether no text matches all expressions.

    afford  takes a number of further steps; returns whether the proof may take them. If not, the result is False.
    """
    several = list(automata)
    ranges = [of for each in several for steps in each.steps for of, _ in steps]
    ends = {end for of in ranges for low, high in of for end in (low, high + 1)}
    # The first character of each range that every edge contains or excludes as a whole.
    letters = [0, *(end for end in ends if end <= LAST)]
    first = tuple(each.start for each in several)
    if all(each.accepts(nodes, begin=True) for each, nodes in zip(several, first, strict=True)):
        return False
    seen, todo = {first}, [first]
    for subsets in todo:
        if not afford(len(letters)):
            return False
        for letter in letters:
            following = (each.after(nodes, letter) for each, nodes in zip(several, subsets, strict=True))
            reached = tuple(takewhile(bool, following))
            if len(reached) < len(several) or reached in seen:
                continue
            if all(each.accepts(nodes) for each, nodes in zip(several, reached, strict=True)):
                return False
            seen.add(reached)
            todo.append(reached)
    return True


def _deterministic(positions: Positions, most: int, *, minimal: bool) -> Automaton:
    start = positions.start
    # The start is a separate state, because its subset of nodes may recur later, where anchors at the beginning fail.
    numbers: dict[tuple[frozenset[int], bool], int] = {(start, True): 0}
    order = [(start, True)]
    edges: list[list[tuple[int, int, int]]] = []
    accepting: list[bool] = []
    work = 0
    for nodes, begin in order:
        ending = positions.closure(nodes, begin=begin, end=True)
        accepting.append(positions.last in ending)
        steps = [step for node in nodes for step in positions.steps[node]]
        bounds = sorted({low for ranges, _ in steps for low, _ in ranges} | {h + 1 for r, _ in steps for _, h in r})
        targets: list[set[int]] = [set() for _ in bounds]
        for ranges, after in steps:
            for low, high in ranges:
                first = bisect.bisect_left(bounds, low)
                last = bisect.bisect_left(bounds, high + 1)
                work += last - first + 1
                for at in range(first, last):
                    targets[at].add(after)
        work += len(ending) + len(steps)
        closed: dict[frozenset[int], int] = {}
        row: list[tuple[int, int, int]] = []
        for at, several in enumerate(targets):
            if not several:
                continue
            key = frozenset(several)
            if key not in closed:
                subset = (positions.closure(key, begin=False, end=False), False)
                work += len(subset[0])
                if subset not in numbers:
                    numbers[subset] = len(order)
                    order.append(subset)
                closed[key] = numbers[subset]
            row.append((bounds[at], bounds[at + 1] - 1, closed[key]))
        if work > most or len(order) > 4 * STATES:
            _too_large()
        edges.append(row)
    return _minimal(edges, accepting, merge=minimal)


def explored(
    start: State, following: Callable[[State], list[tuple[int, int, State]]], accepts: Callable[[State], bool]
) -> Automaton:
    """Return the automaton of the states reachable from `start`.

    following  returns a state's edges: first and last character, next state
    accepts    whether a text may end in a state
    """
    numbers, order = {start: 0}, [start]
    edges: list[list[tuple[int, int, int]]] = []
    for state in order:
        row = []
        for low, high, target in following(state):
            if target not in numbers:
                numbers[target] = len(order)
                order.append(target)
            row.append((low, high, numbers[target]))
        edges.append(sorted(row))
    return _minimal(edges, [accepts(state) for state in order])


def _product(one: Automaton, two: Automaton, accept: Callable[[bool, bool], bool]) -> Automaton:
    """Return the product of two automata: an automaton whose states are pairs of their states.

    accept  returns whether the product accepts a text, given whether `one` and `two` accept the text

    State -1 of `two` means that `two` has rejected the text. A difference then continues with `one` alone.
    """
    numbers = {(0, 0): 0}
    order = [(0, 0)]
    edges: list[list[tuple[int, int, int]]] = []
    accepting: list[bool] = []
    keep = accept(True, False)
    work = 0
    for a, b in order:
        accepting.append(accept(one.accepting[a], b >= 0 and two.accepting[b]))
        row: list[tuple[int, int, int]] = []
        others = two.edges[b] if b >= 0 else []
        starts = [low for low, _, _ in others]
        for low, high, target in one.edges[a]:
            at = low
            index = max(0, bisect.bisect_right(starts, low) - 1)
            while at <= high:
                while index < len(others) and others[index][1] < at:
                    index += 1
                work += 1
                if index < len(others) and others[index][0] <= at:
                    last, pair = min(high, others[index][1]), (target, others[index][2])
                else:
                    last = min(high, others[index][0] - 1) if index < len(others) else high
                    pair = (target, -1)
                if pair[1] >= 0 or keep:
                    if pair not in numbers:
                        numbers[pair] = len(order)
                        order.append(pair)
                    row.append((at, last, numbers[pair]))
                at = last + 1
        edges.append(row)
        if work > _WORK or len(order) > 4 * STATES:
            _too_large()
    return _minimal(edges, accepting)


def _minimal(
    edges: list[list[tuple[int, int, int]]], accepting: list[bool], states: int = STATES, *, merge: bool = True
) -> Automaton:
    """Remove states from which no accepting state is reachable; merge equivalent states by partition refinement.

    states  most states of the result
    merge   whether to merge states
    """
    before: list[list[int]] = [[] for _ in edges]
    for state, row in enumerate(edges):
        for _, _, target in row:
            before[target].append(state)
    live = {state for state, accepts in enumerate(accepting) if accepts}
    todo = list(live)
    while todo:
        for state in before[todo.pop()]:
            if state not in live:
                live.add(state)
                todo.append(state)
    order = sorted(live | {0})
    rows = {state: [edge for edge in edges[state] if edge[2] in live] for state in order}
    if not merge:
        return _renumbered(rows, {state: state for state in order}, accepting, states)
    groups = {state: int(accepting[state]) for state in order}
    count, work = len(set(groups.values())), 0
    while True:
        keys: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}
        refined = {}
        for state in order:
            joined: list[tuple[int, int, int]] = []
            for low, high, target in rows[state]:
                group = groups[target]
                if joined and joined[-1][2] == group and joined[-1][1] + 1 == low:
                    joined[-1] = (joined[-1][0], high, group)
                else:
                    joined.append((low, high, group))
            work += len(joined) + 1
            refined[state] = keys.setdefault((groups[state], tuple(joined)), len(keys))
        groups = refined
        if len(keys) == count:
            break
        if work > 5 * _WORK:  # merge no states: the result is larger, but correct
            groups = {state: number for number, state in enumerate(order)}
            break
        count = len(keys)
    return _renumbered(rows, groups, accepting, states)


def _renumbered(
    rows: dict[int, list[tuple[int, int, int]]], groups: dict[int, int], accepting: list[bool], states: int
) -> Automaton:
    one_of = {group: state for state, group in reversed(groups.items())}
    numbers, order = {groups[0]: 0}, [groups[0]]
    found: list[list[tuple[int, int, int]]] = []
    for group in order:
        row: list[tuple[int, int, int]] = []
        for low, high, target in rows[one_of[group]]:
            if groups[target] not in numbers:
                numbers[groups[target]] = len(order)
                order.append(groups[target])
            number = numbers[groups[target]]
            if row and row[-1][2] == number and row[-1][1] + 1 == low:
                row[-1] = (row[-1][0], high, number)
            else:
                row.append((low, high, number))
        found.append(row)
    if len(order) > states:
        _too_large()
    return Automaton(found, [accepting[one_of[group]] for group in order])


def text_of(text: str, spell: Callable[[Ranges], Expression]) -> Expression:
    """Return the expression of a text, each character as `spell` writes it; adjacent Texts become one Text."""
    items: list[Expression] = []
    for each in text:
        one = spell(((ord(each), ord(each)),))
        if isinstance(one, Text) and items and isinstance(items[-1], Text):
            items[-1] = Text(items[-1].text + one.text)
        else:
            items.append(one)
    return items[0] if len(items) == 1 else Sequence(tuple(items))


def plain(ranges: Ranges) -> Expression:
    """Return the expression of one character of a set, unescaped."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return Text(chr(ranges[0][0]))
    return Characters(ranges)


def _too_large() -> NoReturn:
    raise GrammarFailed("a pattern is too large for one automaton", code="grammar_too_large")
