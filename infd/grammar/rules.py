"""The rules of a context-free grammar over characters and tokens, from which each engine writes its own grammar.

Rules are a dict from name to expression; ROOT is the first name. Pattern, Document, Until, Without and Lacking are the
whole body of a rule, so that an engine with a lexer can make the rule a terminal. A reference to a name without a rule
refers to another grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT: Final = "root"
LAST: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint ranges of code points, both ends included, without surrogates


class Characters(Struct, frozen=True):
    """Any one character of a set."""

    ranges: Ranges


class Text(Struct, frozen=True):
    text: str


class Token(Struct, frozen=True):
    """The token with this id; text never matches the token."""

    number: int


class Reference(Struct, frozen=True):
    """A reference to a rule by its name."""

    name: str


class Sequence(Struct, frozen=True):
    items: tuple[Expression, ...]


class Alternatives(Struct, frozen=True):
    options: tuple[Expression, ...]


class Repeated(Struct, frozen=True):
    """A repeated expression. most: None means without bound."""

    item: Expression
    least: int
    most: int | None


class Pattern(Struct, frozen=True):
    """A text that matches a regular expression of Rust's regex crate."""

    pattern: str


class Document(Struct, frozen=True):
    """A JSON document that `schema` accepts. The schema is already rewritten for the engine."""

    schema: Any


class Until(Struct, frozen=True):
    """Any text that ends with `mark`, a member of `marks`, and contains no other occurrence of any of `marks`.

    within  patterns that the text before the mark matches
    """

    mark: str
    marks: tuple[str, ...]
    within: tuple[str, ...] = ()


class Without(Struct, frozen=True):
    """Any text that contains none of the marks, and matches the patterns `within`."""

    marks: tuple[str, ...]
    within: tuple[str, ...] = ()


class Lacking(Struct, frozen=True):
    """The texts of the rule `name` that contain none of the marks."""

    name: str
    marks: tuple[str, ...]


Leaf = Characters | Text | Token | Reference | Pattern | Document | Until | Without | Lacking
Expression = Leaf | Sequence | Alternatives | Repeated
Rules = dict[str, Expression]
EMPTY: Final = Sequence(())
_LETTERS: Final = (Characters, Text)  # most parts of a large grammar


def ranges_of(pairs: list[tuple[int, int]]) -> Ranges:
    """Return ranges sorted and joined, without surrogates, because UTF-8 cannot encode surrogates."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    first, last = _SURROGATES
    found = []
    for low, high in joined:
        found += [(a, b) for a, b in ((low, min(high, first - 1)), (max(low, last + 1), high)) if a <= b]
    return tuple(found)


def opposite(ranges: Ranges) -> Ranges:
    """Return the ranges of all characters outside of `ranges`."""
    found, at = [], 0
    for low, high in ranges:
        if at < low:
            found.append((at, low - 1))
        at = high + 1
    if at <= LAST:
        found.append((at, LAST))
    return ranges_of(found)


def common(one: Ranges, two: Ranges) -> Ranges:
    """Return the ranges of the characters of both."""
    return opposite(ranges_of([*opposite(one), *opposite(two)]))


ANY: Final = opposite(())


def children(expression: Expression) -> tuple[Expression, ...]:
    """Return the expressions directly inside an expression."""
    match expression:
        case Sequence(items) | Alternatives(items):
            return items
        case Repeated(item):
            return (item,)
    return ()


def sequence(items: Iterable[Expression]) -> Expression:
    """Return the sequence of items, without empty ones; one item alone is no sequence."""
    found = tuple(item for item in items if item != EMPTY)
    return found[0] if len(found) == 1 else Sequence(found)


def alternatives(options: Iterable[Expression]) -> Expression:
    """Return the alternatives of options: without nesting, and with all single characters in one set.

    llguidance 1.9 fails on some nested alternatives of overlapping sets, such as `([b-cé]|[è-é]|a)|[è-é]`.
    """
    found: list[Expression] = []
    pairs: list[tuple[int, int]] = []
    at, members = 0, 0
    todo = [*options][::-1]
    while todo:
        match todo.pop():
            case Alternatives(inner):
                todo += reversed(inner)
                continue
            case Characters(ranges):
                pairs += ranges
            case Text(text) if len(text) == 1:
                pairs.append((ord(text), ord(text)))
            case option:
                found.append(option)
                continue
        at = at if members else len(found)
        members += 1
    if members:
        found.insert(at, Characters(ranges_of(pairs)))
    return found[0] if len(found) == 1 else Alternatives(tuple(found))


def references(expression: Expression) -> Iterator[str]:
    """Yield the names of the rules to which an expression refers."""
    todo = [expression]
    while todo:
        current = todo.pop()
        if isinstance(current, Reference):
            yield current.name
        elif not isinstance(current, _LETTERS):
            todo += children(current)


def renamed(rules: Rules, names: dict[str, str]) -> Rules:
    """Return rules renamed by `names`: old name -> new name; other rules keep their names."""
    return {names.get(name, name): _renamed(expression, names) for name, expression in rules.items()}


def _renamed(expression: Expression, names: dict[str, str]) -> Expression:
    match expression:
        case Reference(name):
            return Reference(names.get(name, name))
        case Sequence(items):
            return Sequence(tuple(_renamed(item, names) for item in items))
        case Alternatives(options):
            return Alternatives(tuple(_renamed(option, names) for option in options))
        case Repeated(item, least, most):
            return Repeated(_renamed(item, names), least, most)
    return expression


def recursive(rules: Rules) -> frozenset[str]:
    """Return the names of the rules that refer to themselves, or to recursive rules, directly or through others.

    Repeatedly removes a rule that refers to no remaining rule; the recursive rules remain.
    """
    users: dict[str, list[str]] = {name: [] for name in rules}
    left = {}
    for name, expression in rules.items():
        used = list(references(expression))
        left[name] = len(used)
        for each in used:
            users[each].append(name)
    leaves = [name for name, number in left.items() if not number]
    for leaf in leaves:
        for user in users[leaf]:
            left[user] -= 1
            if not left[user]:
                leaves.append(user)
    return frozenset(name for name, number in left.items() if number)


def trimmed(rules: Rules) -> Rules | None:
    """Return the rules reachable from ROOT, without alternatives that derive no text; None if ROOT derives no text."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, expression in rules.items():
        for used in set(references(expression)):
            users[used].append(name)
    ending: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in ending and _ends(rules[name], ending):
            ending.add(name)
            todo += users[name]
    if ROOT not in ending:
        return None
    kept: Rules = {}
    names = [ROOT]
    while names:
        if (name := names.pop()) not in kept:
            kept[name] = _trimmed(rules[name], ending)
            names += references(kept[name])
    return kept


def begins(rules: Rules, character: int) -> bool:
    """Return whether some text that the rules derive begins with this character."""
    empty = nullable(rules)
    reached: set[str] = set()
    todo: list[Expression] = [rules[ROOT]]
    while todo:
        match todo.pop():
            case Characters(ranges):
                if any(low <= character <= high for low, high in ranges):
                    return True
            case Text(text):
                if text and ord(text[0]) == character:
                    return True
            case Reference(name):
                if name not in reached:
                    reached.add(name)
                    todo.append(rules[name])
            case Sequence(items):
                for item in items:
                    todo.append(item)
                    if not derives_empty(item, empty):
                        break
            case Alternatives(options):
                todo += options
            case Repeated(item, _, most):
                todo += [item] if most != 0 else []
    return False


def _ends(expression: Expression, ending: set[str]) -> bool:
    match expression:
        case Characters(ranges):
            return bool(ranges)
        case Reference(name):
            return name in ending
        case Sequence(items):
            return all(_ends(item, ending) for item in items)
        case Alternatives(options):
            return any(_ends(option, ending) for option in options)
        case Repeated(item, least):
            return not least or _ends(item, ending)
    return True


def _trimmed(expression: Expression, ending: set[str]) -> Expression:
    match expression:
        case Sequence(items):
            return Sequence(tuple(_trimmed(item, ending) for item in items))
        case Alternatives(options):
            return Alternatives(tuple(_trimmed(option, ending) for option in options if _ends(option, ending)))
        case Repeated(item, least, most):
            return Repeated(_trimmed(item, ending), least, most) if most != 0 and _ends(item, ending) else EMPTY
    return expression


def nullable(rules: Rules) -> set[str]:
    """Return the names of the rules that derive the empty text."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, expression in rules.items():
        for used in set(references(expression)):
            users[used].append(name)
    found: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in found and derives_empty(rules[name], found):
            found.add(name)
            todo += users[name]
    return found


def derives_empty(expression: Expression, empty: set[str]) -> bool:
    """Return whether an expression derives the empty text. empty: names of the rules that do."""
    match expression:
        case Characters() | Token():
            return False
        case Text(text):
            return not text
        case Reference(name):
            return name in empty
        case Sequence(items):
            return all(derives_empty(item, empty) for item in items)
        case Alternatives(options):
            return any(derives_empty(option, empty) for option in options)
        case Repeated(item, least):
            return not least or derives_empty(item, empty)
    raise AssertionError(f"{expression} is not written as characters")
