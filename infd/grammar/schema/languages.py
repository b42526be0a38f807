"""Prove that no string matches several regular expressions, and match strings without backtracking.

A regular expression becomes a nondeterministic automaton; sets of its states are computed as a proof needs them. The
dialects of JSON Schema, of the engine and of Python differ in some classes of characters, as `\\d` and `.`. So each
expression has a narrow reading, which matches the strings that every dialect matches, and a wide reading, which matches
the strings that some dialect matches. A match in the narrow reading and a mismatch in the wide reading are certain.

Source: Thompson 1968, Regular Expression Search Algorithm.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

_LAST: Final = 0x10FFFF
_STATES: Final = 2000  # most states of an automaton
_DEPTH: Final = 64  # most levels of groups
_PROOF_STEPS: Final = 20_000  # most transitions of one proof; about 0.1 s
_ALL_STEPS: Final = 100_000  # most transitions of all proofs about one schema

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included, ascending and apart
_ANY: Final[Ranges] = ((0, _LAST),)


class _Unreadable(Exception):
    """An expression is outside of the common subset of the dialects, or too large."""


class Languages:
    """The languages of the regular expressions of one schema, with a bound on the time of all proofs."""

    def __init__(self) -> None:
        self._automata: dict[tuple[str, bool], _Automaton | None] = {}
        self._disjoint: dict[frozenset[str], bool] = {}
        self._steps = 0

    def matches(self, pattern: str, text: str) -> bool | None:
        """Return whether an expression matches somewhere in a text; None if uncertain."""
        for wide in (True, False):
            automaton = self._automaton(pattern, wide=wide)
            if automaton is None or len(text) > _PROOF_STEPS or self._spent(len(text)):
                return None
            if automaton.matches(text) != wide:
                return not wide
        return None

    def disjoint(self, patterns: Iterable[str]) -> bool:
        """Return whether no string matches all expressions; False if there is no proof."""
        known = frozenset(patterns)
        if known not in self._disjoint:
            self._disjoint[known] = self._proved_disjoint(known)
        return self._disjoint[known]

    def _proved_disjoint(self, patterns: frozenset[str]) -> bool:
        read = [self._automaton(pattern, wide=True) for pattern in sorted(patterns)]
        automata = [automaton for automaton in read if automaton is not None]  # unreadable patterns may match anything
        if not automata:
            return False
        letters = sorted(set().union(*(automaton.letters for automaton in automata)))
        first = tuple(automaton.start for automaton in automata)
        if all(automaton.accepts(state, empty=True) for automaton, state in zip(automata, first, strict=True)):
            return False
        seen, todo, steps = {first}, deque([first]), 0
        while todo:
            states = todo.popleft()
            steps += len(letters)
            if steps > _PROOF_STEPS or self._spent(len(letters)):
                return False
            for letter in letters:
                after = []
                for automaton, state in zip(automata, states, strict=True):
                    if not (follow := automaton.step(state, letter)):
                        break
                    after.append(follow)
                reached = tuple(after)
                if len(reached) < len(automata) or reached in seen:
                    continue
                if all(automaton.accepts(state) for automaton, state in zip(automata, reached, strict=True)):
                    return False
                seen.add(reached)
                todo.append(reached)
        return True

    def _automaton(self, pattern: str, *, wide: bool) -> _Automaton | None:
        if (pattern, wide) not in self._automata:
            try:
                self._automata[pattern, wide] = _Automaton(_Parser(pattern, wide=wide).expression())
            except _Unreadable:
                self._automata[pattern, wide] = None
        return self._automata[pattern, wide]

    def _spent(self, steps: int) -> bool:
        self._steps += steps
        return self._steps > _ALL_STEPS


def ascii_members(class_: str) -> frozenset[str] | None:
    """Return the ASCII characters of a class such as [a-z] in the narrow reading.

    Returns None if the class is unreadable, or if the readings differ in more than control characters.
    """
    found = []
    for wide in (False, True):
        try:
            expression = _Parser(class_, wide=wide).expression()
        except _Unreadable:
            return None
        match expression:
            case _Sequence((_Characters(ranges),)):
                found.append({chr(code) for low, high in ranges for code in range(low, min(high, 0x7F) + 1)})
            case _:
                return None
    narrow, wide_ = found
    return frozenset(narrow) if all(character < " " for character in wide_ - narrow) else None


# Expressions.


class _Characters(Struct, frozen=True):
    ranges: Ranges


class _Begin(Struct, frozen=True):
    pass


class _End(Struct, frozen=True):
    pass


class _Sequence(Struct, frozen=True):
    items: tuple[_Node, ...]


class _Alternatives(Struct, frozen=True):
    options: tuple[_Node, ...]


class _Repeated(Struct, frozen=True):
    item: _Node
    least: int
    most: int | None


_Node = _Characters | _Begin | _End | _Sequence | _Alternatives | _Repeated


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def _complement(ranges: Ranges) -> Ranges:
    edges = [-1, *itertools.chain.from_iterable((low, high) for low, high in ranges), _LAST + 1]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((low + 1, high - 1) for low, high in gaps if low + 1 <= high - 1)


class _Class(Struct, frozen=True):
    """Characters in both readings."""

    narrow: Ranges
    wide: Ranges

    def negated(self) -> _Class:
        return _Class(_complement(self.wide), _complement(self.narrow))


def _only(code: int) -> _Class:
    return _Class(((code, code),), ((code, code),))


_NOT_ASCII: Final = (0x80, _LAST)
_DIGITS: Final = ((0x30, 0x39),)
_WORD: Final = (*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Final = ((0x09, 0x0D), (0x20, 0x20))
_CLASSES: Final = {
    "d": _Class(_DIGITS, (*_DIGITS, _NOT_ASCII)),
    "w": _Class(_WORD, (*_WORD, _NOT_ASCII)),
    "s": _Class(_SPACES, ((0x09, 0x0D), (0x1C, 0x20), _NOT_ASCII)),
}
_DOT: Final = _Class(
    _complement(((0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029))), _complement(((0x0A, 0x0A),))
)
_CONTROL: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_ESCAPE: Final = re.compile(
    r"\\(?:([dDwWsS])|([tnvfr])|[pP]\{[A-Za-z_=]*\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|([^A-Za-z0-9\s]))"
)
_REPEATS: Final = re.compile(r"([*+?])|\{(\d{1,5})(,?)(\d{0,5})\}")


class _Parser:
    """A recursive-descent parser of the syntax that the dialects share."""

    def __init__(self, pattern: str, *, wide: bool) -> None:
        self._pattern = pattern
        self._wide = wide
        self._at = 0
        self._depth = 0

    def expression(self) -> _Node:
        node = self._alternatives()
        if self._at < len(self._pattern):
            self._fail()
        return node

    def _alternatives(self) -> _Node:
        options = [self._sequence()]
        while self._taken("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Alternatives(tuple(options))

    def _sequence(self) -> _Node:
        items: list[_Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            item = self._item()
            while (found := _REPEATS.match(self._pattern, self._at)) is not None:
                self._at = found.end()
                if self._taken("+"):  # possessive in some dialects
                    self._fail()
                self._taken("?")  # lazy: the same strings match
                item = self._repeated(item, found)
            items.append(item)
        return _Sequence(tuple(items))

    def _repeated(self, item: _Node, found: re.Match[str]) -> _Node:
        if isinstance(item, _Begin | _End | _Repeated):
            self._fail()
        if found[1]:
            return _Repeated(item, int(found[1] == "+"), 1 if found[1] == "?" else None)
        least = int(found[2])
        most = least if not found[3] else int(found[4]) if found[4] else None
        if most is not None and most < least:
            self._fail()
        return _Repeated(item, least, most)

    def _item(self) -> _Node:
        character = self._pattern[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            return self._characters(self._class())
        if character == "\\":
            return self._characters(self._escape())
        self._at += 1
        match character:
            case "^":
                return _Begin()
            case "$":
                return _End()
            case ".":
                return self._characters(_DOT)
            case "*" | "+" | "?" | "{":
                self._fail()
        return self._characters(ord(character))

    def _group(self) -> _Node:
        self._at += 1
        self._depth += 1
        if self._depth > _DEPTH or (self._taken("?") and not self._taken(":")):
            self._fail()
        node = self._alternatives()
        if not self._taken(")"):
            self._fail()
        self._depth -= 1
        return node

    def _class(self) -> _Class:
        self._at += 1
        negated = self._taken("^")
        members: list[_Class] = []
        while not self._taken("]"):
            member = self._member()
            if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._at += 1
                member = self._range(member, self._member())
            elif isinstance(member, int):
                member = _only(member)
            members.append(member)
        narrow = _merged(each for member in members for each in member.narrow)
        wide = _merged(each for member in members for each in member.wide)
        found = _Class(narrow, wide)
        if any(member.narrow and member.negated() in members for member in members):  # any character, as [\s\S]
            found = _Class(_ANY, _ANY)
        if not negated:
            return found
        found = found.negated()
        # `patterns.kept_pattern` removes U+0000 from negated classes.
        return _Class(found.narrow, _merged([(0, 0), *found.wide]))

    def _range(self, first: int | _Class, last: int | _Class) -> _Class:
        if isinstance(first, _Class) or isinstance(last, _Class) or first > last:
            self._fail()
        return _Class(((first, last),), ((first, last),))

    def _member(self) -> int | _Class:
        """Read a member of a class: a code point or several characters."""
        if self._at >= len(self._pattern):
            self._fail()
        if (character := self._pattern[self._at]) == "\\":
            return self._escape()
        if character == "[":
            self._fail()
        self._at += 1
        return ord(character)

    def _escape(self) -> int | _Class:
        found = _ESCAPE.match(self._pattern, self._at)
        if found is None:
            self._fail()
        self._at = found.end()
        of, control, two, four, itself = found.groups()
        if of:
            return _CLASSES[of] if of.islower() else _CLASSES[of.lower()].negated()
        if control:
            return _CONTROL[control]
        if itself:
            return ord(itself)
        if digits := two or four:
            if 0xD800 <= int(digits, 16) <= 0xDFFF:
                self._fail()
            return int(digits, 16)
        return _Class((), _ANY)  # a category of Unicode

    def _characters(self, of: int | _Class) -> _Node:
        if isinstance(of, int):
            of = _only(of)
        return _Characters(_merged(of.wide if self._wide else of.narrow))

    def _taken(self, character: str) -> bool:
        if self._pattern.startswith(character, self._at):
            self._at += 1
            return True
        return False

    def _fail(self) -> NoReturn:
        raise _Unreadable(self._pattern)


# Automata.


class _Automaton:
    """An automaton of the strings in which an expression matches somewhere.

    letters  one code point of each set of characters that all edges treat alike
    start    states before the first character
    """

    def __init__(self, expression: _Node) -> None:
        self._edges: list[list[tuple[Ranges, int]]] = []
        self._empty: list[list[int]] = []  # edges without a character
        self._at_begin: list[list[int]] = []  # edges taken only before the first character
        self._at_end: list[list[int]] = []  # edges taken only after the last character
        first = self._state()
        self._edges[first].append((_ANY, first))
        self._last = self._built(expression, first)
        self._edges[self._last].append((_ANY, self._last))
        ends = (end for edges in self._edges for ranges, _ in edges for low, high in ranges for end in (low, high + 1))
        self.letters = {0, *(end for end in ends if end <= _LAST)}
        self._useful = self._leading_to_the_end()
        self.start = self._closed([first], begin=True, end=False)

    def matches(self, text: str) -> bool:
        states = self.start
        for character in text:
            states = self.step(states, ord(character))
        return self.accepts(states, empty=not text)

    def step(self, states: frozenset[int], code: int) -> frozenset[int]:
        """Return the states after a character, without states from which no match follows."""
        after = [
            target
            for state in states
            for ranges, target in self._edges[state]
            if any(low <= code <= high for low, high in ranges)
        ]
        return self._closed(after, begin=False, end=False) & self._useful

    def accepts(self, states: frozenset[int], *, empty: bool = False) -> bool:
        """Return whether the text that led to the states matches. empty: whether the text is empty."""
        return self._last in self._closed(states, begin=empty, end=True)

    def _closed(self, states: Iterable[int], *, begin: bool, end: bool) -> frozenset[int]:
        """Return the states, and the states that they reach by edges without characters."""
        found = set(states)
        todo = list(found)
        while todo:
            state = todo.pop()
            for target in (
                *self._empty[state],
                *(self._at_begin[state] if begin else ()),
                *(self._at_end[state] if end else ()),
            ):
                if target not in found:
                    found.add(target)
                    todo.append(target)
        return frozenset(found)

    def _leading_to_the_end(self) -> frozenset[int]:
        """Return the states from which some text, after a first character, leads to a match."""
        sources: list[list[int]] = [[] for _ in self._edges]
        for state in range(len(self._edges)):
            for target in (*self._empty[state], *self._at_end[state], *(t for _, t in self._edges[state])):
                sources[target].append(state)
        found = {self._last}
        todo = [self._last]
        while todo:
            for source in sources[todo.pop()]:
                if source not in found:
                    found.add(source)
                    todo.append(source)
        return frozenset(found)

    def _state(self) -> int:
        if len(self._edges) >= _STATES:
            raise _Unreadable("too many states")
        for edges in (self._edges, self._empty, self._at_begin, self._at_end):
            edges.append([])
        return len(self._edges) - 1

    def _built(self, node: _Node, state: int) -> int:
        """Add an expression that begins in a state; return the state in which it ends."""
        match node:
            case _Characters(ranges):
                end = self._state()
                self._edges[state].append((ranges, end))
            case _Begin():
                end = self._state()
                self._at_begin[state].append(end)
            case _End():
                end = self._state()
                self._at_end[state].append(end)
            case _Sequence(items):
                end = state
                for item in items:
                    end = self._built(item, end)
            case _Alternatives(options):
                ends = []
                for option in options:
                    begin = self._state()
                    self._empty[state].append(begin)
                    ends.append(self._built(option, begin))
                end = self._state()
                for each in ends:
                    self._empty[each].append(end)
            case _Repeated(item, least, most):
                end = self._repeated(item, least, most, state)
        return end

    def _repeated(self, item: _Node, least: int, most: int | None, state: int) -> int:
        for _ in range(least):
            state = self._built(item, state)
        if most is None:
            begin, end = self._state(), self._state()
            self._empty[state] += [begin, end]
            last = self._built(item, begin)
            self._empty[last] += [begin, end]
            return end
        end = self._state()
        self._empty[state].append(end)
        for _ in range(most - least):
            begin = self._state()
            self._empty[state].append(begin)
            state = self._built(item, begin)
            self._empty[state].append(end)
        return end
