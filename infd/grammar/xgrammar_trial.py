"""Write constraints as grammars of xgrammar and compile them on trial, in processes that can be killed.

Compilation cannot be interrupted. Its time is proportional to the tokens of the vocabulary times the states of the
grammar. So a worker with the vocabulary of the model writes each constraint and compiles the grammar, within limits of
time and memory, before the daemon compiles the same grammar. The compiled grammar itself is not sent: serialized, the
grammar of an object of 200 optional properties has 58 MB and takes ten times as long as its compilation.
"""

from __future__ import annotations

import os
import sys
from mmap import ACCESS_READ, mmap
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from infd.constraint import Constraint  # noqa: TC001 (msgspec reads annotations)
from infd.grammar import xgrammar_writing
from infd.grammar.forks import work
from infd.grammar.protocol import Limits  # noqa: TC001 (msgspec reads annotations)
from infd.grammar.workers import Outcome, Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE: Final = "infd.grammar.xgrammar_trial"
SLOWNESS: Final = 3  # xgrammar compiles slower than llguidance: a trial has this many times the time of its Limits


class Vocabulary(Struct, frozen=True):
    """The arguments of `Library.compiler`."""

    tokens: list[bytes]
    ends: list[int]


class Compile(Struct, frozen=True, tag="compile"):
    """Write a constraint, compile its grammar and drop the result; the outcome is the text of the grammar.

    marks       mark -> id of the token that spells the mark
    drop_space  whether the decoder drops a space that begins the answer
    """

    constraint: Constraint
    limits: Limits
    marks: dict[str, int]
    drop_space: bool


class XgrammarTrial:
    """Sends tasks to the workers. Calls block, so the event loop's thread must not make them.

    The workers read the vocabulary from a file in memory, because a worker needs it before it forks the first child.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("infd-vocabulary")
        self.workers = Workers(MODULE, (self._file,))

    def set_vocabulary(self, tokens: Sequence[bytes], ends: Sequence[int]) -> None:
        """Set the vocabulary, before the first constraint."""
        with open(self._file, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(Vocabulary(list(tokens), list(ends))))

    def __call__(self, constraint: Constraint, limits: Limits, marks: dict[str, int], *, drop_space: bool) -> str:
        """Return the text of a constraint's grammar, which xgrammar has compiled within the limits.

        Raises TooSlow after SLOWNESS times `limits.seconds`, another GrammarFailed for a refused constraint, and
        GrammarInterrupted.
        """
        limits = replace(limits, seconds=SLOWNESS * limits.seconds)
        return self.workers.ask(Compile(constraint, limits, marks, drop_space), Outcome[str]).checked(limits)

    def close(self) -> None:
        """Stop the workers and their tasks."""
        self.workers.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Tasks:
    """Runs tasks in the child. Created in the parent, before the fork."""

    def __init__(self, file: int) -> None:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # tvm_ffi does not need torch
        from infd.grammar.xgrammar_library import Library

        with mmap(file, 0, access=ACCESS_READ) as data:
            vocabulary = msgspec.msgpack.decode(memoryview(data), type=Vocabulary)
        self._library = Library()
        self._compiler = self._library.compiler(vocabulary.tokens, vocabulary.ends)

    def do(self, task: Compile) -> Outcome[str]:
        text = xgrammar_writing.write(task.constraint, task.limits, task.marks, drop_space=task.drop_space)
        self._library.compiled(self._compiler, text)
        return Outcome(text)


if __name__ == "__main__":
    work(Compile, _Tasks(int(sys.argv[2])).do)
