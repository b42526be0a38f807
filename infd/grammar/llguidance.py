"""Compile with llguidance: derivatives of regular expressions for lexemes, an Earley parser above them.

A schema compiles in about a millisecond, and a mask takes tens of microseconds. llguidance refuses most schemas that
it cannot enforce; `writing` rewrites or refuses the others. Every call releases the GIL.
"""

from __future__ import annotations

import ctypes
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from infd.constraint import Continuation
from infd.errors import GrammarFailed, TooSlow
from infd.grammar import markup, writing
from infd.grammar.binding import Handle, Library, error_of
from infd.grammar.locating import locate
from infd.grammar.refusal import failed, refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from infd.constraint import Constraint
    from infd.grammar.protocol import Limits, Matcher, Vocabulary
    from infd.grammar.trial import Trial
    from infd.grammar.writing import Written

# With this fuel a compilation usually takes at most 20 ms; a mask usually takes 0.02 ms, and at most about 20 ms. A
# matcher creates lexer states as its answer grows: for `.*a.{200}` 50 states for each token. 20,000 states take 10 MiB.
FUEL: Final = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
_SPECIAL: Final = b"\xff"  # marks a token that text never matches


class LlguidanceCompiler:
    """The Compiler of one vocabulary. The constructor takes a second for 150,000 tokens, and releases the GIL."""

    def __init__(self, vocabulary: Vocabulary, trial: Trial | None = None) -> None:
        """Build the compiler.

        trial  writes constraints as grammars in another process, within limits of time and memory; None: this process

        Raises Unavailable if the library is missing or has another C interface.
        """
        self.vocabulary = vocabulary
        self._trial = trial
        self._library = Library()
        self.version = self._library.version
        self._ends = frozenset(each for each in vocabulary.end_ids if each < vocabulary.columns)
        tokens = _tokens(vocabulary, self._ends)
        self._marks = markup.Marks(vocabulary)
        self._handle = self._library.vocabulary(tokens, sorted(self._ends))
        self._end_row = _row(np.isin(np.arange(len(tokens)), sorted(self._ends)))
        self._spaced = _row(np.fromiter((token.startswith(b" ") for token in tokens), dtype=bool, count=len(tokens)))

    def compile(self, constraint: Constraint, limits: Limits) -> LlguidanceGrammar:
        drop_space = self.vocabulary.drop_space
        if isinstance(constraint, Continuation):
            constraint, drop_space = constraint.answer, False
        marks = self._marks.within(constraint)
        if self._trial is None:
            written = writing.write(constraint, limits, marks).written()
        else:
            written = self._trial(constraint, limits, marks, FUEL)
        try:
            if written.refusal is not None:  # compiling the constraint here would take as long, and be refused too
                raise refused(written.refusal)
            compiled, first = self._compile(written.grammars)
        except GrammarFailed as error:
            try:
                located = self._locate(constraint, limits)
            except TooSlow:  # with a longer limit the search may find the path
                raise TooSlow(str(error), code=error.code) from None
            if located is not None:
                raise located from None
            self._check_arguments(written)
            raise
        if drop_space:
            # The decoder drops the space that begins an answer: the tokens of " x" decode to "x". So if the constraint
            # allows a leading space, the grammar requires one space before the answer; otherwise the space is optional.
            space = " " if _any_allowed(first, self._spaced) else " ?"
            begin = json.dumps({"lark_grammar": f'start: "{space[0]}"{space[1:]} @answer'}).encode()
            answer, *parts = written.grammars
            compiled, _ = self._compile([begin, writing.named("answer", answer), *parts])
        return compiled

    def _locate(self, constraint: Constraint, limits: Limits) -> GrammarFailed | None:
        """Return the error, with its path, of the first schema that llguidance refuses alone; None if there is none."""
        if self._trial is None:
            return locate(constraint, limits, lambda grammar: self._compile([grammar]))
        return self._trial.locate(constraint, limits, FUEL)

    def _check_arguments(self, written: Written) -> None:
        """Compile each tool's arguments alone. Raises GrammarFailed with the `param` of the first tool that fails."""
        for param, schema in written.arguments:
            try:
                self._compile([schema])
            except GrammarFailed as error:
                error.param = param
                raise

    def _compile(self, grammars: list[bytes]) -> tuple[LlguidanceGrammar, NDArray[np.int32]]:
        """Compile a list of llguidance's grammars; return the grammar and the mask of its first token.

        Computing the mask detects a grammar that admits no text. It also builds automata that all copies of the matcher
        share.
        """
        text = writing.listed(grammars)
        handle = self._library.matcher(self._handle, text, FUEL)
        matcher = LlguidanceMatcher(self._library.functions, handle, self._handle, self._ends)
        if (error := matcher.error()) is not None:
            raise refused(error)
        row = np.empty((1, self.vocabulary.words), dtype=np.int32)
        (failure,) = self.fill([matcher], row)
        if failure is not None:
            raise refused(matcher.error() or str(failure))
        if not row.any() and not matcher.accepting:
            raise GrammarFailed("no text satisfies the constraint", code="invalid_grammar")
        return LlguidanceGrammar(matcher, len(text)), row[0]

    def fill(self, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> list[GrammarFailed | None]:
        assert rows.flags.c_contiguous
        assert rows.shape == (len(matchers), self.vocabulary.words)
        start, stride = rows.ctypes.data, 4 * self.vocabulary.words
        failures: list[GrammarFailed | None] = []
        for index, matcher in enumerate(matchers):
            assert isinstance(matcher, LlguidanceMatcher)
            if matcher.ended:
                rows[index] = self._end_row
                failures.append(None)
                continue
            failures.append(matcher.fill(start + index * stride, stride))
            matcher.complete = matcher.accepting and not _any_allowed(rows[index], ~self._end_row)
        return failures


class LlguidanceGrammar:
    """A compiled grammar: a matcher that has read no token. Each choice gets a copy."""

    unmasked = 0

    def __init__(self, first: LlguidanceMatcher, text_bytes: int) -> None:
        self._first = first
        self.size = 50_000 + 20 * text_bytes

    def matcher(self) -> LlguidanceMatcher:
        return self._first.copy()


class LlguidanceMatcher:
    """A matcher of llguidance, and the number of end ids after its text.

    llguidance cannot roll back an end id, so this class counts end ids and passes none to llguidance.

    complete  whether the mask after the last token is filled and allows end ids only. llguidance itself reports the
              end of a text only if no terminal can continue. After the 0 of a number with multipleOf the terminal of
              the number can continue, but no continuation matches.
    """

    __slots__ = ("_ended", "_ends", "_functions", "_handle", "_vocabulary", "complete")
    unmasked = 0

    def __init__(self, functions: Any, handle: Handle, vocabulary: Handle, ends: frozenset[int]) -> None:
        self._functions = functions
        self._handle = handle
        self._vocabulary = vocabulary  # must be freed after the matcher
        self._ends = ends
        self._ended = 0  # number of end ids after the text
        self.complete = False

    @property
    def accepting(self) -> bool:
        return self._ended > 0 or bool(self._functions.llg_matcher_is_accepting(self._handle.pointer))

    @property
    def stopped(self) -> bool:
        if self._ended or self.complete:
            return True
        return bool(self._functions.llg_matcher_is_stopped(self._handle.pointer))

    def advance(self, tokens: Sequence[int]) -> None:
        self.complete = self.complete and not tokens
        text = self._text(tokens)
        if text:
            array = (ctypes.c_uint32 * len(text))(*text)
            self._functions.llg_matcher_consume_tokens(self._handle.pointer, array, len(text))
            if (error := self.error()) is not None:
                raise failed(error)
        if len(tokens) > len(text):
            if not self.accepting:
                raise failed("the answer ended before it was complete")
            if any(token not in self._ends for token in tokens[len(text) :]):
                raise failed("a token after the end")
            self._ended += len(tokens) - len(text)

    def validate(self, tokens: Sequence[int]) -> int:
        text = self._text(tokens)
        allowed = 0
        if text:
            array = (ctypes.c_uint32 * len(text))(*text)
            allowed = max(0, self._functions.llg_matcher_validate_tokens(self._handle.pointer, array, len(text)))
        if allowed < len(text) or allowed == len(tokens):
            return allowed
        if text:
            ahead = self.copy()
            ahead.advance(text)
            return allowed + ahead.validate(tokens[allowed:])
        if not self.accepting:
            return 0
        return next((at for at, token in enumerate(tokens) if token not in self._ends), len(tokens))

    def rollback(self, tokens: int) -> None:
        self.complete = self.complete and not tokens
        ends = min(tokens, self._ended)
        self._ended -= ends
        if tokens > ends and self._functions.llg_matcher_rollback(self._handle.pointer, tokens - ends):
            raise failed(self.error() or "rollback failed")

    def copy(self) -> LlguidanceMatcher:
        pointer = self._functions.llg_clone_matcher(self._handle.pointer)
        handle = Handle(pointer, self._functions.llg_free_matcher)
        copied = LlguidanceMatcher(self._functions, handle, self._vocabulary, self._ends)
        copied._ended, copied.complete = self._ended, self.complete
        return copied

    def fill(self, pointer: int, size: int) -> GrammarFailed | None:
        """Fill `size` bytes of a mask at the address `pointer`; return the error if llguidance fails."""
        if self._functions.llg_matcher_compute_mask_into(self._handle.pointer, pointer, size) == 0:
            return None
        return failed(self.error() or "no mask")

    @property
    def ended(self) -> bool:
        """Whether the matcher has read an end id."""
        return self._ended > 0

    def error(self) -> str | None:
        return error_of(self._functions, self._handle)

    def _text(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens before the first end id; no tokens if the matcher has read an end id."""
        if self._ended:
            return ()
        return next((tokens[:at] for at, token in enumerate(tokens) if token in self._ends), tokens)


def _tokens(vocabulary: Vocabulary, ends: frozenset[int]) -> list[bytes]:
    """Return the tokens for `Library.vocabulary`: one for each logit, special tokens with the byte that marks them.

    End ids count as special tokens even if the tokenizer says otherwise, because an end id must never match text.
    """
    special = vocabulary.special | ends
    tokens = [
        _SPECIAL + (token or b"<[%d]>" % index) if index in special else b"" if token.startswith(_SPECIAL) else token
        for index, token in enumerate(vocabulary.tokens)
    ]
    return tokens + [b""] * (vocabulary.columns - len(tokens))


def _row(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return a row of a mask whose bits are `allowed`."""
    padded = np.zeros(-(-allowed.size // 32) * 32, dtype=bool)
    padded[: allowed.size] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


def _any_allowed(row: NDArray[np.int32], of: NDArray[np.int32]) -> bool:
    return bool((row & of).any())
