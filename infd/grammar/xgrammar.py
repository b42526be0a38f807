"""Compile with xgrammar: an automaton for each rule, with the tokens that each state admits, and a parser above them.

Compilation tries most of the tokens at most of the states: with 150,000 tokens a state takes up to milliseconds. Masks
take little time.
xgrammar's own parsers of schemas and regular expressions ignore keywords and syntax that they do not support, so infd
does not use them: `gbnf` writes each grammar from rules, which are exact. Every call releases the GIL.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from infd.errors import GrammarFailed
from infd.grammar import constraint_rules, gbnf, markup, rules
from infd.grammar.binding import Unavailable
from infd.grammar.rules import ROOT, Reference, Repeated, Sequence, Text
from infd.request import Continuation

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Many

    from numpy.typing import NDArray

    from infd.grammar.protocol import Limits, Matcher, Vocabulary
    from infd.request import Constraint

_OBJECTS: Final = "xgrammar.tvm_ffi_binding."
_RAW: Final = 0  # vocabulary type: tokens are given as their bytes
_SPECIAL: Final = b"\xff"  # UTF-8 never contains this byte, so no rule matches the byte
_TEXT_BYTES: Final = 2**20  # most bytes of a written grammar


class Library:
    """The library without its Python package, because the package's import takes seconds. Raises Unavailable."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("xgrammar")  # does not import the package
        folders = [] if found is None else [Path(each) for each in found.submodule_search_locations or []]
        files = [file for folder in folders for file in sorted(folder.glob("libxgrammar_bindings.*"))]
        if not files or importlib.util.find_spec("tvm_ffi") is None:
            raise Unavailable("xgrammar is not installed; install infd[xgrammar]")
        self.version = importlib.metadata.version("xgrammar")
        try:
            self._vocabulary, self._compiler, self._matcher = _loaded(str(files[0]))
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise Unavailable(f"xgrammar {self.version} has another interface: {error}") from error

    def compiler(self, tokens: Many[bytes], ends: Many[int]) -> Any:
        """Build xgrammar's compiler of a vocabulary. Takes a tenth of a second for 150,000 tokens.

        tokens  by id, one for each logit; an empty token is never allowed
        """
        return self._compiler(self._vocabulary(list(tokens), _RAW, len(tokens), list(ends), False), 1, False, -1)

    def compiled(self, compiler: Any, grammar: str) -> Any:
        """Compile a grammar. Raises GrammarFailed."""
        try:
            return compiler.compile_grammar_from_strings(grammar, ROOT)
        except RuntimeError as error:
            lines = str(error).strip().splitlines() or ["failed"]
            raise GrammarFailed(f"the constraint is too complex: {lines[0][:300]}", code="grammar_too_large") from error

    def matcher(self, compiled: Any) -> Any:
        return self._matcher(compiled, None, False, -1, None)


@cache
def _loaded(file: str) -> tuple[Any, Any, Any]:
    """Load the library. Cached, because its types may be registered under their names only once in a process."""
    import tvm_ffi

    tvm_ffi.load_module(file)
    names = ("TokenizerInfo", "GrammarCompiler", "GrammarMatcher", "CompiledGrammar")
    types = [tvm_ffi.register_object(_OBJECTS + name)(type(name, (tvm_ffi.Object,), {})) for name in names]
    return types[0], types[1], types[2]


class Trial(Protocol):
    """Compiles grammars in a process that can be killed: see XgrammarTrial."""

    def set_vocabulary(self, tokens: Many[bytes], ends: Many[int]) -> None:
        """Set the vocabulary of later grammars; the arguments are those of `Library.compiler`."""

    def __call__(self, grammar: str) -> None:
        """Raise GrammarFailed for a grammar that takes too long or too much memory."""


class XgrammarCompiler:
    """The Compiler of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, trial: Trial | None = None) -> None:
        """Build the compiler.

        trial  first compiles each grammar in a process that can be killed; None: compilation is not limited

        Raises Unavailable if the library is missing or of another version.
        """
        self.vocabulary = vocabulary
        self._trial = trial
        self._library = Library()
        self.version = self._library.version
        self._ends = frozenset(each for each in vocabulary.end_ids if each < vocabulary.columns)
        self._marks = markup.Marks(vocabulary)
        tokens = _tokens(vocabulary, self._ends)
        # Without end ids xgrammar would guess them from the names of tokens. So an id without a token replaces them.
        ends = sorted(self._ends) or [tokens.index(b"")]
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
        found = constraint_rules.write(constraint, limits, self._marks.token_of)
        if drop_space:
            # The decoder drops the space that begins an answer: the tokens of " x" decode to "x". So if the constraint
            # allows a leading space, the grammar requires one space before the answer; otherwise the space is optional.
            least = int(rules.begins(found, ord(" ")))
            answer = found.pop(ROOT)
            found = {ROOT: Sequence((Repeated(Text(" "), least, 1), Reference("answer"))), "answer": answer, **found}
        return self.compiled(gbnf.write(found))

    def compiled(self, text: str) -> XgrammarGrammar:
        """Compile a grammar as `gbnf` writes it. Raises GrammarFailed."""
        if len(text) > _TEXT_BYTES:
            raise GrammarFailed(f"{len(text):,} bytes of grammar; at most {_TEXT_BYTES:,}", code="grammar_too_large")
        if self._trial is not None:
            self._trial(text)
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

        row = np.empty((1, self.vocabulary.words), dtype=np.int32)
        matcher.fill_next_token_bitmask(tvm_ffi.from_dlpack(row), 0, False)
        row[0] &= self._valid_row  # clears bits that the library sets beyond the last token
        filled: NDArray[np.int32] = row[0]
        return filled


class XgrammarGrammar:
    """A grammar compiled by xgrammar."""

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
