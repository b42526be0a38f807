"""The shortest end of a cut text, by a parser of rules that shares no code with an engine.

At each position the parser keeps items: symbols that may follow, within a use of the symbol that they complete. A use
keeps the items that follow it, so the shortest end is a shortest path from the items at the cut to the end of the root.
A symbol that ends another symbol shares its use: then rules that end with themselves, as those of automata do, take no
more time for each character as the text grows.
Source: Scott and Johnstone 2010, GLL Parsing, without the trees.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from itertools import count
from typing import TYPE_CHECKING

from infd.grammar.rules import ROOT, Alternatives, Characters, Reference, Repeated, Sequence, Text, children, references

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from infd.grammar.rules import Expression, Ranges, Rules

PREFERRED = tuple(map(ord, 'a0"}]>)A1 -'))  # that make an end easy to read


class Symbol:
    """A character of a set, alternatives, or a repeated symbol: one of `ranges`, `options` and `item` is set.

    shortest  its shortest text; None if it has none
    """

    __slots__ = ("expression", "item", "least", "less", "most", "options", "ranges", "shortest")

    def __init__(self, shortest: bytes | None) -> None:
        self.shortest = shortest
        self.ranges: Ranges | None = None
        self.options: list[Rest] | None = None
        self.expression: Expression | None = None  # of alternatives without `options` yet
        self.item: Symbol | None = None
        self.least = 0
        self.most: int | None = None
        self.less: Symbol | None = None  # the same item, once less

    def matches(self, codes: set[int]) -> bool:
        assert self.ranges is not None
        return any(low <= code <= high for low, high in self.ranges for code in codes)


class Following:
    """A symbol and the symbols after it."""

    __slots__ = ("after", "shortest", "symbol")

    def __init__(self, symbol: Symbol, after: Rest) -> None:
        self.symbol = symbol
        self.after = after
        ends = symbol.shortest, b"" if after is None else after.shortest
        self.shortest: bytes | None = None if ends[0] is None or ends[1] is None else ends[0] + ends[1]


class Use:
    """A symbol that begins at a position. The use without `followed` is the whole text."""

    __slots__ = ("done", "followed", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self.followed: dict[Item, None] = {}
        self.done = False  # whether it may also end where it begins


Rest = Following | None
Item = tuple[Rest, Use]


class ShortestEnd:
    """Finds ends of texts of rules, whose expressions are characters, texts, references and what is made of these."""

    def __init__(self, rules: Rules, *, shares: bool = True) -> None:
        """Read the rules. shares: whether a symbol that ends another symbol shares its use."""
        self._rules = rules
        self._shares = shares
        self._texts = shortest_texts(rules)
        self._made: dict[object, Symbol] = {}
        self._rests: dict[tuple[Symbol, Rest], Following] = {}
        self._bounds = sorted({0, *_bounds(rules)})  # the first character of each set that the rules tell apart
        self.root = self._expanded(Reference(ROOT), None)

    def of(self, cut: bytes) -> bytes | None:
        """Return the fewest bytes that complete a text; None if no text of the rules begins with `cut`."""
        return min((path + end for path, _, end in self.begun(cut)), key=len, default=None)

    def begun(self, cut: bytes) -> list[tuple[bytes, list[Item], bytes]]:
        """Return the ways to complete the last character of `cut`: its other bytes, the items after, a shortest end."""
        text = cut.decode(errors="ignore")
        partial = cut[len(text.encode()) :]  # of a character
        if text.encode() + partial != cut or len(partial) > 3:
            return []
        items = self.started()
        for position, character in enumerate(text, 1):
            items = self.after(items, {ord(character)}, position)
        if not partial:
            ways = [(b"", items)]
        else:
            allowed = (pair for rest, _ in items for pair in (rest.symbol.ranges if rest is not None else None) or ())
            codes = beginning(partial, allowed)
            ways = [(chr(code).encode()[len(partial) :], self.after(items, {code}, len(text) + 1)) for code in codes]
        return [(path, after, end) for path, after in ways if (end := _nearest(after)) is not None]

    def following(self, items: list[Item], position: int) -> Iterator[tuple[bytes, list[Item], bytes]]:
        """Yield characters that may follow, one of each set that the rules tell apart; the items after; their end.

        position  a number greater than that of every earlier call, and than the characters of the text
        """
        for code in self._apart(items):
            after = self.after(items, {code}, position)
            if (end := _nearest(after)) is not None:
                yield chr(code).encode(), after, end

    def _apart(self, items: list[Item]) -> list[int]:
        """Return one character of each set that may follow and that the rules tell apart."""
        found: dict[int, None] = {}
        for rest, _ in items:
            for low, high in (rest.symbol.ranges if rest is not None else None) or ():
                first = bisect_right(self._bounds, low) - 1
                while first < len(self._bounds) and self._bounds[first] <= high:
                    found[self._bounds[first]] = None
                    first += 1
        return list(found)

    def started(self) -> list[Item]:
        """Return the items of the empty text."""
        return self._closed([(self.root, Use(0))], 0)

    def after(self, items: list[Item], codes: set[int], position: int) -> list[Item]:
        """Return the items after one of some characters.

        position  a number greater than that of every earlier call, and than the characters of the text
        """
        following = [(rest.after, use) for rest, use in items if rest is not None and rest.symbol.matches(codes)]
        return self._closed(following, position)

    def _closed(self, items: Iterable[Item], position: int) -> list[Item]:
        """Return the items that begin with a character, or end the whole text, of those to which items lead."""
        todo = list(items)
        known = set(todo)
        found: list[Item] = []
        uses: dict[Symbol, Use] = {}

        def add(rest: Rest, use: Use) -> None:
            if (rest, use) not in known:
                known.add((rest, use))
                todo.append((rest, use))

        while todo:
            rest, use = item = todo.pop()
            if rest is None:
                use.done = use.position == position
                for following, within in use.followed:
                    add(following, within)
                if not use.followed:
                    found.append(item)
            elif (symbol := rest.symbol).ranges is not None:
                found.append(item)
            elif symbol.item is not None:
                if not symbol.least:
                    add(rest.after, use)
                if symbol.most != 0:
                    add(self._rest(symbol.item, self._rest(self.less(symbol), rest.after)), use)
            elif rest.after is None and self._shares:
                for option in self.options(symbol):
                    add(option, use)
            else:
                within = uses.setdefault(symbol, Use(position))
                first = not within.followed
                within.followed[rest.after, use] = None
                if within.done:
                    add(rest.after, use)
                if first:
                    for option in self.options(symbol):
                        add(option, within)
        return found

    # Symbols.

    def _rest(self, symbol: Symbol, after: Rest) -> Following:
        if (found := self._rests.get((symbol, after))) is None:
            found = self._rests[symbol, after] = Following(symbol, after)
        return found

    def _expanded(self, expression: Expression, after: Rest) -> Rest:
        """Return the symbols of an expression and those after it."""
        match expression:
            case Sequence(items):
                for item in reversed(items):
                    after = self._expanded(item, after)
                return after
            case Text(text):
                for character in reversed(text):
                    after = self._rest(self._character(((ord(character), ord(character)),)), after)
                return after
        return self._rest(self._symbol(expression), after)

    def _symbol(self, expression: Expression) -> Symbol:
        match expression:
            case Characters(ranges):
                return self._character(ranges)
            case Reference(name):
                return self._alternatives(name, self._rules[name])
            case Repeated(item, least, most):
                return self._repeated(self._symbol(item), least, most)
        return self._alternatives(id(expression), expression)

    def _character(self, ranges: Ranges) -> Symbol:
        if (found := self._made.get(ranges)) is None:
            found = self._made[ranges] = Symbol(_readable(ranges))
            found.ranges = ranges
        return found

    def _alternatives(self, key: object, expression: Expression) -> Symbol:
        if (found := self._made.get(key)) is None:
            found = self._made[key] = Symbol(_shortest(expression, self._texts))
            found.expression = expression
        return found

    def _repeated(self, item: Symbol, least: int, most: int | None) -> Symbol:
        key = item, least, most
        if (found := self._made.get(key)) is None:
            shortest = b"" if not least else None if item.shortest is None else item.shortest * least
            found = self._made[key] = Symbol(shortest)
            found.item, found.least, found.most = item, least, most
        return found

    def less(self, symbol: Symbol) -> Symbol:
        """Return the symbol of the same item, repeated once less."""
        if symbol.less is None:
            assert symbol.item is not None
            most = None if symbol.most is None else symbol.most - 1
            symbol.less = self._repeated(symbol.item, max(0, symbol.least - 1), most)
        return symbol.less

    def options(self, symbol: Symbol) -> list[Rest]:
        """Return the alternatives of a symbol."""
        if symbol.options is None:
            expression = symbol.expression
            assert expression is not None
            options = expression.options if isinstance(expression, Alternatives) else (expression,)
            symbol.options = [self._expanded(option, None) for option in options]
        return symbol.options


def _bounds(rules: Rules) -> Iterator[int]:
    todo = list(rules.values())
    while todo:
        match current := todo.pop():
            case Characters(ranges):
                yield from (bound for low, high in ranges for bound in (low, high + 1))
            case Text(text):
                yield from (ord(character) + more for character in text for more in (0, 1))
        todo += children(current)


def shortest_texts(rules: Rules) -> dict[str, bytes]:
    """Return a shortest text of each rule that derives one."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, expression in rules.items():
        for used in set(references(expression)):
            users[used].append(name)
    found: dict[str, bytes] = {}
    todo = dict.fromkeys(rules)
    while todo:
        name, _ = todo.popitem()
        text = _shortest(rules[name], found)
        if text is not None and (name not in found or len(text) < len(found[name])):
            found[name] = text
            todo |= dict.fromkeys(users[name])
    return found


def _shortest(expression: Expression, texts: dict[str, bytes]) -> bytes | None:
    match expression:
        case Characters(ranges):
            return _readable(ranges)
        case Text(text):
            return text.encode()
        case Reference(name):
            return texts.get(name)
        case Sequence(items):
            parts = [_shortest(item, texts) for item in items]
            return None if None in parts else b"".join(part for part in parts if part is not None)
        case Alternatives(options):
            ends = (_shortest(option, texts) for option in options)
            return min((end for end in ends if end is not None), key=len, default=None)
        case Repeated(item, least):
            once = _shortest(item, texts) if least else b""
            return None if once is None else once * least
    return None


def _readable(ranges: Ranges) -> bytes | None:
    if not ranges:
        return None
    preferred = (code for code in PREFERRED for low, high in ranges if low <= code <= high)
    return chr(next(preferred, ranges[0][0])).encode()


def beginning(partial: bytes, ranges: Iterable[tuple[int, int]]) -> set[int]:
    """Return characters that begin with some bytes: the first of each range."""
    length = 2 if partial[0] < 0xE0 else 3 if partial[0] < 0xF0 else 4
    found = set()
    for low, high in ranges:
        first = max(low, _decoded(partial, length, 0x80))
        if first <= min(high, _decoded(partial, length, 0xBF)) and chr(first).encode().startswith(partial):
            found.add(first)
    return found


def _decoded(partial: bytes, length: int, rest: int) -> int:
    """Return the code point of some bytes and further bytes `rest`."""
    first, *others = partial + bytes([rest]) * (length - len(partial))
    code = first & (0xFF >> (length + 1))
    for byte in others:
        code = code << 6 | byte & 0x3F
    return max(code, (0, 0, 0x80, 0x800, 0x10000)[length])


def _nearest(items: list[Item]) -> bytes | None:
    """Return the shortest text from one of the items to the end of the whole text."""
    before: dict[Use, list[tuple[Use, bytes]]] = {}  # use -> uses within it, and what follows those
    todo = list({use for _, use in items})
    known = set(todo)
    roots = [use for use in todo if not use.followed]
    while todo:
        use = todo.pop()
        for rest, within in use.followed:
            if within not in known:
                known.add(within)
                todo.append(within)
                roots += [] if within.followed else [within]
            if (text := _text(rest)) is not None:
                before.setdefault(within, []).append((use, text))
    ends: dict[Use, bytes] = {}
    order = count()
    heap = [(0, next(order), root, b"") for root in roots]
    while heap:
        _, _, use, end = heapq.heappop(heap)
        if use not in ends:
            ends[use] = end
            for inner, text in before.get(use, ()):
                heapq.heappush(heap, (len(text) + len(end), next(order), inner, text + end))
    found = (text + ends[use] for rest, use in items if use in ends and (text := _text(rest)) is not None)
    return min(found, key=len, default=None)


def _text(rest: Rest) -> bytes | None:
    return b"" if rest is None else rest.shortest
