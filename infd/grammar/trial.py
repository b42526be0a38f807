"""Write constraints as grammars of llguidance, and compile costly grammars on trial, in processes that can be killed.

Rewriting a schema takes up to a second of Python, in which the event loop's thread would wait for the GIL. On a busy
machine the wait is many times longer, because the thread that holds the GIL may not be scheduled. Compilation by
llguidance cannot be interrupted, and fuel does not bound all of its time: for `allOf` of n patterns llguidance takes
time exponential in n to write the message of the refusal. A worker starts in 0.15 s and takes 17 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from infd.constraint import Constraint  # noqa: TC001 (msgspec reads annotations)
from infd.errors import GrammarFailed
from infd.grammar.forks import work
from infd.grammar.locating import locate
from infd.grammar.protocol import Limits  # noqa: TC001 (msgspec reads annotations)
from infd.grammar.refusal import refused
from infd.grammar.workers import Outcome, Workers
from infd.grammar.writing import Written, encoded, listed, write

if TYPE_CHECKING:
    from infd.grammar.binding import Handle, Library

MODULE: Final = "infd.grammar.trial"


class Write(Struct, frozen=True, tag="write"):
    """Write a constraint; compile its costly parts within `fuel`, to see whether the compilation ends and is refused.

    marks  mark -> id of the token that spells the mark
    """

    constraint: Constraint
    limits: Limits
    marks: dict[str, int]
    fuel: dict[str, int]


class Locate(Struct, frozen=True, tag="locate"):
    """Find the part of a constraint's schema that llguidance refuses within `fuel`.

    `Outcome.fault` is the part's error; the outcome is empty if llguidance refuses no part.
    """

    constraint: Constraint
    limits: Limits
    fuel: dict[str, int]


class Trial:
    """Sends tasks to the workers. Calls block, so the event loop's thread must not make them."""

    def __init__(self) -> None:
        self.workers = Workers(MODULE)

    def __call__(self, constraint: Constraint, limits: Limits, marks: dict[str, int], fuel: dict[str, int]) -> Written:
        """Write a constraint.

        Raises TooSlow after `limits.seconds`, another GrammarFailed for a refused constraint, and GrammarInterrupted.
        """
        return self.workers.ask(Write(constraint, limits, marks, fuel), Outcome[Written]).checked(limits)

    def locate(self, constraint: Constraint, limits: Limits, fuel: dict[str, int]) -> GrammarFailed | None:
        """Return the error, with its path, of the first schema that llguidance refuses alone; None if none is found.

        Raises TooSlow after `limits.seconds`, and GrammarInterrupted.
        """
        outcome = self.workers.ask(Locate(constraint, limits, fuel), Outcome[None])
        outcome.check_time(limits)
        failure = None if outcome.fault is None else outcome.fault.error()
        return failure if isinstance(failure, GrammarFailed) else None

    def close(self) -> None:
        """Stop the workers and their tasks."""
        self.workers.close()


class _Tasks:
    """Runs tasks in the child. Created in the parent, before the fork."""

    def __init__(self) -> None:
        from infd.grammar.binding import Library

        self._library: Library = Library()
        self._vocabulary: Handle = self._library.vocabulary([bytes([byte]) for byte in range(255)], [])

    def do(self, task: Write | Locate) -> Outcome[Written]:
        match task:
            case Locate(constraint, limits, fuel):
                error = locate(constraint, limits, lambda grammar: self._compile(grammar, fuel))
                if error is not None:
                    raise error
                return Outcome()
            case Write(constraint, limits, marks, fuel):
                draft = write(constraint, limits, marks)
                messages = (self._message(encoded(grammar), fuel) for grammar in draft.costly)
                refusal = next((message for message in messages if message is not None), None)
                return Outcome(replace(draft.written(), refusal=refusal))

    def _compile(self, grammar: bytes, fuel: dict[str, int]) -> None:
        """Raise GrammarFailed for a grammar that llguidance refuses."""
        if (message := self._message(grammar, fuel)) is not None:
            raise refused(message)

    def _message(self, grammar: bytes, fuel: dict[str, int]) -> str | None:
        """Compile a grammar; return llguidance's message of refusal, None if the grammar is compiled."""
        from infd.grammar.binding import error_of

        return error_of(self._library.functions, self._library.matcher(self._vocabulary, listed([grammar]), fuel))


if __name__ == "__main__":
    work(Write | Locate, _Tasks().do)
