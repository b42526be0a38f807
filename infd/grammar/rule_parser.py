"""Read the expressions that grammars of several syntaxes have in common: alternatives, sequences and groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn

from infd.errors import GrammarFailed
from infd.grammar import bounds
from infd.grammar.rules import alternatives

if TYPE_CHECKING:
    from infd.grammar.protocol import Limits
    from infd.grammar.rules import Expression


class RuleParser(ABC):
    """A recursive-descent parser. A rule ends where the next rule begins, so line breaks are white space."""

    def __init__(self, grammar: str, limits: Limits) -> None:
        self._grammar = grammar
        self._limits = limits
        self._at = 0
        self._depth = 0
        self._alternatives = 0
        self._kind = ""  # of the present token; empty at the end of the text
        self._value = ""
        self._next()

    @abstractmethod
    def _next(self) -> None:
        """Read the next token into _kind and _value."""

    @abstractmethod
    def _sequence(self) -> Expression:
        """Read a sequence, up to the first token that belongs to none."""

    def _options(self) -> Expression:
        options = [self._sequence()]
        while self._is_mark("|"):
            self._alternatives += 1
            bounds.check_enumerated(self._alternatives, self._limits)
            self._next()
            options.append(self._sequence())
        return alternatives(options)

    def _group(self, closing: str) -> Expression:
        """Read a group, up to the mark that closes it."""
        self._depth += 1
        if self._depth > self._limits.depth:
            raise GrammarFailed(f"more than {self._limits.depth} levels of brackets", code="grammar_too_large")
        self._next()
        options = self._options()
        if not self._is_mark(closing):
            self._fail(f"a {closing} is missing")
        self._depth -= 1
        return options

    def _is_mark(self, mark: str) -> bool:
        return (self._kind, self._value) == ("mark", mark)

    def _fail(self, reason: str) -> NoReturn:
        raise GrammarFailed(f"line {self._line()}: {reason}", code="invalid_grammar")

    def _line(self) -> int:
        return self._grammar.count("\n", 0, min(self._at, len(self._grammar))) + 1
