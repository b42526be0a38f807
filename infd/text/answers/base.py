"""The protocol of syntaxes whose thoughts and calls cannot be parsed apart, because one kind of mark begins both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from infd.request import CallSyntax, Thought
    from infd.text.chat import ChatTemplate
    from infd.text.markup import ThoughtParser
    from infd.text.tools.offered import Offered


class AnswerSyntax(Protocol):
    """How one family of models marks everything in an answer.

    marks  as in ToolSyntax
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    @property
    def grammar(self) -> CallSyntax | None:
        """As in ToolSyntax."""

    def matches(self, template: ChatTemplate) -> bool:
        """Return whether a model with this template answers in this syntax."""

    def thought(self, prompt: str, continued: str) -> Thought | None:
        """As in ReasoningSyntax."""

    def start(self, prompt: str, continued: str, offered: Offered | None) -> ThoughtParser:
        """Start parsing an answer. `offered` as in ToolSyntax; None: a call is content."""
