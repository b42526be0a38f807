"""Finish a cut answer along a shortest path, which the engine's matcher must accept.

The shortest end by the constraint's rules comes first, see `shortest`. llguidance takes the longest terminal of Lark,
and may so refuse that end: then `longest_match` finds one. Some schemas have no rules, and of others llguidance orders
the properties otherwise. Their ends are searched breadth-first, over matchers of single bytes.
Matchers do not compare, so prefixes of equal length with equal masks count as one state, and the first of them goes on.
A search that tries one byte for each mask that follows comes first; only if it finds no end does a second try every
byte. Masks cannot show progress within free text (`.*abc` allows every byte throughout), so `words` are tried whole,
from every state.
"""

from __future__ import annotations

import heapq
from collections import Counter
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from infd.constraint import Lark
from infd.errors import GrammarFailed
from infd.grammar import constraint_rules, lark_syntax
from infd.grammar.protocol import Limits, Vocabulary
from tests.grammar import engines
from tests.grammar.longest_match import LongestMatch
from tests.grammar.shortest import ShortestEnd

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infd.constraint import Constraint
    from infd.grammar.protocol import Matcher
    from tests.grammar.shortest import Item

CLOSING = b'}])">,:'  # bytes that lead to an end, best first
LATER = b" \t\n\r\\"  # white space and escapes make an answer longer
BEAM = 64  # states of one length
LONGEST = 12_000  # bytes
STATES = 4000  # of the first search; the second, which tries all bytes, is given a tenth
GUIDED = 300  # states of a search by rules
HURRY = 5  # weight of the second such search
FREE = 40  # more bytes than this are allowed within free text only
END = 256
ALONE = "by rules alone"

State = tuple["Matcher", bytes]


class Finisher:
    """Finishes cut answers, whatever vocabulary their tokens were of."""

    def __init__(self) -> None:
        tokens = [*(bytes([byte]) for byte in range(256)), b""]
        self._compiler = engines.compiler(Vocabulary(tokens, frozenset(), frozenset({END}), 257, lambda text: []))
        self._row = np.empty((1, self._compiler.vocabulary.words), dtype=np.int32)
        self.found: Counter[str] = Counter()  # ends, by how they were found
        self.alone: list[tuple[str, bytes, int | None]] = []  # ALONE: Lark, cut, and how long an end is at least

    def shortest_end(
        self, constraint: Constraint, cut: bytes, words: Sequence[bytes] = (), alike: Constraint | None = None
    ) -> bytes | None:
        """Return the fewest bytes that complete an answer; None if none were found.

        words  texts that the constraint may require within free text
        alike  a constraint of the same texts that has rules

        Raises GrammarFailed if no answer begins with `cut`.
        """
        matcher = self._compiler.compile(constraint, Limits()).matcher()
        matcher.advance(list(cut))
        rules = _rules(constraint if alike is None else alike)
        end = None if rules is None else rules.of(cut)
        if end is not None and self._is_end(matcher, end):
            self.found["by rules"] += 1
            return end
        if isinstance(constraint, Lark) and engines.PRESENT.get() == "llguidance":
            return self._longest_match(constraint, matcher, cut, end)
        self.found["without rules" if end is None else "against rules"] += 1
        for name, search in (
            ("guided by rules", lambda: None if end is None else self._guided(matcher, rules, cut, 1)),
            ("hurried by rules", lambda: None if end is None else self._guided(matcher, rules, cut, HURRY)),
            ("by search", lambda: self._search(matcher.copy(), words, thorough=False)),
            ("closing", lambda: self._closing(matcher.copy())),
            ("by thorough search", lambda: self._search(matcher.copy(), words, thorough=True)),
        ):
            if (found := search()) is not None:
                self.found[name] += 1
                return found
        self.found["without end"] += 1
        return None

    def _longest_match(self, constraint: Lark, matcher: Matcher, cut: bytes, by_rules: bytes | None) -> bytes | None:
        """Return an end that the matcher accepts; if none is found, the end by the rules, counted as ALONE."""
        end = _lexed(constraint).end(cut)
        if end.text is None:
            self.found[ALONE] += 1
            self.alone.append((constraint.grammar, cut, end.least))
            return by_rules
        ahead = matcher.copy()
        try:
            ahead.advance(list(end.text))
            assert ahead.accepting, f"{end.text!r} is no end of {cut!r}"
            self.found["by longest match" if end.proven else "by longest match, perhaps not a shortest"] += 1
        except GrammarFailed as error:
            if "too many readings" not in str(error):
                raise
            self.found["by longest match, beyond llguidance's limit"] += 1
        return end.text

    def _guided(self, matcher: Matcher, rules: ShortestEnd, cut: bytes, weight: int) -> bytes | None:
        """Return an end that the rules and the matcher accept, by the A* algorithm; with weight 1 the shortest.

        A matcher that reads terminals greedily accepts only texts of the rules: no end is shorter than the rules' end.
        A larger weight prefers paths after which the rules' end is short to short paths.
        """
        order = count()
        heap: list[tuple[int, int, int, Matcher, bytes, list[Item], bytes]] = []

        def add(before: Matcher, path: bytes, added: bytes, items: list[Item], end: bytes) -> None:
            after = self._after(before, list(added)) if added else (before, b"")
            if after is not None:
                length = len(path) + len(added)
                heapq.heappush(
                    heap, (length + weight * len(end), -length, next(order), after[0], path + added, items, end)
                )

        for path, items, end in rules.begun(cut):
            add(matcher.copy(), b"", path, items, end)
        for position in range(len(cut) + 1, len(cut) + 1 + GUIDED):
            if not heap:
                return None
            *_, state, path, items, end = heapq.heappop(heap)
            if self._is_end(state, end):
                return path + end
            for added, after, shortest in rules.following(items, position):
                add(state, path, added, after, shortest)
        return None

    def _is_end(self, matcher: Matcher, end: bytes) -> bool:
        if matcher.validate(list(end)) < len(end):
            return False
        ahead = matcher.copy()
        try:
            ahead.advance(list(end))
        except GrammarFailed:  # a limit
            return False
        return ahead.accepting

    def _search(self, matcher: Matcher, words: Sequence[bytes], thorough: bool) -> bytes | None:
        if (first := self._mask(matcher)) is None:
            return None
        layer: dict[bytes, State] = {first: (matcher, b"")}
        after_words: dict[int, list[tuple[bytes, State]]] = {}  # length -> states
        partitions: dict[bytes, list[int]] = {}  # mask -> one byte for each mask that follows
        states = length = 0
        while (layer or after_words) and length <= LONGEST and states < (STATES // 10 if thorough else STATES):
            for mask, each in after_words.pop(length, ()):
                layer.setdefault(mask, each)  # a state that used its word earlier goes first
            following: dict[bytes, State] = {}
            for mask, (state, path) in list(layer.items())[:BEAM]:
                if mask[END >> 3] >> (END & 7) & 1:
                    return path
                states += 1
                known = partitions.get(mask)
                reached: dict[bytes, int] = {}
                for byte in _candidates(mask, thorough) if known is None or thorough else known:
                    if (after := self._after(state, [byte])) is not None:
                        reached.setdefault(after[1], byte)
                        following.setdefault(after[1], (after[0], path + bytes([byte])))
                partitions.setdefault(mask, list(reached.values()))
                for word in words:
                    if (after := self._after(state, list(word))) is not None:
                        ahead = after[1], (after[0], path + word)
                        after_words.setdefault(length + len(word), []).append(ahead)
            layer = following
            length += 1
        return None

    def _closing(self, matcher: Matcher) -> bytes | None:
        """Return the end that the best closing bytes make: of documents whose required members take thousands."""
        path = b""
        while len(path) <= LONGEST and (mask := self._mask(matcher)) is not None:
            if mask[END >> 3] >> (END & 7) & 1:
                return path
            path += bytes([next(iter(_candidates(mask, thorough=False)))])
            matcher.advance([path[-1]])
        return None

    def _after(self, matcher: Matcher, added: list[int]) -> tuple[Matcher, bytes] | None:
        """Return the matcher after some bytes, and its mask; None if they are not allowed, or a limit is reached."""
        ahead = matcher.copy()
        try:
            ahead.advance(added)
        except GrammarFailed:
            return None
        mask = self._mask(ahead)
        return None if mask is None else (ahead, mask)

    def _mask(self, matcher: Matcher) -> bytes | None:
        """Return the matcher's mask; None if a limit is reached."""
        (failure,) = self._compiler.fill([matcher], self._row)
        return self._row.tobytes() if failure is None else None


@lru_cache(maxsize=16)
def _rules(constraint: Constraint) -> ShortestEnd | None:
    """Return the search by the constraint's rules; None if it has none."""
    try:
        return ShortestEnd(constraint_rules.write(constraint, Limits(), lambda mark: None))
    except GrammarFailed:
        return None


@lru_cache(maxsize=16)
def _lexed(constraint: Lark) -> LongestMatch:
    return LongestMatch(lark_syntax.parse(constraint.grammar, Limits()))


def _candidates(mask: bytes, thorough: bool) -> Iterable[int]:
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:256]).tolist()
    closing = b'"' + CLOSING if len(allowed) > FREE else CLOSING  # a brace in free text closes nothing
    ordered = [byte for byte in closing if byte in allowed] + [byte for byte in allowed if byte not in closing]
    if thorough:
        return ordered
    if len(ordered) > FREE:
        ordered = [byte for byte in ordered if byte < 0x80 or byte in (0xC3, 0xE6)]
    return [byte for byte in ordered if byte not in LATER] or ordered
