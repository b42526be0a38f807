"""The interface of structured output: a compiler turns a constraint into a grammar, with a matcher for each choice.

    compiler = ...                                    for one vocabulary; takes a second
    grammar = compiler.compile(constraint, limits)    milliseconds, on a thread; immutable, shared
    matcher = grammar.matcher()                       microseconds to milliseconds; for one choice
    compiler.fill([matcher], rows)                    sets the bits of the tokens that may follow
    matcher.advance([token])                          after sampling

A matcher reads the tokens of its choice, from the first constrained token to the end id. The matcher accepts an end id
where the text is complete; after an end id it accepts only end ids. All errors are GrammarFailed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, ParamSpec, Protocol, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from infd.constraint import Constraint, Restriction
    from infd.errors import GrammarFailed
    from infd.grammar.outline import Outline


P = ParamSpec("P")
R = TypeVar("R")


class Vocabulary(Struct, frozen=True, eq=False):
    """The tokens of a model.

    tokens      bytes that each id adds within a text; empty: the id has no token and is never allowed
    special     ids of tokens that text never matches; such a token is allowed only where a grammar names it
    end_ids     ids that end an answer
    columns     number of logits, at least len(tokens); ids from len(tokens) on are never allowed
    encode      text to ids, without special tokens, on any thread
    drop_space  whether the decoder drops a space that begins an answer
    """

    tokens: Sequence[bytes]
    special: frozenset[int]
    end_ids: frozenset[int]
    columns: int
    encode: Callable[[str], list[int]]
    drop_space: bool = False

    @property
    def words(self) -> int:
        """Return the number of int32 words in a row of a mask."""
        return -(-self.columns // 32)


class Forced(NamedTuple):
    """Tokens that follow. sure: whether the grammar leaves no choice; otherwise they are likely."""

    tokens: list[int]
    sure: bool


class Limits(Struct, frozen=True, kw_only=True):
    """Limits on a constraint's size, checked before compilation, and on the time of a worker's task, see `trial`."""

    text_bytes: int = 2**18  # bytes of all texts of the constraint together
    properties: int = 1000  # properties of all objects of a schema together
    optional: int = 200  # optional properties of one object; with 200 a mask takes up to 20 ms, with 400 up to 80 ms
    enumerated: int = 10_000  # values of enums, options of a choice and alternatives of a grammar, together
    depth: int = 64  # levels of nesting
    seconds: float = 1.0  # processor time; 500 real-world schemas take at most 0.45 s


class Matcher(Protocol):
    """The state of one choice in its grammar. Not thread-safe."""

    @property
    def accepting(self) -> bool:
        """Whether the tokens so far are a complete answer."""

    @property
    def stopped(self) -> bool:
        """Whether no token except an end id may follow."""

    @property
    def unmasked(self) -> int:
        """The number of tokens, from the first of the answer on, that need no mask, as far as the tokens read show.

        If the next token needs a mask, the number is at most the number of tokens read.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens. Raises GrammarFailed at the first token that is not allowed; the matcher is then unusable."""

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of `tokens`, from the first on, are allowed. The matcher's state does not change."""

    def rollback(self, tokens: int) -> None:
        """Remove the last `tokens` of the appended tokens."""

    def copy(self) -> Matcher:
        """Return an independent matcher in an equal state."""


class Grammar(Protocol):
    """A compiled constraint."""

    @property
    def size(self) -> int:
        """Return an estimate of the grammar's memory in bytes, for a bounded cache."""

    @property
    def unmasked(self) -> int:
        """The number of tokens, from the first of an answer on, that need no mask, see Matcher.unmasked."""

    def matcher(self) -> Matcher:
        """Return a matcher before its first token. Takes microseconds; milliseconds for a grammar of 10,000 words."""


class Grammars(Protocol):
    """The grammars of the loaded model. Used on the event loop, except for `fill`, `forced`, `behind` and `closing`."""

    @property
    def closing(self) -> Sequence[int]:
        """Tokens that probably end a free part of an answer: a string or a number of a JSON text."""

    async def compile(self, constraint: Restriction) -> Grammar:
        """Compile a constraint on a thread, or return it from the cache. Raises GrammarFailed."""

    def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a function on the thread for masks, which runs one function at a time."""

    def fill(self, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> list[GrammarFailed | None]:
        """Fill rows of a mask, see Compiler.fill."""

    def forced(
        self, matcher: Matcher, row: NDArray[np.int32], most: int, known: Sequence[int], *, exact: bool
    ) -> Forced:
        """Return tokens that probably follow because the grammar leaves no choice, see `forcing.forced`."""

    def behind(self, matcher: Matcher, row: NDArray[np.int32], most: int, known: Sequence[int]) -> dict[int, list[int]]:
        """Return the tokens that probably follow each token of `closing` that is allowed, see `forcing.behind`."""

    def outline(self, constraint: Restriction | None) -> Outline | None:
        """Return the outline of a compiled constraint; None if it has none."""


class Compiler(Protocol):
    """Compiles constraints for one vocabulary. Any thread may call it."""

    vocabulary: Vocabulary

    def compile(self, constraint: Constraint, limits: Limits) -> Grammar:
        """Compile a constraint. Blocks for milliseconds; releases the GIL.

        Raises GrammarFailed if the constraint is malformed, cannot be enforced exactly, or exceeds a limit.
        """

    def fill(self, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> list[GrammarFailed | None]:
        """Fill a row of a mask for each matcher, in tens of microseconds each, without the GIL.

        matchers  of this compiler's grammars
        rows      [matchers, vocabulary.words] contiguous; bit t % 32 of word t // 32: whether token t may follow
        ->        for each matcher its error, None if its row is filled; a failed matcher's row is undefined
        """
