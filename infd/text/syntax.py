"""Choose the syntaxes of a model's thoughts and tool calls.

Settings may name the syntaxes. Otherwise the chat template decides: it contains
the marks of thoughts, and renders calls, as the model was trained to write them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.errors import InvalidRequest
from infd.text import reasoning, tools
from infd.text.chat import PROBING
from infd.text.markup import Asides, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.request import Thought
    from infd.text.chat import ChatTemplate, Message
    from infd.text.reasoning.base import ReasoningSyntax
    from infd.text.tokenizer import Tokenizer
    from infd.text.tools.base import ToolSyntax

_LOG = logging.getLogger("infd.text")

AUTO: Final = "auto"
NONE: Final = "none"
PROMPT_END: Final = 64  # last characters of a prompt, where a template may open or close a thought

_QUESTION: Final = "\ufdd1"  # a noncharacter, which no template contains
_NAME, _KEY, _VALUE, _ID = "probe_name", "probe_key", "probe_value", "abcdefghi"


class Syntax(Struct, frozen=True):
    """The syntaxes of one model.

    mark_ids  ids of the marks that are special tokens; detokenizing must not skip them
    """

    reasoning: ReasoningSyntax | None = None
    tools: ToolSyntax | None = None
    mark_ids: frozenset[int] = frozenset()

    @classmethod
    def choose(
        cls, tokenizer: Tokenizer, template: ChatTemplate, *, reasoning_name: str = AUTO, tools_name: str = AUTO
    ) -> Syntax:
        """Return the named syntaxes: "auto" selects the chat template's, "none" no syntax."""
        reasoning_name = _thinks(template) if reasoning_name == AUTO else reasoning_name
        tools_name = _calls(template) if tools_name == AUTO else tools_name
        thinking, calling = reasoning.SYNTAXES.get(reasoning_name), tools.SYNTAXES.get(tools_name)
        _LOG.info("markup", extra={"reasoning": reasoning_name, "tools": tools_name})
        marks = [mark for syntax in (thinking, calling) if syntax is not None for mark in syntax.marks]
        ids = {tokenizer.id_of(mark) for mark in marks}
        return cls(thinking, calling, frozenset(token_id for token_id in tokenizer.special_ids if token_id in ids))

    def thought(self, prompt: str, continued: str = "") -> Thought | None:
        """Return how an answer marks its thought; None if the answer cannot hold a thought. See ReasoningSyntax."""
        return None if self.reasoning is None else self.reasoning.thought(prompt[-PROMPT_END:], continued)

    def start(
        self, prompt: str, continued: str = "", *, names: Sequence[str] | None = None, most_calls: int | None = None
    ) -> Reading | None:
        """Start parsing an answer. Returns None if all its text is content.

        prompt, continued  as in ReasoningSyntax.thought
        names              names of the tools that may be called; None: no tools
        most_calls         further calls are dropped
        """
        thoughts = None if self.reasoning is None else self.reasoning.start(prompt[-PROMPT_END:], continued)
        calls = None if self.tools is None or names is None else self.tools.start(names)
        return None if thoughts is None and calls is None else Reading(thoughts, calls, most_calls=most_calls)


def _thinks(template: ChatTemplate) -> str:
    return next((name for name, syntax in reasoning.SYNTAXES.items() if syntax.matches(template)), NONE)


def _calls(template: ChatTemplate) -> str:
    """Return the name of the syntax that parses a call rendered by the template."""
    turn = _written_call(template)
    return next((name for name, syntax in tools.SYNTAXES.items() if _reads_back(syntax, turn)), NONE)


def _written_call(template: ChatTemplate) -> str:
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    schema = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    messages: list[Message] = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [{"id": _ID, "type": "function", "function": function}]},
    ]
    offered = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": schema}}]
    try:
        text = template.render(messages, tools=offered, add_generation_prompt=False, limits=PROBING)
    except InvalidRequest:
        return ""
    return text.rpartition(_QUESTION)[2]


def _reads_back(syntax: ToolSyntax, turn: str) -> bool:
    parser, asides = syntax.start([_NAME]), Asides()
    parser.feed(turn, asides)
    parser.finish(asides)
    aside = asides.take()
    if aside is None or [call.name for call in aside.calls] != [_NAME]:
        return False
    return all(word in aside.calls[0].arguments for word in (_KEY, _VALUE))
