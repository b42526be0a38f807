"""The shortest end of a cut text of a Lark grammar whose lexer takes the longest terminal, as llguidance's does.

At a character that no terminal continues, the lexer ends the terminals that match the text before the character, and
starts again with the terminals that the parser then admits. So a text that the rules derive may be rejected: in
`("a" | "ab") "b"` the lexer reads `ab` as one terminal. This module models lexer and parser; it shares no code with the
engine.

An end is a sequence of terminals with their texts, each of which the lexer must end where the sequence does. The
characters that would continue a terminal, or another one admitted beside it, are the context of the next terminal,
which may not begin with them. The shortest texts of each symbol between two contexts are computed once; the shortest
end of a cut text is then a shortest path. There are two such computations. `_sure` counts all terminals that may ever
be admitted beside a terminal, so the lexer reads each end that is found. `_least` counts only those that surely are, so
the lexer reads no shorter end. Where they differ, an A* search over characters, for which the terminals admitted are
known, goes on until they agree, or a limit is reached.
Source: Bar-Hillel, Perles and Shamir 1961, On Formal Properties of Simple Phrase Structure Grammars: the product of a
grammar and an automaton.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.grammar.automata import automaton
from infd.grammar.order import Order
from infd.grammar.regulars import Regulars
from infd.grammar.rules import Alternatives, Characters, Reference, Repeated, Sequence
from tests.grammar.shortest import ShortestEnd, beginning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from infd.grammar.automata import Automaton
    from infd.grammar.lark_syntax import LarkGrammar
    from infd.grammar.rules import Expression
    from tests.grammar.shortest import Item, Rest, Symbol, Use

FIRST = 0xF0000  # the parser reads terminals as characters of private use
LAST = 0x10FFFF
STATES = 400  # of a search
ENOUGH = 8  # of a search that has found an end
SURROGATES = range(0xD800, 0xE000)

State = tuple[tuple[int, int], ...]  # terminals that may still match, each with the state of its automaton


class End(Struct, frozen=True):
    """Bytes that complete a cut text.

    text   None: the search found no end
    least  the lexer reads no end of fewer bytes; None: it reads none at all
    """

    text: bytes | None
    least: int | None

    @property
    def proven(self) -> bool:
        """Whether the text is a shortest one, or no end exists."""
        return self.least == (None if self.text is None else len(self.text))


class Reading(Struct, frozen=True):
    """What a text leads to.

    items  of the parser, before the terminal within which the text ends
    state  of the lexer within that terminal
    fresh  whether the text is empty
    """

    items: list[Item]
    state: State
    fresh: bool = False


class LongestMatch:
    """Finds ends of texts of a grammar. No terminal may match the empty text."""

    def __init__(self, grammar: LarkGrammar) -> None:
        order = Order(grammar.rules)
        numbers = {name: number for number, name in enumerate(sorted(order.terminals | set(grammar.ignored)))}
        regulars = Regulars(grammar.rules)
        self._lexer = _Lexer([automaton(regulars.of(Reference(name))) for name in numbers])
        self._ignored = frozenset(numbers[name] for name in grammar.ignored)
        rules = {name: each for name, each in grammar.rules.items() if not name.isupper()}
        self._parser = ShortestEnd({name: _spelled(each, numbers) for name, each in rules.items()}, shares=False)
        following = {numbers[name]: {numbers[each] for each in after} for name, after in order.following.items()}
        beside = self._beside({numbers[name] for name in order.first}, following)
        self._sure = _Ends(self._lexer, self._parser, self._ignored, beside)
        self._least = _Ends(self._lexer, self._parser, self._ignored, None)
        self._positions = count(1)

    def end(self, cut: bytes) -> End:
        """Return the shortest end of a text that is found."""
        order, best = count(), None
        heap: list[tuple[int, int, int, Reading, bytes, bytes]] = []
        todo = list(self._begun(cut))
        for states in count():
            for path, reading in todo:
                if (least := self._least.of(reading)) is not None:
                    whole = path + least
                    heapq.heappush(heap, (len(whole), -len(path), next(order), reading, path, least))
            if not heap or states == STATES or (best is not None and (heap[0][0] >= len(best) or states > ENOUGH)):
                break
            *_, reading, path, least = heapq.heappop(heap)
            for end in (least, self._sure.of(reading)):
                if end is not None and (best is None or len(path + end) < len(best)) and self._reads(reading, end):
                    best = path + end
            following = ((code, self._after(reading, code)) for code in self._lexer.classes)
            todo = [(path + chr(code).encode(), after) for code, after in following if after is not None]
        bounds = [length for length, *_ in heap[:1]] + ([] if best is None else [len(best)])
        return End(best, min(bounds, default=None))

    def reads(self, text: str) -> bool:
        """Return whether lexer and parser accept a text."""
        items = self._parser.started()
        return self._reads(Reading(items, self._admitted(items), fresh=True), text.encode())

    def _reads(self, reading: Reading, text: bytes) -> bool:
        after: Reading | None = reading
        for character in text.decode():
            if after is None:
                return False
            after = self._after(after, ord(character))
        return after is not None and self._least.of(after) == b""

    def _begun(self, cut: bytes) -> Iterator[tuple[bytes, Reading]]:
        """Yield the ways to complete the last character of `cut`: its other bytes, and what the text leads to."""
        text = cut.decode(errors="ignore")
        partial = cut[len(text.encode()) :]  # of a character
        items = self._parser.started()
        reading: Reading | None = Reading(items, self._admitted(items), fresh=True)
        for character in text:
            if reading is not None:
                reading = self._after(reading, ord(character))
        if reading is not None and not partial:
            yield b"", reading
        elif reading is not None:
            for code in beginning(partial, self._lexer.ranges):
                if (after := self._after(reading, code)) is not None:
                    yield chr(code).encode()[len(partial) :], after

    def _after(self, reading: Reading, code: int) -> Reading | None:
        """Return what one more character leads to; None if lexer or parser reject the character."""
        if state := self._lexer.after(reading.state, code):
            return Reading(reading.items, state)
        ended = set(self._lexer.matched(reading.state))
        if not ended:
            return None
        items = self._parser.after(reading.items, {FIRST + number for number in ended}, next(self._positions))
        if ended & self._ignored:
            items = list(dict.fromkeys([*reading.items, *items]))
        state = self._lexer.after(self._admitted(items), code)
        return Reading(items, state) if state else None

    def _admitted(self, items: list[Item]) -> State:
        return _first({_terminal(rest) for rest, _ in items if rest is not None} | self._ignored)

    def _beside(self, first: set[int], following: Mapping[int, set[int]]) -> dict[int, set[int]]:
        """Return for each terminal those that the parser may admit at the same place, at least."""
        found: dict[int, set[int]] = {number: {number} for number in self._lexer.terminals}
        places = [(each, each) for each in (first, *following.values())]
        alike: set[tuple[int, int]] = set()
        while places:
            for some, others in places:
                for number in some:
                    found[number] |= others | self._ignored
            pairs = {(one, two) for one, others in found.items() for two in others if one != two} - alike
            fresh = [pair for pair in pairs if self._lexer.match_alike(*pair)]
            alike.update(fresh)
            places = [(following.get(one, set()), following.get(two, set())) for one, two in fresh]
        for number in self._ignored:
            found[number] |= set(found)
        return found


class _Lexer:
    """Reads terminals at once.

    classes  one character of each set of characters that the terminals do not tell apart
    ranges   of the characters that the automata tell apart
    """

    def __init__(self, automata: list[Automaton]) -> None:
        self._automata = automata
        self._after: dict[tuple[State, int], State] = {}
        self._texts: dict[State, list[tuple[bytes, State, frozenset[int]]]] = {}
        bounds = {
            bound for each in automata for edges in each.edges for low, high, _ in edges for bound in (low, high + 1)
        }
        lows = sorted({0, *bounds} - {LAST + 1})
        self.ranges = list(zip(lows, [each - 1 for each in lows[1:]] + [LAST], strict=True))
        self.terminals = range(len(automata))
        self.classes = self._classes()

    def after(self, state: State, code: int) -> State:
        """Return the terminals that match or may match after one more character; () if there are none."""
        if (found := self._after.get((state, code))) is None:
            found = self._after[state, code] = tuple(
                (number, target)
                for number, before in state
                for low, high, target in self._automata[number].edges[before]
                if low <= code <= high
            )
        return found

    def matched(self, state: State) -> Iterator[int]:
        """Yield the terminals that match the text read."""
        return (number for number, each in state if self._automata[number].accepting[each])

    def texts(self, state: State) -> list[tuple[bytes, State, frozenset[int]]]:
        """Return the states that are reachable: a shortest text to each, and the characters that continue the text."""
        if (found := self._texts.get(state)) is None:
            found, known, order = [], set(), count()
            heap = [(0, next(order), b"", state)]
            while heap:
                _, _, text, reached = heapq.heappop(heap)
                if reached in known:
                    continue
                known.add(reached)
                following = {code: after for code in self.classes if (after := self.after(reached, code))}
                found.append((text, reached, frozenset(following)))
                for code, after in following.items():
                    longer = text + chr(code).encode()
                    heapq.heappush(heap, (len(longer), next(order), longer, after))
            self._texts[state] = found
        return found

    def match_alike(self, one: int, two: int) -> bool:
        """Return whether two terminals match one text."""
        return any({one, two} == set(self.matched(state)) for _, state, _ in self.texts(_first((one, two))))

    def _classes(self) -> list[int]:
        found: dict[object, int] = {}
        states = [((number, state),) for number in self.terminals for state in range(len(self._automata[number].edges))]
        for low, high in self.ranges:
            code = next((each for each in map(ord, "a0A-") if low <= each <= high), low)
            reached = tuple(self.after(state, code) for state in states)
            if any(reached) and code not in SURROGATES:
                found.setdefault(reached, code)
        return list(found.values())


class Context(Struct, frozen=True):
    """What a terminal depends on.

    forbidden  characters, one of each class, with which it may not begin
    admitted   terminals that are surely admitted beside it
    """

    forbidden: frozenset[int] = frozenset()
    admitted: frozenset[int] = frozenset()

    def __le__(self, other: Context) -> bool:
        return self.forbidden <= other.forbidden and self.admitted <= other.admitted


class _Ends:
    """Shortest ends.

    beside  for each terminal those that count as admitted at the same place; None: those that surely are
    """

    def __init__(
        self, lexer: _Lexer, parser: ShortestEnd, ignored: frozenset[int], beside: Mapping[int, set[int]] | None
    ) -> None:
        self._lexer = lexer
        self._parser = parser
        self._ignored = ignored
        self._beside = beside
        self._known: dict[tuple[Symbol, Context], dict[Context, bytes]] = {}
        self._unstable = False
        self._firsts: dict[Symbol, frozenset[int]] = {}
        self._recursions: dict[Symbol, frozenset[int]] = {}

    def of(self, reading: Reading) -> bytes | None:
        """Return the shortest end after a text; None if there is none."""
        while True:
            self._unstable = False
            end = self._end(reading)
            if not self._unstable:
                return end
            self._compute()

    def _end(self, reading: Reading) -> bytes | None:
        order = count()
        heap: list[tuple[int, int, bytes, Use, Context]] = []

        def add(text: bytes, items: list[Item], forbidden: frozenset[int]) -> None:
            context = Context(forbidden, frozenset().union(*(self._first(rest) for rest, _ in items)))
            for rest, use in items:
                for after, more in self._after(rest, context).items():
                    heapq.heappush(heap, (len(text + more), next(order), text + more, use, after))

        if reading.fresh:
            add(b"", reading.items, frozenset())
        for text, state, forbidden in self._lexer.texts(reading.state):
            if matched := set(self._lexer.matched(state)):
                items = [(r.after, use) for r, use in reading.items if r is not None and _terminal(r) in matched]
                add(text, items + (reading.items if matched & self._ignored else []), forbidden)
        known: dict[Use, list[Context]] = {}
        while heap:
            _, _, text, use, context = heapq.heappop(heap)
            before = known.setdefault(use, [])
            if not any(each <= context for each in before):
                before.append(context)
                if not use.followed:
                    return text
                admitted = context.admitted.union(*(self._first(rest) for rest, _ in use.followed))
                for rest, within in use.followed:
                    for after, more in self._after(rest, Context(context.forbidden, admitted)).items():
                        heapq.heappush(heap, (len(text + more), next(order), text + more, within, after))
        return None

    def _compute(self) -> None:
        """Compute the shortest texts of the symbols in the contexts that were asked for, until none is shorter."""
        changed = True
        while changed:
            changed = False
            for (symbol, context), before in list(self._known.items())[::-1]:
                if (found := self._of(symbol, context)) != before:
                    self._known[symbol, context], changed = found, True
            changed = changed or self._unstable
            self._unstable = False

    def _ways(self, symbol: Symbol, context: Context) -> dict[Context, bytes]:
        """Return the shortest texts of a symbol in a context, as far as computed, by the context after them."""
        if (found := self._known.get((symbol, context))) is None:
            found = self._known[symbol, context] = self._of(symbol, context) if symbol.ranges is not None else {}
            self._unstable = self._unstable or symbol.ranges is None
        return found

    def _of(self, symbol: Symbol, context: Context) -> dict[Context, bytes]:
        if symbol.ranges is not None:
            return self._of_terminal(symbol.ranges[0][0] - FIRST, context)
        if symbol.item is not None:
            found = [] if symbol.least else [(context, b"")]
            if symbol.most != 0:
                less = self._parser.less(symbol)
                for middle, text in self._ways(symbol.item, context).items():
                    ways = self._ways(less, self._widened(middle, self._first_of([less])))
                    found += [(after, text + more) for after, more in ways.items()]
            return _best(found)
        recursion = self._recursion(symbol)
        return _best(
            (self._widened(after, recursion), text)
            for option in self._parser.options(symbol)
            for after, text in self._after(option, self._widened(context, self._first(option))).items()
        )

    def _after(self, rest: Rest, context: Context) -> dict[Context, bytes]:
        """Return the shortest texts of some symbols in a context, by the context after them."""
        if rest is None:
            return {context: b""}
        context = self._widened(context, self._first(rest))
        return _best(
            (after, text + more)
            for middle, text in self._ways(rest.symbol, context).items()
            for after, more in self._after(rest.after, middle).items()
        )

    def _widened(self, context: Context, admitted: frozenset[int]) -> Context:
        return Context(context.forbidden, context.admitted | admitted)

    def _of_terminal(self, number: int, context: Context) -> dict[Context, bytes]:
        found = [
            (Context(forbidden), text)
            for after, before in self._skipped(context).items()
            for terminal, forbidden, text in self._read(number, after, before)
            if terminal == number
        ]
        return _best(found)

    def _read(self, number: int, context: Context, before: bytes) -> Iterator[tuple[int, frozenset[int], bytes]]:
        """Yield the terminals that match `before` and some text, with the characters that would continue them."""
        beside = context.admitted | self._ignored | {number} if self._beside is None else self._beside[number]
        for code in self._lexer.classes:
            if code not in context.forbidden and (state := self._lexer.after(_first(beside), code)):
                for text, reached, forbidden in self._lexer.texts(state):
                    for each in self._lexer.matched(reached):
                        yield each, forbidden, before + chr(code).encode() + text

    def _skipped(self, context: Context) -> dict[Context, bytes]:
        """Return the contexts to which ignored terminals may lead, and the shortest texts of these."""
        found = {context: b""}
        todo = [context] if self._ignored else []
        while todo:
            before = todo.pop()
            for ignored in self._ignored:
                for terminal, forbidden, text in self._read(ignored, before, found[before]):
                    after = Context(forbidden, context.admitted)
                    if terminal == ignored and (after not in found or len(text) < len(found[after])):
                        found[after] = text
                        todo.append(after)
        return found

    def _first(self, rest: Rest) -> frozenset[int]:
        """Return terminals with which a text of some symbols may begin."""
        return self._first_of(_symbols(rest))

    def _first_of(self, symbols: Iterable[Symbol]) -> frozenset[int]:
        found: frozenset[int] = frozenset()
        for symbol in symbols if self._beside is None else ():
            if symbol not in self._firsts:
                leading = [symbol, *(each for each, _ in self._predicted(symbol))]
                self._firsts[symbol] = frozenset(each.ranges[0][0] - FIRST for each in leading if each.ranges)
            found |= self._firsts[symbol]
            if symbol.shortest != b"":
                break
        return found

    def _recursion(self, symbol: Symbol) -> frozenset[int]:
        """Return terminals that may come after a symbol because a text of the symbol may begin with another one."""
        if self._beside is not None:
            return frozenset()
        if symbol not in self._recursions:
            after = [symbols for each, symbols in self._predicted(symbol) if each is symbol]
            self._recursions[symbol] = frozenset().union(*map(self._first_of, after))
        return self._recursions[symbol]

    def _predicted(self, symbol: Symbol) -> list[tuple[Symbol, tuple[Symbol, ...]]]:
        """Return the symbols that may begin where a symbol begins, with the symbols after them."""
        found, known, todo = [], {symbol}, [symbol]
        while todo:
            for chain in self._chains(todo.pop()):
                for at, each in enumerate(chain):
                    found.append((each, chain[at + 1 :]))
                    if each not in known:
                        known.add(each)
                        todo.append(each)
                    if each.shortest != b"":
                        break
        return found

    def _chains(self, symbol: Symbol) -> list[tuple[Symbol, ...]]:
        if symbol.item is not None:
            return [(symbol.item, self._parser.less(symbol))] if symbol.most != 0 else []
        return [] if symbol.ranges else [tuple(_symbols(option)) for option in self._parser.options(symbol)]


def _symbols(rest: Rest) -> Iterator[Symbol]:
    while rest is not None:
        yield rest.symbol
        rest = rest.after


def _best(pairs: Iterable[tuple[Context, bytes]]) -> dict[Context, bytes]:
    """Return the shortest texts, without contexts that allow less than another one after a text as short."""
    best: dict[Context, bytes] = {}
    for context, text in sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0].forbidden), len(pair[0].admitted))):
        if not any(other <= context for other in best):
            best[context] = text
    return best


def _first(terminals: Iterable[int]) -> State:
    return tuple((number, 0) for number in sorted(terminals))


def _terminal(rest: Rest) -> int:
    assert rest is not None
    assert rest.symbol.ranges is not None
    return rest.symbol.ranges[0][0] - FIRST


def _spelled(expression: Expression, numbers: Mapping[str, int]) -> Expression:
    """Return an expression with a character of its own for each terminal."""
    match expression:
        case Reference(name) if name in numbers:
            return Characters(((FIRST + numbers[name], FIRST + numbers[name]),))
        case Sequence(items):
            return Sequence(tuple(_spelled(item, numbers) for item in items))
        case Alternatives(options):
            return Alternatives(tuple(_spelled(option, numbers) for option in options))
        case Repeated(item, least, most):
            return Repeated(_spelled(item, numbers), least, most)
    return expression
