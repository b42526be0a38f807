"""Limit the tokens of a thought: at the limit, a matcher allows only the tokens that end the thought.

The matcher searches the bytes of an answer for the marks of a thought, as the answer's parser searches the text. So the
matcher also finds a mark that consists of several tokens, and a mark inside a token. A mark of `ThoughtBudget.marks`
counts only as a token, as for the parser.

A grammar may constrain the same answer. While a thought is being ended, the next token must continue one of
`ThoughtBudget.forced`, the texts that close a thought, and the grammar must allow it. If no token does both, every
token that the grammar allows may follow: for example, one that completes a partly generated character.

Without a grammar, `BudgetMatcher.unmasked` is the number of tokens, from the beginning of the answer, that precede any
mask. So a long budget costs no time until it may be exhausted.
"""

from __future__ import annotations

import sys
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from infd.errors import GrammarFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from infd.constraint import ThoughtBudget
    from infd.grammar.protocol import Compiler, Grammar, Matcher, Vocabulary

_MOST_LEADING_SPACE: Final = 256  # bytes of white space in which an opening mark is awaited; models write fewer
_FOREVER: Final = sys.maxsize
_REMEMBERED: Final = 64  # tokens that are rolled back without reading the others again: more than a step has drafts


class _Place(Enum):
    START = auto()  # the text is white space, perhaps followed by the beginning of a mark
    OUTSIDE = auto()  # outside of a thought; another thought may follow
    INSIDE = auto()
    OVER = auto()  # no thought may follow


_State = tuple[_Place, bytes, bool, int, tuple[int, ...] | None]  # of a BudgetMatcher, without its tokens


class BudgetGrammar:
    """A ThoughtBudget for one vocabulary.

    forced  the tokens of each text of ThoughtBudget.forced
    answer  grammar of the whole answer; None: any text
    """

    def __init__(
        self, budget: ThoughtBudget, vocabulary: Vocabulary, forced: Sequence[tuple[int, ...]], answer: Grammar | None
    ) -> None:
        self.tokens = vocabulary.tokens
        self.forced = tuple(forced)
        self.answer = answer
        self.limit = budget.tokens
        self.openings = tuple(mark.encode() for mark in budget.openings)
        self.closings = tuple(mark.encode() for mark in budget.closings)
        self.marks = frozenset(mark.encode() for mark in budget.marks)
        self.inside = budget.inside
        self.again = budget.again
        self.size = 1000 if answer is None else answer.size
        # Most bytes at the end of the text that may be the beginning of a mark.
        self.kept = max(map(len, (*self.openings, *self.closings))) - 1

    @property
    def unmasked(self) -> int:
        return 0 if self.answer is not None else BudgetMatcher(self, None).unmasked

    def matcher(self) -> BudgetMatcher:
        return BudgetMatcher(self, None if self.answer is None else self.answer.matcher())


class BudgetMatcher:
    """See Matcher.

    inner  matcher of the answer's grammar, or None
    """

    def __init__(self, grammar: BudgetGrammar, inner: Matcher | None) -> None:
        self.inner = inner
        self._grammar = grammar
        self._restart()

    def _restart(self) -> None:
        self._read: list[int] = []
        self._before: deque[_State] = deque(maxlen=_REMEMBERED)  # the states before the latest tokens
        self._place = _Place.INSIDE if self._grammar.inside else _Place.START
        # The end of the text, which may be the beginning of a mark. A newline precedes the text of a thought, because a
        # call's mark ends a thought only at the beginning of a line.
        self._tail = b"\n" if self._grammar.inside else b""
        self._spelled = False  # whether the thought's opening mark should be a token, but is spelled in other tokens
        self._thought_tokens = 0
        self._ending: tuple[int, ...] | None = None  # tokens read of the forced text; None: none is forced
        self._force()

    @property
    def accepting(self) -> bool:
        return self.inner is None or self.inner.accepting

    @property
    def stopped(self) -> bool:
        return self.inner is not None and self.inner.stopped

    @property
    def unmasked(self) -> int:
        if self.inner is not None or self._ending is not None:
            return 0
        if self._place is _Place.OVER:
            return _FOREVER
        return len(self._read) + self._grammar.limit - self._thought_tokens

    @property
    def forced(self) -> set[int]:
        """The tokens that continue a forced text. One of them must follow; if empty, any token may follow."""
        if self._ending is None:
            return set()
        at = len(self._ending)
        return {text[at] for text in self._grammar.forced if text[:at] == self._ending and len(text) > at}

    def advance(self, tokens: Sequence[int]) -> None:
        if self.inner is not None:
            self.inner.advance(tokens)
        for token in tokens:
            self._advance(token)

    def validate(self, tokens: Sequence[int]) -> int:
        allowed = len(tokens) if self.inner is None else self.inner.validate(tokens)
        read = 0
        for token in tokens[:allowed]:
            if (forced := self.forced) and token not in forced:
                break
            self._advance(token)
            read += 1
        self._undo(read)
        return read

    def rollback(self, tokens: int) -> None:
        if self.inner is not None:
            self.inner.rollback(tokens)
        self._undo(tokens)

    def _undo(self, tokens: int) -> None:
        """Remove the last tokens, but not those of `inner`."""
        left = len(self._read) - tokens
        if tokens <= len(self._before):
            for _ in range(tokens):
                self._place, self._tail, self._spelled, self._thought_tokens, self._ending = self._before.pop()
            del self._read[left:]
            return
        kept = self._read[:left]
        self._restart()
        for token in kept:
            self._advance(token)

    def copy(self) -> BudgetMatcher:
        copied = BudgetMatcher(self._grammar, None if self.inner is None else self.inner.copy())
        copied._read, copied._before = list(self._read), self._before.copy()
        copied._place, copied._tail, copied._spelled = self._place, self._tail, self._spelled
        copied._thought_tokens, copied._ending = self._thought_tokens, self._ending
        return copied

    def _advance(self, token: int) -> None:
        was_inside = self._place is _Place.INSIDE
        self._before.append((self._place, self._tail, self._spelled, self._thought_tokens, self._ending))
        self._read.append(token)
        self._search(self._grammar.tokens[token] if token < len(self._grammar.tokens) else b"")
        if was_inside and self._place is _Place.INSIDE:
            self._thought_tokens += 1
        if self._ending is not None:
            self._ending = (*self._ending, token)
            if not self.forced:  # the text is complete, or the grammar demanded another token
                self._ending = None
        self._force()

    def _force(self) -> None:
        """Force the end of the thought if its budget is exhausted.

        If the last tokens are the beginning of a forced text, only the rest of that text is forced.
        """
        if self._ending is not None or self._place is not _Place.INSIDE or self._thought_tokens < self._grammar.limit:
            return
        begun = [
            text[:length]
            for text in self._grammar.forced
            for length in range(1, min(len(text), self._thought_tokens + 1))
            if tuple(self._read[-length:]) == text[:length]
        ]
        self._ending = max(begun, key=len, default=())

    def _search(self, text: bytes) -> None:
        """Append bytes to the answer, and update `_place` by the marks found."""
        grammar = self._grammar
        self._tail += text
        while self._place is not _Place.OVER:
            if self._place is _Place.START:
                marks = (*grammar.openings, *grammar.closings)
                words = self._tail.lstrip()
                found = next((mark for mark in marks if words.startswith(mark)), None)
                if found is None:
                    undecided = any(mark.startswith(words) for mark in marks)
                    if undecided and len(self._tail) <= _MOST_LEADING_SPACE:
                        return
                    self._place = _Place.OUTSIDE if grammar.again else _Place.OVER
                    continue
                end = len(self._tail) - len(words) + len(found)
            else:
                marks = grammar.closings if self._place is _Place.INSIDE else grammar.openings
                places = [(place, mark) for mark in marks if (place := self._find(mark, text)) >= 0]
                if not places:
                    self._tail = self._tail[max(0, len(self._tail) - grammar.kept) :]
                    return
                place, found = min(places)
                end = place + len(found)
            self._tail = self._tail[end:]
            if found in grammar.openings:
                self._spelled = found in grammar.marks and text != found
                self._place, self._tail = _Place.INSIDE, b"\n" + self._tail
            else:
                self._place = _Place.OUTSIDE if grammar.again else _Place.OVER
        self._tail = b""

    def _find(self, mark: bytes, token: bytes) -> int:
        """Return the index in `_tail` of the first mark that counts; -1 if there is none. token: the latest token."""
        if self._place is not _Place.INSIDE or self._spelled or mark.lstrip(b"\n") not in self._grammar.marks:
            return self._tail.find(mark)
        whole = token == mark.lstrip(b"\n") and self._tail.endswith(mark)
        return len(self._tail) - len(mark) if whole else -1


def fill(compiler: Compiler, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> list[GrammarFailed | None]:
    """Fill rows of a mask like Compiler.fill, for matchers of the compiler's grammars and for BudgetMatchers."""
    # Imported on first use, to shorten the start of a daemon that does not load torch; torch imports numpy.
    import numpy as np

    inner = [matcher.inner if isinstance(matcher, BudgetMatcher) else matcher for matcher in matchers]
    if None not in inner:
        failures = compiler.fill([matcher for matcher in inner if matcher is not None], rows)
    else:
        rows[:] = -1
        failures = [None] * len(matchers)
        within = [row for row, matcher in enumerate(inner) if matcher is not None]
        filled = np.empty((len(within), rows.shape[1]), dtype=np.int32)
        found = compiler.fill([matcher for matcher in inner if matcher is not None], filled)
        for row, bits, failure in zip(within, filled, found, strict=True):
            rows[row], failures[row] = bits, failure
    for row, matcher in enumerate(matchers):
        if isinstance(matcher, BudgetMatcher) and failures[row] is None and (forced := matcher.forced):
            limited = _only(forced, rows[row])
            if limited.any():
                rows[row] = limited
    return failures


def spell(vocabulary: Vocabulary, text: str) -> tuple[int, ...]:
    """Return tokens that spell a text: at each place the longest that matches. Searches the whole vocabulary.

    Raises GrammarFailed if no token matches at some place.
    """
    content = text.encode()
    found: dict[bytes, int] = {}
    for number, token in enumerate(vocabulary.tokens):
        if token and token in content and number not in vocabulary.end_ids:
            if number in vocabulary.special:
                found[token] = number
            else:
                found.setdefault(token, number)
    spelled: list[int] = []
    at = 0
    while at < len(content):
        longest = max((token for token in found if content.startswith(token, at)), key=len, default=b"")
        if not longest:
            raise GrammarFailed(f"no tokens of this model spell {text!r}", code="unsupported_grammar")
        spelled.append(found[longest])
        at += len(longest)
    return tuple(spelled)


def _only(tokens: set[int], row: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a row that allows the members of `tokens` that `row` allows."""
    limited = row.copy()
    limited[:] = 0
    words, limits = row.view("uint32"), limited.view("uint32")
    for token in tokens:
        word, bit = divmod(token, 32)
        limits[word] |= int(words[word]) & 1 << bit
    return limited
