"""The engines that compile grammars, for tests that run with each of them.

A module that uses the fixture `engine` runs with each; `compiler` builds the compiler of the present one, and `each`
keeps what a function returns, for each engine apart. INFD_TEST_GRAMMAR_ENGINE names the only engine to test.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import GrammarConfig
from infd.errors import GrammarFailed
from infd.grammar import writing, xgrammar_writing
from infd.grammar.llguidance import LlguidanceCompiler
from infd.grammar.select import trial_of
from infd.grammar.xgrammar import XgrammarCompiler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infd.constraint import Constraint
    from infd.grammar.protocol import Compiler, Grammar, Limits, Vocabulary

ENGINES = ("llguidance", "xgrammar")
NAMED = os.environ.get("INFD_TEST_GRAMMAR_ENGINE")
PRESENT: ContextVar[str] = ContextVar("PRESENT", default=NAMED or ENGINES[0])


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the engine with which the module's tests run."""
    if NAMED is not None and request.param != NAMED:
        pytest.skip(f"INFD_TEST_GRAMMAR_ENGINE is {NAMED}")
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    before = PRESENT.set(request.param)
    yield request.param
    PRESENT.reset(before)


def compiler(vocabulary: Vocabulary, trial: Any = None) -> Compiler:
    """Return the present engine's compiler. A test of a kind of constraint that the engine does not keep is skipped."""
    if PRESENT.get() == "llguidance":
        return LlguidanceCompiler(vocabulary, trial)
    return _Skipping(vocabulary, trial)


class _Skipping(XgrammarCompiler):
    def compile(self, constraint: Constraint, limits: Limits) -> Grammar:
        try:
            return super().compile(constraint, limits)
        except GrammarFailed as refusal:
            if "kept by llguidance only" in str(refusal):
                pytest.skip(str(refusal))
            raise


def trial() -> Any:
    """Return a trial for the present engine's compiler."""
    return trial_of(PRESENT.get())


def config(**settings: Any) -> GrammarConfig:
    """Return settings that name the present engine."""
    return GrammarConfig(engine=PRESENT.get(), **settings)  # type: ignore[arg-type]


class Untried:
    """A trial for the present engine's compiler that writes in this process, without limits of time.

    before  called with the limits of each constraint
    """

    def __init__(self, before: Callable[[Limits], None] = lambda limits: None) -> None:
        self.before = before
        self._engine = PRESENT.get()

    def __call__(
        self,
        constraint: Constraint,
        limits: Limits,
        marks: dict[str, int],
        fuel: dict[str, int] | None = None,
        *,
        drop_space: bool = False,
    ) -> Any:
        self.before(limits)
        if self._engine == "llguidance":
            return writing.write(constraint, limits, marks).written()
        return xgrammar_writing.write(constraint, limits, marks, drop_space=drop_space)

    def set_vocabulary(self, tokens: Sequence[bytes], ends: Sequence[int]) -> None:
        pass

    def locate(self, constraint: Constraint, limits: Limits, fuel: dict[str, int]) -> None:
        pass

    def close(self) -> None:
        pass


def each(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a function returns, by engine and arguments."""
    kept = functools.lru_cache(maxsize=64)(lambda engine, *arguments, **named: function(*arguments, **named))
    return functools.wraps(function)(lambda *arguments, **named: kept(PRESENT.get(), *arguments, **named))
