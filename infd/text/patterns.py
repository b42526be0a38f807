"""Regular expressions of a checkpoint, matched in bounded time.

A pattern is compiled to a small program, whose threads advance through the text together, in the order in which a
backtracking search would try them (Pike's algorithm). Matching at one place takes at most two steps for each
instruction of the program and character of the text, whatever the pattern; every step is counted. A search also returns
whether further text could change its result.

Look-arounds, references to groups, atomic groups and flags are refused.
"""

from __future__ import annotations

import re
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as syntax  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_INSTRUCTIONS: Final = 256  # maximum instructions of a program
_PATTERN_CHARACTERS: Final = 2048

_CHARACTER, _SPLIT, _JUMP, _SAVE, _AT, _MATCH = range(6)  # first elements of instructions
_CATEGORIES: Final[dict[Any, Callable[[str], bool]]] = {
    codes.CATEGORY_DIGIT: str.isdecimal,
    codes.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    codes.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    codes.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
}


class Refused(ValueError):
    """A pattern that cannot be matched in bounded time, or that is no regular expression."""


class Exhausted(Exception):
    """The steps granted are used up."""


class Found(NamedTuple):
    """The result of a search. groups: the named groups that took part in the match.

    decided  whether no further text can change the result; if not, a match may begin at `start` or later
    """

    start: int
    end: int
    groups: dict[str, str]
    decided: bool


class Steps:
    """The number of steps that searches may still take."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Pattern:
    """A compiled pattern, in which a dot matches every character.

    beginning  regular expression, at most two characters long, of the beginning of every match that begins with a
               character rather than an anchor; empty: every match begins with an anchor. Used if `begins_plainly`.
    """

    def __init__(self, pattern: str) -> None:
        """Raises Refused."""
        if len(pattern) > _PATTERN_CHARACTERS:
            raise Refused("a pattern of more than 2,048 characters")
        try:
            parsed = syntax.parse(pattern, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise Refused(f"the pattern {pattern!r}: {error}") from error
        if parsed.state.flags & ~(re.DOTALL | re.UNICODE):
            raise Refused("flags within a pattern")
        self.groups: dict[str, int] = dict(parsed.state.groupdict)
        self._program: list[tuple[Any, ...]] = []
        try:
            self._write(parsed)
        except RecursionError as error:
            raise Refused("a pattern of groups within groups") from error
        self._add(_MATCH)
        beginnings, self._anywhere, anchors = self._first()
        self._edges = bool(anchors)
        self._begins = re.compile("|".join(beginnings)) if beginnings and not self._anywhere else None
        newline = [r"\n\Z"] if codes.AT_END in anchors else []  # $ may precede the last newline
        self.beginning = "|".join([*beginnings, *newline])

    @classmethod
    def of(cls, literals: Sequence[str]) -> Pattern:
        """Return the pattern of several texts, of which the longest matches."""
        return cls("|".join(map(re.escape, sorted(literals, key=len, reverse=True))))

    @property
    def begins_plainly(self) -> bool:
        """Whether a match begins with one of a few characters, or at the beginning or end of the text."""
        return not self._anywhere

    def search(
        self, text: str, at: int, steps: Steps, *, ended: bool, begun: bool = True, most: int | None = None
    ) -> Found | None:
        """Return the first match at or after `at`, or the first place where further text may complete a match.

        ended  whether no text follows
        begun  whether the text's first character is the first of the whole text
        most   maximum characters of a match; None: no limit

        Raises Exhausted.
        """
        for start in self._places(text, at, ended=ended):
            found = self._match(text, start, steps, ended=ended, begun=begun, most=most)
            if found is not None:
                return found
        return None

    def _places(self, text: str, at: int, *, ended: bool) -> Iterator[int]:
        """Yield the places at which a match may begin."""
        if self._anywhere:
            yield from range(at, len(text) + 1)
            return
        if self._edges and at == 0:
            yield 0
        last = len(text) - 1
        if self._begins is not None:
            for found in self._begins.finditer(text, at):
                if not (self._edges and found.start() in (0, last)):
                    yield found.start()
        if self._edges:
            yield from (place for place in (last, last + 1) if place >= at and place > 0)

    def _match(
        self, text: str, start: int, steps: Steps, *, ended: bool, begun: bool, most: int | None
    ) -> Found | None:
        program, length = self._program, len(text)
        until = length if most is None else min(length, start + most)
        best: tuple[int, tuple[tuple[int, int], ...]] | None = None
        undecided = False
        visited: set[int] = set()

        def follow(threads: list[tuple[int, Any]], counter: int, place: int, saved: Any) -> None:
            """Add a thread, and those to which it splits, to `threads`."""
            nonlocal undecided
            stack = [(counter, saved)]
            while stack:
                counter, saved = stack.pop()
                if counter in visited:
                    continue
                visited.add(counter)
                steps.left -= 1
                match program[counter]:
                    case (0 | 5, *_):  # _CHARACTER, _MATCH
                        threads.append((counter, saved))
                    case (1, first, second):  # _SPLIT
                        stack += [(second, saved), (first, saved)]
                    case (2, target):  # _JUMP
                        stack.append((target, saved))
                    case (3, number):  # _SAVE
                        stack.append((counter + 1, (*saved, (number, place))))
                    case (4, kind):  # _AT
                        holds = _holds(kind, text, place, ended=ended, begun=begun)
                        if holds is None:
                            undecided = True
                        elif holds:
                            stack.append((counter + 1, saved))

        threads: list[tuple[int, Any]] = []
        follow(threads, 0, start, ())
        place = start
        while threads:
            if steps.left < 0:
                raise Exhausted
            following: list[tuple[int, Any]] = []
            visited = set()
            for counter, saved in threads:
                steps.left -= 1
                instruction = program[counter]
                if instruction[0] == _MATCH:
                    best = (place, saved)
                    break
                if place < until:
                    if instruction[1](text[place]):
                        follow(following, counter + 1, place + 1, saved)
                elif until == length and not ended:
                    undecided = True
            threads = following
            place += 1
        if best is None:
            return Found(start, start, {}, decided=False) if undecided else None
        end, saved = best
        spans = dict(saved)
        groups = {
            name: text[spans[2 * number] : spans[2 * number + 1]]
            for name, number in self.groups.items()
            if 2 * number + 1 in spans
        }
        return Found(start, end, groups, decided=not undecided)

    def _add(self, *instruction: Any) -> int:
        if len(self._program) == _INSTRUCTIONS:
            raise Refused("a pattern of more than 256 items")
        self._program.append(instruction)
        return len(self._program) - 1

    def _write(self, parsed: Any) -> None:
        """Append the instructions of a sequence of items."""
        for code, argument in parsed:
            if code is codes.SUBPATTERN:
                number, added, removed, inner = argument
                if added or removed:
                    raise Refused("flags within a pattern")
                if number is not None:
                    self._add(_SAVE, 2 * number)
                self._write(inner)
                if number is not None:
                    self._add(_SAVE, 2 * number + 1)
            elif code is codes.BRANCH:
                self._branch(argument[1])
            elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
                self._repeat(*argument, lazy=code is codes.MIN_REPEAT)
            elif code is codes.AT:
                if argument not in _EDGES:
                    raise Refused("anchors other than ^, $, \\A, \\Z, \\b and \\B")
                self._add(_AT, argument)
            else:
                self._add(_CHARACTER, _test(code, argument), _literal(code, argument))

    def _branch(self, alternatives: Sequence[Any]) -> None:
        ends = []
        for alternative in alternatives[:-1]:
            split = self._add(_SPLIT, 0, 0)
            self._write(alternative)
            ends.append(self._add(_JUMP, 0))
            self._program[split] = (_SPLIT, split + 1, len(self._program))
        self._write(alternatives[-1])
        for end in ends:
            self._program[end] = (_JUMP, len(self._program))

    def _repeat(self, least: int, most: Any, inner: Any, *, lazy: bool) -> None:
        if least > _INSTRUCTIONS or (most is not codes.MAXREPEAT and most > _INSTRUCTIONS):
            raise Refused("a pattern that repeats an item more than 256 times")
        for _ in range(least):
            before = len(self._program)
            self._write(inner)
            if len(self._program) == before:
                return  # nothing, however often repeated; nested repeats of nothing would take exponential time
        splits = []
        for _ in range(1 if most is codes.MAXREPEAT else most - least):
            splits.append(self._add(_SPLIT, 0, 0))
            self._write(inner)
        if most is codes.MAXREPEAT:
            self._add(_JUMP, splits[0])
        for split in splits:
            ways = (split + 1, len(self._program))
            self._program[split] = (_SPLIT, *(reversed(ways) if lazy else ways))

    def _reached(self, counter: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield the items, with their places, that a thread reaches before a character or an anchor."""
        stack, visited = [counter], set()
        while stack:
            counter = stack.pop()
            if counter in visited:
                continue
            visited.add(counter)
            instruction = self._program[counter]
            match instruction:
                case (1, first, second):  # _SPLIT
                    stack += [first, second]
                case (2, target):  # _JUMP
                    stack.append(target)
                case (3, _):  # _SAVE
                    stack.append(counter + 1)
                case _:
                    yield counter, instruction

    def _first(self) -> tuple[list[str], bool, set[Any]]:
        """Return expressions of the beginnings of matches, whether any character may begin one, and initial anchors.

        An expression is a character, and the characters that may follow it if only some may.
        """
        following: dict[str, set[str] | None] = {}
        anywhere, anchors = False, set()
        for counter, instruction in self._reached(0):
            match instruction:
                case (0, _, str(literal)):  # _CHARACTER
                    seconds: set[str] | None = following.setdefault(literal, set())
                    for _, item in self._reached(counter + 1):
                        second = item[2] if item[0] == _CHARACTER else None
                        seconds = None if seconds is None or second is None else seconds | {second}
                    following[literal] = seconds
                case (4, kind):  # _AT
                    anywhere |= kind in (codes.AT_BOUNDARY, codes.AT_NON_BOUNDARY)
                    anchors.add(kind)
                case _:
                    anywhere = True
        found = []
        for literal, after in sorted(following.items()):
            then = "" if after is None else f"(?=[{''.join(map(re.escape, sorted(after)))}]|\\Z)"
            found.append(re.escape(literal) + then)
        return found, anywhere, anchors

    def literals(self) -> list[str]:
        """Return the maximal runs of literal characters in the pattern."""
        found, run = [], ""
        for instruction in [*self._program, (_MATCH,)]:
            literal = instruction[2] if instruction[0] == _CHARACTER else None
            if literal is None:
                found += [run] if run else []
                run = ""
            else:
                run += literal
        return found


_EDGES: Final = frozenset(
    {
        *(codes.AT_BEGINNING, codes.AT_BEGINNING_STRING, codes.AT_END, codes.AT_END_STRING),
        *(codes.AT_BOUNDARY, codes.AT_NON_BOUNDARY),
    }
)


def _holds(kind: Any, text: str, place: int, *, ended: bool, begun: bool) -> bool | None:
    """Return whether an anchor matches at a place; None if that depends on further text."""
    length = len(text)
    if kind in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
        return begun and place == 0
    if kind is codes.AT_END_STRING:
        return place == length and (ended or None)
    if kind is codes.AT_END:
        last = place == length or (place == length - 1 and text[place] == "\n")
        return last and (ended or None)
    if place == length and not ended:
        return None
    word = _CATEGORIES[codes.CATEGORY_WORD]
    boundary = (place > 0 and word(text[place - 1])) != (place < length and word(text[place]))
    return boundary == (kind is codes.AT_BOUNDARY)


def _literal(code: Any, argument: Any) -> str | None:
    return chr(argument) if code is codes.LITERAL else None


def _test(code: Any, argument: Any) -> Callable[[str], bool]:
    """Return the function that tells whether an item matches a character."""
    if code is codes.LITERAL:
        return chr(argument).__eq__
    if code is codes.NOT_LITERAL:
        return chr(argument).__ne__
    if code is codes.ANY:  # a dot matches newlines too, see Pattern
        return bool
    if code is codes.IN:
        negated = argument[0][0] is codes.NEGATE
        tests = [_part(*each) for each in argument if each[0] is not codes.NEGATE]
        return lambda character: any(test(character) for test in tests) != negated
    raise Refused("look-arounds, references to groups and atomic groups")


def _part(code: Any, argument: Any) -> Callable[[str], bool]:
    """Return the function that tells whether a part of a class matches a character."""
    if code is codes.RANGE:
        low, high = chr(argument[0]), chr(argument[1])
        return lambda character: low <= character <= high
    if code is codes.CATEGORY:
        return _CATEGORIES[argument]
    return _test(code, argument)
