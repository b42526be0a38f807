"""Compile with xgrammar: an automaton for each rule, with the tokens that each state admits, and a parser above them.

Compilation tries most of the tokens at most of the states: with 150,000 tokens a state takes up to milliseconds. Masks
take little time.
xgrammar's own parsers of schemas and regular expressions ignore keywords and syntax that they do not support, so infd
does not use them: `xgrammar_writing` writes each grammar from rules, which are exact. A worker writes the grammar and
compiles it on trial, see `xgrammar_trial`; this process then compiles it without the GIL, in about as much time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from infd.constraint import Continuation
from infd.errors import GrammarFailed
from infd.grammar import markup, xgrammar_writing
from infd.grammar.xgrammar_library import Library

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Many

    from numpy.typing import NDArray

    from infd.constraint import Constraint
    from infd.grammar.protocol import Limits, Matcher, Vocabulary

_SPECIAL: Final = b"\xff"  # UTF-8 never contains this byte, so no rule matches the byte


class Trial(Protocol):
    """Writes constraints in processes that can be killed, and compiles them there first: see XgrammarTrial."""

    def set_vocabulary(self, tokens: Many[bytes], ends: Many[int]) -> None:
        """Set the vocabulary; the arguments are those of `Library.compiler`."""

    def __call__(self, constraint: Constraint, limits: Limits, marks: dict[str, int], *, drop_space: bool) -> str:
        """Return the text of a constraint's grammar, see `xgrammar_writing.write`.

        Raises GrammarFailed for a refused constraint, and for a constraint that takes too long or too much memory.
        """


class XgrammarCompiler:
    """The Compiler of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, trial: Trial | None = None) -> None:
        """Build the compiler.

        trial  writes constraints and compiles them in another process, within limits; None: no process, no limits

        Raises Unavailable if the library is missing or of another version.
        """
        self.vocabulary = vocabulary
        self._trial = trial
        self._library = Library()
        self.version = self._library.version
        self._ends = frozenset(each for each in vocabulary.end_ids if each < vocabulary.columns)
        self._marks = markup.Marks(vocabulary)
        tokens = _tokens(vocabulary, self._ends)
        # Without end ids xgrammar would guess them from the names of tokens. So an id beyond the logits replaces them.
        ends = sorted(self._ends)
        if not ends:
            ends = [len(tokens)]
            tokens.append(b"")
        self._words = -(-len(tokens) // 32)  # int32 words of xgrammar's mask
        self._compiler = self._library.compiler(tokens, ends)
        if trial is not None:
            trial.set_vocabulary(tokens, ends)
        self._unspelled = frozenset(index for index, token in enumerate(tokens) if not token) | self._ends
        self._end_row = _row(vocabulary, self._ends)
        self._valid_row = _row(vocabulary, range(vocabulary.columns))

    def compile(self, constraint: Constraint, limits: Limits) -> XgrammarGrammar:
        drop_space = self.vocabulary.drop_space
        if isinstance(constraint, Continuation):
            constraint, drop_space = constraint.answer, False
        marks = self._marks.within(constraint)
        write = xgrammar_writing.write if self._trial is None else self._trial
        return self.compiled(write(constraint, limits, marks, drop_space=drop_space))

    def compiled(self, text: str) -> XgrammarGrammar:
        """Compile the text of a grammar. Raises GrammarFailed."""
        return XgrammarGrammar(self, self._library, self._library.compiled(self._compiler, text))

    def fill(self, matchers: Many[Matcher], rows: NDArray[np.int32]) -> list[GrammarFailed | None]:
        assert rows.flags.c_contiguous
        assert rows.shape == (len(matchers), self.vocabulary.words)
        failures: list[GrammarFailed | None] = []
        for index, matcher in enumerate(matchers):
            assert isinstance(matcher, XgrammarMatcher)
            failures.append(matcher.failure)
            if matcher.failure is None:
                rows[index] = matcher.row()
        return failures

    def ends(self, token: int) -> bool:
        return token in self._ends

    def spells(self, token: int) -> bool:
        """Return whether a token has bytes for xgrammar and is no end id."""
        return 0 <= token < self.vocabulary.columns and token not in self._unspelled

    def end_row(self) -> NDArray[np.int32]:
        return self._end_row

    def filled(self, matcher: Any) -> NDArray[np.int32]:
        """Return the mask of the next token; `matcher` is a matcher of the library."""
        import tvm_ffi

        row = np.empty((1, self._words), dtype=np.int32)
        matcher.fill_next_token_bitmask(tvm_ffi.from_dlpack(row), 0, False)
        # The library also sets bits beyond the last token.
        filled: NDArray[np.int32] = row[0, : self.vocabulary.words] & self._valid_row
        return filled


class XgrammarGrammar:
    """A grammar compiled by xgrammar."""

    unmasked = 0

    def __init__(self, compiler: XgrammarCompiler, library: Library, compiled: Any) -> None:
        self._compiler = compiler
        self._library = library
        self._compiled = compiled
        self.size = 10_000 + compiled.memory_size_bytes()

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._compiler, self._library.matcher(self._compiled))


class XgrammarMatcher:
    """A matcher of xgrammar, which receives no end ids, and the number of end ids after the text."""

    __slots__ = ("_compiler", "_ended", "_filled", "_matcher", "failure")
    unmasked = 0

    def __init__(self, compiler: XgrammarCompiler, matcher: Any) -> None:
        self._compiler = compiler
        self._matcher = matcher
        self._ended = 0  # number of end ids after the text
        self._filled: NDArray[np.int32] | None = None  # mask of the next token, once it is computed
        self.failure: GrammarFailed | None = None

    @property
    def accepting(self) -> bool:
        return self._ended > 0 or bool(self._matcher.is_completed())

    @property
    def stopped(self) -> bool:
        return self.accepting and not (self.row() & ~self._compiler.end_row()).any()

    def row(self) -> NDArray[np.int32]:
        """Return the mask of the next token."""
        if self._ended:
            return self._compiler.end_row()
        if self._filled is None:
            self._filled = self._compiler.filled(self._matcher)
        return self._filled

    def advance(self, tokens: Many[int]) -> None:
        for token in tokens:
            if not self._read(token):
                self.failure = GrammarFailed(f"the answer left its constraint: token {token} is not allowed")
                raise self.failure

    def validate(self, tokens: Many[int]) -> int:
        filled, allowed = self._filled, 0
        while allowed < len(tokens) and self._read(tokens[allowed]):
            allowed += 1
        self.rollback(allowed)
        self._filled = filled
        return allowed

    def rollback(self, tokens: int) -> None:
        ends = min(tokens, self._ended)
        self._ended -= ends
        if tokens > ends:
            self._matcher.rollback(tokens - ends)
            self._filled = None

    def copy(self) -> XgrammarMatcher:
        copied = XgrammarMatcher(self._compiler, self._matcher.fork())
        copied._ended, copied._filled, copied.failure = self._ended, self._filled, self.failure
        return copied

    def _read(self, token: int) -> bool:
        """Append a token if the grammar allows it; return whether the token is appended."""
        if self.failure is not None:
            return False
        if self._compiler.ends(token):
            self._ended += self.accepting
            return self._ended > 0
        if self._ended or not self._compiler.spells(token) or not self._matcher.accept_token(token, False):
            return False
        self._filled = None
        return True


def _tokens(vocabulary: Vocabulary, ends: frozenset[int]) -> list[bytes]:
    """Return the tokens for `Library.compiler`, one for each logit; no text matches the bytes of special tokens."""
    special = vocabulary.special | ends
    tokens = [_SPECIAL + token if index in special else token for index, token in enumerate(vocabulary.tokens)]
    return tokens + [b""] * (vocabulary.columns - len(tokens))


def _row(vocabulary: Vocabulary, allowed: Iterable[int]) -> NDArray[np.int32]:
    """Return a row of a mask whose bits are `allowed`."""
    bits = np.zeros(vocabulary.words * 32, dtype=bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
