"""Compile each constraint once for the loaded model, and cache the grammars within a bound in bytes.

Building the compiler of the model's vocabulary takes a second. A thread that compiles grammars builds the compiler
once the model is served; constraints that arrive earlier wait for the compiler. Concurrent requests with equal
constraints share one compilation; once all these requests are cancelled, the compilation is dropped from the queue.
Refusals are cached too, in a part of the cache, so that a costly refusal is not computed again.

Four threads compile, each with a limit of processor time (LIMITS_S). A constraint that exceeds a thread's limit moves
to the next thread. So on each thread a constraint waits only for constraints of similar cost. A constraint that looks
cheap begins on the first thread, any other constraint on the second, so that costly constraints do not delay cheap
constraints. Of 500 real-world schemas half take at most 2 ms, nine in ten at most 34 ms, and all at most 0.45 s. Worker
processes of limited memory write the grammars, see `trial`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import msgspec

from infd.constraint import JsonSchema, ThoughtBudget
from infd.errors import ConfigError, GrammarFailed, InfdError, TooSlow, Unsupported
from infd.grammar import budget, forcing
from infd.grammar.budget import BudgetGrammar
from infd.grammar.outline import MOST_SCHEMA, Outline
from infd.grammar.protocol import Limits
from infd.grammar.recent import Recent
from infd.memory import trim

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from infd.config import GrammarConfig
    from infd.constraint import Constraint, Restriction
    from infd.grammar.protocol import Forced, Grammar, Matcher, Vocabulary
    from infd.grammar.select import AnyTrial, Selection
    from infd.offload import Offload
    from infd.telemetry.metrics import Metrics

P = ParamSpec("P")
R = TypeVar("R")
_LOG = logging.getLogger("infd.grammar")
_REFUSAL_BYTES: Final = 2000
_REFUSALS: Final = 4  # refusals take at most a fourth of the cache, so that they cannot evict all grammars
MOST_OUTLINES: Final = 64
_COSTLY_S = 0.02  # after a longer compilation, freed memory is returned to the operating system

# Limits of processor time of a compilation in seconds, one for each thread that compiles grammars.
LIMITS_S: Final = (0.02, 0.05, 0.25, Limits().seconds)

# Parts of a constraint's JSON that may make even a short constraint costly: kinds of constraint, keywords that combine
# languages, and counted repetition. The JSON contains a schema as a string, so the quotes of keywords are escaped.
_COSTLY: Final = re.compile(
    rb'"type":"(lark|ebnf|structural_tag)"|\\"(allOf|pattern|patternProperties|multipleOf)\\"|\{[0-9]'
)
_SHORT_BYTES: Final = 4096


class Refusal(msgspec.Struct, frozen=True):
    """The error of a constraint that cannot be compiled, in the form in which the cache stores it.

    param  request field at fault; None: the field that holds the constraint
    """

    message: str
    code: str | None
    param: str | None

    def error(self) -> GrammarFailed:
        return GrammarFailed(self.message, code=self.code, param=self.param)


class Result(msgspec.Struct, frozen=True):
    """The result of a compilation.

    size  estimated bytes of the cache's entry
    late  whether the compilation was stopped at its limit of time
    """

    grammar: Grammar | Refusal
    size: int
    seconds: float
    late: bool


class Compilation(msgspec.Struct, eq=False):
    """A constraint that is being compiled, or that waits in a thread's queue.

    requests  number of requests that wait for `result`
    """

    result: Future[Grammar | Refusal]
    requests: int = 1


class GrammarService:
    """The grammars of the loaded model. Implements Grammars, which documents the methods."""

    def __init__(self, config: GrammarConfig, offload: Offload, trial: AnyTrial, metrics: Metrics) -> None:
        """trial: of the engine that `config` names, see `select.trial_of`."""
        self._metrics = metrics
        self._trial = trial
        self._config = config
        self._offload = offload
        self._limits = [Limits(seconds=seconds) for seconds in LIMITS_S]
        self._selecting: Future[Selection] | None = None
        self._compiling: dict[Constraint, Compilation] = {}
        self._grammars: Recent[Grammar] = Recent()
        self._refusals: Recent[Refusal] = Recent()
        self._outlines: Recent[Outline] = Recent()
        self._closing: list[int] | None = None
        self._spellings: dict[str, tuple[int, ...]] = {}  # text of ThoughtBudget.forced -> ids of tokens that spell it

    def describe(self) -> dict[str, object]:
        """Return the chosen library and the refused libraries, for `infdctl ops`.

        Empty until the compiler is built; if building failed, "none" is chosen, with the error as the reason.
        """
        if self._selecting is None or not self._selecting.done():
            return {}
        if (error := self._selecting.exception()) is not None:
            return {"family": "grammar", "chosen": "none", "refused": {self._config.engine: str(error)}}
        selection = self._selecting.result()
        return {"family": "grammar", "chosen": selection.name, "refused": selection.rejected}

    def serve(self, vocabulary: Callable[[], Vocabulary | None]) -> None:
        """Start to build the compiler, on the first thread for grammars.

        vocabulary  returns the model's vocabulary; None if the model's tokens have no text of their own
        """
        self._selecting = self._offload.grammars(0, self._select, vocabulary)
        self._selecting.add_done_callback(_report)

    def close(self) -> None:
        """End the worker processes and their tasks."""
        self._trial.close()

    async def compile(self, constraint: Restriction) -> Grammar:
        if isinstance(constraint, ThoughtBudget):
            answer = None if constraint.answer is None else await self.compile(constraint.answer)
            vocabulary = (await self._selected()).compiler.vocabulary
            forced = [await self._spelled(vocabulary, text) for text in constraint.forced]
            return BudgetGrammar(constraint, vocabulary, forced, answer)
        if (cached := self._grammars.get(constraint) or self._refusals.get(constraint)) is not None:
            self._metrics.grammar_hits += 1
            return _unless_refused(cached)
        selection = await self._selected()
        if (compilation := self._compiling.get(constraint)) is None:
            compilation = self._start(selection, constraint)
        else:
            compilation.requests += 1
        try:
            return _unless_refused(await asyncio.shield(compilation.result))
        finally:
            compilation.requests -= 1

    def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return self._offload.masks(work, *args, **kwargs)

    def fill(self, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> list[GrammarFailed | None]:
        assert self._selecting is not None
        return budget.fill(self._selecting.result().compiler, matchers, rows)

    def forced(
        self, matcher: Matcher, row: NDArray[np.int32], most: int, known: Sequence[int], *, exact: bool
    ) -> Forced:
        return forcing.forced(self.fill, self._vocabulary, matcher, row, most, known, exact=exact)

    def behind(self, matcher: Matcher, row: NDArray[np.int32], most: int, known: Sequence[int]) -> dict[int, list[int]]:
        return forcing.behind(self.fill, self._vocabulary, self.closing, matcher, row, most, known)

    def outline(self, constraint: Restriction | None) -> Outline | None:
        if not isinstance(constraint, JsonSchema) or len(constraint.schema) > MOST_SCHEMA:
            return None
        if (found := self._outlines.get(constraint)) is None:
            words, schema = self._vocabulary, json.loads(constraint.schema)
            found = Outline(schema, words.tokens, words.encode, whitespace=constraint.whitespace)
            self._outlines.add(constraint, found, 1)
            self._outlines.shrink(MOST_OUTLINES)
        return found

    @property
    def _vocabulary(self) -> Vocabulary:
        assert self._selecting is not None
        return self._selecting.result().compiler.vocabulary

    @property
    def closing(self) -> Sequence[int]:
        if self._closing is None:
            self._closing = forcing.closing(self._vocabulary)
        return self._closing

    async def _selected(self) -> Selection:
        if self._selecting is None:
            raise Unsupported("structured output before a model is loaded")
        return await asyncio.shield(self._selecting)

    async def _spelled(self, vocabulary: Vocabulary, text: str) -> tuple[int, ...]:
        if text not in self._spellings:
            self._spellings[text] = await self._offload.grammars(0, budget.spell, vocabulary, text)
        return self._spellings[text]

    def _select(self, read: Callable[[], Vocabulary | None]) -> Selection:
        vocabulary = read()
        if vocabulary is None:
            raise Unsupported("structured output with this model's tokenizer, whose tokens have no text of their own,")
        from infd.grammar.select import select

        try:
            return select(self._config.engine, vocabulary, self._trial)
        except ConfigError as error:  # a client gets a 400, as for any feature that this daemon lacks
            raise Unsupported(f"structured output ({error})") from error

    def _start(self, selection: Selection, constraint: Constraint) -> Compilation:
        """Queue a constraint to be compiled, for one request."""
        compilation = self._compiling[constraint] = Compilation(asyncio.get_running_loop().create_future())
        self._submit(selection, constraint, compilation, 0 if looks_cheap(constraint) else 1)
        return compilation

    def _submit(self, selection: Selection, constraint: Constraint, compilation: Compilation, thread: int) -> None:
        work = self._offload.grammars(thread, _compile, selection, constraint, self._limits[thread], compilation)
        work.add_done_callback(partial(self._on_done, selection, constraint, compilation, thread))

    def _on_done(
        self,
        selection: Selection,
        constraint: Constraint,
        compilation: Compilation,
        thread: int,
        done: Future[Result | None],
    ) -> None:
        """Complete a compilation, or queue the compilation again: after a limit of time, on the next thread."""
        result = compilation.result
        try:
            compiled = done.result()
            if compiled is None:
                if compilation.requests:  # a request arrived after the work was dropped
                    self._submit(selection, constraint, compilation, thread)
                    return
                result.cancel()
            elif compiled.late and thread + 1 < len(self._limits):
                self._metrics.grammar_compile_s += compiled.seconds
                self._submit(selection, constraint, compilation, thread + 1)
                return
            else:
                result.set_result(self._keep(constraint, compiled))
        except asyncio.CancelledError:
            result.cancel()
        except Exception as error:
            result.set_exception(error)
            result.exception()  # if no request is left, asyncio would log the error as never retrieved
        del self._compiling[constraint]

    def _keep(self, constraint: Constraint, result: Result) -> Grammar | Refusal:
        """Cache a result, evict the least recently used results beyond the bound, and return the grammar or refusal."""
        self._metrics.grammar_compiles += 1
        self._metrics.grammar_compile_s += result.seconds
        if isinstance(result.grammar, Refusal):
            self._refusals.add(constraint, result.grammar, result.size)
        else:
            self._grammars.add(constraint, result.grammar, result.size)
        self._refusals.shrink(self._config.cache_bytes // _REFUSALS)
        self._grammars.shrink(self._config.cache_bytes - self._refusals.size)
        self._metrics.grammar_cache_bytes = self._grammars.size + self._refusals.size
        return result.grammar


def looks_cheap(constraint: Constraint) -> bool:
    """Return whether a constraint probably compiles within milliseconds. Takes microseconds."""
    text = msgspec.json.encode(constraint)
    return len(text) <= _SHORT_BYTES and _COSTLY.search(text) is None


def _compile(selection: Selection, constraint: Constraint, limits: Limits, compilation: Compilation) -> Result | None:
    """Compile a constraint; return None, without compiling, if no request waits for it. Called on a thread."""
    if not compilation.requests:
        return None
    began, late = time.monotonic(), False
    size = len(msgspec.json.encode(constraint))
    found: Grammar | Refusal
    try:
        found = selection.compiler.compile(constraint, limits)
        size += found.size
    except GrammarFailed as error:
        found, late = Refusal(str(error), error.code, error.param), isinstance(error, TooSlow)
        size += _REFUSAL_BYTES
    seconds = time.monotonic() - began
    if seconds > _COSTLY_S:
        trim()
    return Result(found, size, seconds, late)


def _unless_refused(result: Grammar | Refusal) -> Grammar:
    if isinstance(result, Refusal):
        raise result.error()
    return result


def _report(selecting: Future[Selection]) -> None:
    """Log the error of a compiler that could not be built. Constrained requests are refused with this error."""
    if selecting.cancelled() or (error := selecting.exception()) is None:
        return
    if isinstance(error, InfdError):
        _LOG.warning("requests for structured output are refused", extra={"reason": str(error)})
    else:
        _LOG.error("the grammar compiler failed to build", exc_info=error)
