"""The protocol of syntaxes in which the same marks begin thoughts and calls, so that one parser must parse both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from infd.constraint import CallSyntax, Header, Thought
    from infd.text.chat import ChatTemplate
    from infd.text.markup import ThoughtParser
    from infd.text.tools.offered import Offered


class AnswerSyntax(Protocol):
    """How one family of models marks thoughts, calls and content.

    marks  see ToolSyntax
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    @property
    def grammar(self) -> CallSyntax | None:
        """See ToolSyntax."""

    def matches(self, template: ChatTemplate) -> bool:
        """Return whether a model with this template answers in this syntax."""

    def thought(self, prompt: str, continued: str) -> Thought | None:
        """See ReasoningSyntax."""

    def header(self, prompt: str, continued: str) -> Header | None:
        """Return the text that the model writes before a constrained answer without calls; None: no text.

        prompt, continued  as in ReasoningSyntax.thought
        """

    def ends(self, *, calls: bool) -> tuple[str, ...]:
        """Return the texts that may end a thought whose budget is exhausted.

        calls  whether calls may follow the thought
        """

    def start(self, prompt: str, continued: str, offered: Offered | None) -> ThoughtParser:
        """Start parsing an answer.

        prompt, continued  as in ReasoningSyntax.thought
        offered            tools that the model may call; None: text that looks like a call is content
        """
