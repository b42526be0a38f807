"""Choose the library that compiles grammars, with the reason against each other one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import ConfigError
from infd.grammar.binding import Unavailable

if TYPE_CHECKING:
    from infd.grammar.protocol import Compiler, Vocabulary
    from infd.grammar.trial import Trial


class Selection(Struct, frozen=True):
    """A compiler, and why no other one.

    name      of the library, with its version
    rejected  reasons by name of the other libraries
    """

    compiler: Compiler
    name: str
    rejected: dict[str, str]


def select(engine: str, vocabulary: Vocabulary, trial: Trial) -> Selection:
    """Build the compiler that `engine` names; auto: llguidance. Takes a second for 150,000 tokens.

    trial  compiles what may take too long, before this process does

    Raises ConfigError if it cannot be had.
    """
    if engine == "xgrammar":
        raise ConfigError("grammar.engine: xgrammar is not supported yet; unset it")
    from infd.grammar.llguidance import LlguidanceCompiler

    try:
        compiler = LlguidanceCompiler(vocabulary, trial)
    except Unavailable as error:
        raise ConfigError(f"grammar.engine: {error}") from error
    return Selection(compiler, f"llguidance {compiler.version}", {})
