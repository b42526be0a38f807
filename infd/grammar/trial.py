"""Compile a grammar in a process that can be killed, before it is compiled in this one.

Compilation cannot be interrupted, and fuel does not bound all of its time: llguidance takes time exponential in n to
write the message that refuses `allOf` of n patterns. So a worker first compiles each grammar that may be costly, for a
vocabulary of single bytes. The kernel ends the worker at the time limit, or when memory or stack runs out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.apart.child import serve
from infd.apart.client import Worker
from infd.errors import GrammarFailed, TextFailed, TooCostly

if TYPE_CHECKING:
    from infd.grammar.binding import Handle, Library

MODULE: Final = "infd.grammar.trial"
SECONDS: Final = 2.0
# Keywords that may take more than linear time. A schema without them compiles in linear time.
_COSTLY: Final = ("allOf", "pattern", "patternProperties", "multipleOf")


class Compile(Struct, frozen=True, tag="compile"):
    """Compile llguidance's JSON text `grammar` within `fuel`, and drop the result."""

    grammar: bytes
    fuel: dict[str, int]


class Trial:
    """The daemon's end of the worker. Calls block, so the event loop's thread must not make them."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._worker = Worker(MODULE)
        self._seconds = seconds

    def __call__(self, grammar: bytes, fuel: dict[str, int]) -> None:
        """Raise GrammarFailed for a grammar whose compilation takes too long or ends the process."""
        try:
            self._worker.ask(Compile(grammar, fuel), type(None), seconds=self._seconds)
        except TooCostly as error:
            message = f"compiling the constraint took more than {self._seconds:g} s"
            raise GrammarFailed(message, code="grammar_too_large") from error
        except TextFailed as error:
            raise GrammarFailed("compiling the constraint takes too much memory", code="grammar_too_large") from error

    def close(self) -> None:
        """Stop the process and its task."""
        self._worker.close()


def needed(grammars: list[dict[str, Any]]) -> bool:
    """Return whether compiling these llguidance grammars may take time that neither fuel nor `Limits` bounds."""
    todo: list[Any] = [each.get("json_schema") or each["lark_grammar"] for each in grammars]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if any(name in value for name in _COSTLY):
                return True
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return not all("json_schema" in each for each in grammars)


class _Tasks:
    def __init__(self) -> None:
        from infd.grammar.binding import Library

        self._library: Library = Library()
        self._vocabulary: Handle = self._library.vocabulary([bytes([byte]) for byte in range(255)], [])

    def do(self, task: Compile) -> None:
        self._library.matcher(self._vocabulary, task.grammar, task.fuel)


if __name__ == "__main__":
    serve(Compile, _Tasks().do)
