"""Families of the shape "marks around JSON", see `TagJson`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.request import CallSyntax
from infd.text.tools.tag_json import TagJson

if TYPE_CHECKING:
    from collections.abc import Mapping

HERMES: Final = TagJson(
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    grammar=CallSyntax(
        call='<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>',
        trigger="<tool_call>",
        marks=("<tool_call>", "</tool_call>"),
    ),
)

KIMI_K2: Final = TagJson(
    opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    head=(
        r"(?:<\|tool_call_begin\|>)?\s*+"
        r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]++)(?::\d++)?)\s*+<\|tool_call_argument_begin\|>\s*+"
    ),
)

FAMILIES: Final[Mapping[str, TagJson]] = {"hermes": HERMES, "kimi_k2": KIMI_K2}
ALIASES: Final[Mapping[str, str]] = {"qwen": "hermes", "qwen25": "hermes", "qwen3_json": "hermes"}
