"""Compile a grammar with xgrammar in a process that can be killed, before the daemon compiles the grammar.

Compilation cannot be interrupted. Its time is proportional to the tokens of the vocabulary times the states of the
grammar. So a worker process with the same vocabulary compiles each grammar first, within limits of time and memory.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.apart.child import serve
from infd.apart.client import Worker
from infd.errors import GrammarFailed, TextFailed, TooCostly

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE: Final = "infd.grammar.xgrammar_trial"
SECONDS: Final = 3.0
_START_S: Final = 60.0


class Vocabulary(Struct, frozen=True, tag="vocabulary"):
    """The vocabulary of all later tasks: the arguments of `Library.compiler`."""

    tokens: list[bytes]
    ends: list[int]


class Compile(Struct, frozen=True, tag="compile"):
    """Compile a grammar within limits of time and memory, and drop the result."""

    grammar: str


class XgrammarTrial:
    """Sends tasks to a worker, which ends with the daemon. Calls block: the event loop's thread must not make them."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._worker = Worker(MODULE)
        self._seconds = seconds
        self._vocabulary: Vocabulary | None = None

    def set_vocabulary(self, tokens: Sequence[bytes], ends: Sequence[int]) -> None:
        """Set the vocabulary of later grammars. The worker receives the vocabulary with the next grammar."""
        self._vocabulary = Vocabulary(list(tokens), list(ends))

    def __call__(self, grammar: str) -> None:
        """Compile a grammar. Raises GrammarFailed if the compilation takes too long or ends the process."""
        try:
            if self._vocabulary is not None:
                self._worker.keep(self._vocabulary, type(None), seconds=_START_S)
                self._vocabulary = None
            self._worker.ask(Compile(grammar), type(None), seconds=self._seconds)
        except TooCostly as error:
            message = f"compiling the constraint took more than {self._seconds:g} s"
            raise GrammarFailed(message, code="grammar_too_large") from error
        except TextFailed as error:
            raise GrammarFailed("compiling the constraint takes too much memory", code="grammar_too_large") from error

    def close(self) -> None:
        """Stop the worker and its task."""
        self._worker.close()


class _Tasks:
    def __init__(self) -> None:
        self._compiler: Any = None

    def do(self, task: Vocabulary | Compile) -> None:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # tvm_ffi does not need torch
        from infd.grammar.xgrammar import Library

        library = Library()
        if isinstance(task, Vocabulary):
            self._compiler = library.compiler(task.tokens, task.ends)
        else:
            library.compiled(self._compiler, task.grammar)


if __name__ == "__main__":
    serve(Vocabulary | Compile, _Tasks().do)
