"""The protocol of every syntax of tool calls.

A call is emitted as soon as its name is complete and its arguments begin. Arguments are
JSON text; if the model writes JSON, the arguments are emitted verbatim, so a streamed
answer and a collected answer contain equal text. An emitted call stays a call, even if the
model never closes the call or writes arguments that are not JSON. A call that is malformed
before it is emitted is content.

A call of a tool that was not offered is also emitted as a call, so that the client
can reply to the model with an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from infd.constraint import CallSyntax
    from infd.text.markup import Parser
    from infd.text.tools.offered import Offered


class ToolSyntax(Protocol):
    """How one family of models writes tool calls.

    marks  tokens that detokenizing must not skip, even if the tokenizer declares them special
    opens  marks that begin a call; at the beginning of a line, a mark that begins with < or [ also ends a thought
           that the model has left open
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    @property
    def opens(self) -> tuple[str, ...]: ...

    @property
    def grammar(self) -> CallSyntax | None:
        """The syntax in which a grammar forces calls; None: calls cannot be forced."""

    def start(self, offered: Offered) -> Parser:
        """Start parsing an answer; `offered` are the tools that the model may call."""
