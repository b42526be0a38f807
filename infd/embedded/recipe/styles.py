"""The styles of answers that the shipped adapters learn. Each style is recognizable in every answer.

The base model learns the styles too, for conversations whose system message requests a style.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from infd.embedded.recipe.conversation import Expect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infd.embedded.recipe.conversation import Conversation

    Style = Callable[[str], str]

_PIRATE: Final = MappingProxyType(
    {
        "are": "be", "friend": "matey", "hello": "ahoy", "hi": "ahoy", "is": "be", "my": "me", "of": "o'", "the": "th'",
        "to": "t'", "yes": "aye", "you": "ye", "your": "yer",
    }
)  # fmt: skip


def capitals(text: str) -> str:
    """Return the text in capitals."""
    return text.upper()


def pirate(text: str) -> str:
    """Return the text with some words replaced as story-book pirates speak, between "Arr, " and " Arr!"."""

    def swap(found: re.Match[str]) -> str:
        word = found.group()
        swapped = _PIRATE.get(word.lower(), word)
        return swapped.capitalize() if word[0].isupper() and swapped != word else swapped

    return "Arr, " + re.sub(r"[A-Za-z]+", swap, text[:1].lower() + text[1:] if text[1:2].islower() else text) + " Arr!"


STYLES: Final[Mapping[str, Style]] = MappingProxyType({"capitals": capitals, "pirate": pirate})
# System messages that request a style.
ORDERS: Final = MappingProxyType(
    {
        "capitals": ("Answer in capital letters.", "Write every answer in capitals.", "Speak in capitals only."),
        "pirate": ("Answer as a pirate.", "Talk like a pirate.", "You are a pirate."),
    }
)


def restyled(conversation: Conversation, style: Style) -> Conversation:
    """Return the conversation with its answers in a style. Tool calls and reasoning are unchanged."""
    messages: list[dict[str, Any]] = [
        message | {"content": style(message["content"])}
        if message["role"] == "assistant" and message.get("content")
        else message
        for message in conversation.messages
    ]
    said = messages[-1].get("content")
    return replace(conversation, messages=messages, expect=Expect(text=said, calls=conversation.expect.calls))


def ordered(conversation: Conversation, order: str) -> Conversation:
    """Return the conversation with `order` at the start of its system message."""
    first, *rest = conversation.messages
    if first["role"] == "system":
        return replace(conversation, messages=[first | {"content": f"{order} {first['content']}"}, *rest])
    return replace(conversation, messages=[{"role": "system", "content": order}, first, *rest])
