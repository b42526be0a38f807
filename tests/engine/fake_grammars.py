"""Grammars over token ids, without text: a choice generates tokens of one remainder, and a fixed number of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec import Struct

from infd.errors import GrammarFailed
from infd.grammar import forcing
from infd.grammar.protocol import Vocabulary
from tests.fakes import FULL, VOCAB, choose, history, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

R = TypeVar("R")
WORDS = Vocabulary(  # of tokens none of which begins another
    [token.to_bytes(2) for token in range(VOCAB)], frozenset(), frozenset(), VOCAB, lambda text: []
)


class Counted(Struct, frozen=True):
    """A constraint: `length` tokens t with t % divisor == number of the token % divisor.

    fails_at  number of tokens after which the matcher fails
    fails_in  the method that then fails: "advance" as a matcher of a grammar does, others by a fault
    free      number of first tokens that may be any
    foreseen  number of these that the matcher knows beyond the tokens that it has read; None: all
    by_mask   whether the matcher finds that the answer is complete only when it fills a mask, which allows no token
    """

    divisor: int
    length: int
    fails_at: int | None = None
    fails_in: str = "advance"
    free: int = 0
    foreseen: int | None = None
    by_mask: bool = False


class CountedMatcher:
    """See Matcher."""

    def __init__(self, constraint: Counted) -> None:
        self.constraint = constraint
        self.tokens: list[int] = []
        self.filled = 0  # tokens before the last mask

    @property
    def unmasked(self) -> int:
        foreseen = self.constraint.foreseen
        return self.constraint.free if foreseen is None else min(self.constraint.free, len(self.tokens) + foreseen)

    @property
    def accepting(self) -> bool:
        return self.stopped

    @property
    def stopped(self) -> bool:
        self._fail_in("stopped")
        return (self.filled if self.constraint.by_mask else len(self.tokens)) >= self.constraint.length

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            divisor = self.constraint.divisor
            if len(self.tokens) >= self.constraint.free:
                assert token % divisor == len(self.tokens) % divisor, "a token that the mask forbids"
            self.tokens.append(token)
            self._fail_in("advance")

    def validate(self, tokens: Sequence[int]) -> int:
        ahead = self.copy()
        for number, token in enumerate(tokens):
            try:
                ahead.advance([token])
            except (AssertionError, GrammarFailed, RuntimeError):
                return number
        return len(tokens)

    def rollback(self, tokens: int) -> None:
        del self.tokens[len(self.tokens) - tokens :]

    def copy(self) -> CountedMatcher:
        copied = CountedMatcher(self.constraint)
        copied.tokens, copied.filled = list(self.tokens), self.filled
        return copied

    def row(self) -> NDArray[np.int32]:
        self._fail_in("row")
        self.filled = len(self.tokens)
        allowed = np.arange(VOCAB) % self.constraint.divisor == len(self.tokens) % self.constraint.divisor
        allowed |= len(self.tokens) < self.constraint.free
        allowed &= not (self.constraint.by_mask and self.stopped)
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _fail_in(self, method: str) -> None:
        if len(self.tokens) == self.constraint.fails_at and method == self.constraint.fails_in:
            raise GrammarFailed("the grammar failed") if method == "advance" else RuntimeError("a fault")


class CountedGrammar:
    """See Grammar."""

    size = 1

    def __init__(self, constraint: Counted) -> None:
        self.constraint = constraint

    @property
    def unmasked(self) -> int:
        return CountedMatcher(self.constraint).unmasked

    def matcher(self) -> CountedMatcher:
        return CountedMatcher(self.constraint)


class FakeGrammars:
    """Grammars of Counted constraints.

    closing    see Grammars
    compiling  while cleared, no constraint is compiled
    filling    while cleared, no mask is filled
    """

    def __init__(self) -> None:
        self.closing: list[int] = []
        self.compiling = asyncio.Event()
        self.compiling.set()
        self.filling = asyncio.Event()
        self.filling.set()
        self.filled = 0

    async def compile(self, constraint: Counted) -> CountedGrammar:
        await self.compiling.wait()
        if not constraint.divisor:
            raise GrammarFailed("division by zero")
        return CountedGrammar(constraint)

    def run(self, work: Callable[..., R], *args: Any) -> asyncio.Future[R]:
        return asyncio.ensure_future(self._run(work, *args))

    async def _run(self, work: Callable[..., R], *args: Any) -> R:
        await self.filling.wait()
        self.filled += 1
        return work(*args)

    def fill(self, matchers: Sequence[CountedMatcher], rows: NDArray[np.int32]) -> list[GrammarFailed | None]:
        for matcher, row in zip(matchers, rows, strict=True):
            row[:] = matcher.row()[: row.size]  # of a model with fewer tokens
        return [None] * len(matchers)

    def forced(
        self, matcher: CountedMatcher, row: NDArray[np.int32], most: int, known: Sequence[int], *, exact: bool
    ) -> forcing.Forced:
        return forcing.forced(self.fill, WORDS, matcher, row, most, known, exact=exact)

    def behind(
        self, matcher: CountedMatcher, row: NDArray[np.int32], most: int, known: Sequence[int]
    ) -> dict[int, list[int]]:
        return forcing.behind(self.fill, WORDS, self.closing, matcher, row, most, known)

    def outline(self, constraint: object) -> None:
        """No constraint has an outline."""


def constrained(prompt: list[int], constraint: Counted, *, seed: int = 0) -> list[int]:
    """Return the tokens that the fake model generates after `prompt` within a constraint."""
    matcher, tokens = CountedMatcher(constraint), list(prompt)
    while not matcher.stopped:
        token = nearest(choose([history(tokens, len(prompt), FULL, None)], seed), matcher.row())
        matcher.advance([token])
        tokens.append(token)
    return tokens[len(prompt) :]
