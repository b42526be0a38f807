"""What every syntax of tool calls is.

A call is told as soon as its name is known and its arguments begin, and the
arguments as the model writes them, character by character: so they can stream,
and are the same text whether they do or not. From then on it is a call, even if
the model never closes it or writes arguments that are no JSON. Whatever does not
get that far is content, as it was written.

A call of a tool that was not offered is a call too: only the client can tell the
model so, and it would not find it out from a text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.text.markup import Parser


class ToolSyntax(Protocol):
    """How one family of models calls tools.

    marks  tokens that must be written out for it to be read, even if the tokenizer calls them special
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    def start(self, names: Sequence[str]) -> Parser:
        """Begin an answer to one who offers tools of these names."""
