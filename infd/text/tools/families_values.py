"""Families of the shape "marks around each value", see `TagValues`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.text.tools.tag_values import ATTRIBUTES, KEY, NAME, SPACE, TagValues

if TYPE_CHECKING:
    from collections.abc import Mapping


def _functions(opening: str, closing: str, *, newlines: bool) -> TagValues:
    """Return the family that writes <function=...> and <parameter=...> between two marks."""
    return TagValues(
        sections=(opening,),
        head=("<function=", NAME, ">"),
        parameter=("<parameter=", KEY, ">"),
        value_end="</parameter>",
        call_end="</function>",
        closes=(closing,),
        newlines=newlines,
    )


def _dsml(section: str) -> TagValues:
    return TagValues(
        sections=(f"<｜DSML｜{section}>",),
        head=('<｜DSML｜invoke name="', NAME, '">'),
        parameter=('<｜DSML｜parameter name="', KEY, '"', ATTRIBUTES, ">"),
        value_end="</｜DSML｜parameter>",
        call_end="</｜DSML｜invoke>",
        closes=(f"</｜DSML｜{section}>",),
        strings=frozenset({'string="true"'}),
        documents=frozenset({'string="false"'}),
    )


GLM: Final = TagValues(
    head=("<tool_call>", SPACE, NAME, SPACE, ("<arg_key>", "</tool_call>")),
    parameter=("<arg_key>", KEY, "</arg_key>", SPACE, "<arg_value>"),
    value_end="</arg_value>",
    call_end="</tool_call>",
)

FAMILIES: Final[Mapping[str, TagValues]] = {
    "qwen3_coder": _functions("<tool_call>", "</tool_call>", newlines=True),
    "seed_oss": _functions("<seed:tool_call>", "</seed:tool_call>", newlines=False),
    "minimax_m2": TagValues(
        sections=("<minimax:tool_call>",),
        head=('<invoke name="', NAME, '">'),
        parameter=('<parameter name="', KEY, '">'),
        value_end="</parameter>",
        call_end="</invoke>",
        closes=("</minimax:tool_call>",),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "step3": TagValues(
        sections=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
        between=("function", "<｜tool_sep｜>"),
        head=('<steptml:invoke name="', NAME, '">'),
        parameter=('<steptml:parameter name="', KEY, '">'),
        value_end="</steptml:parameter>",
        call_end="</steptml:invoke>",
        closes=("<｜tool_call_end｜>", "<｜tool_sep｜>", "<｜tool_calls_end｜>"),
    ),
    "glm45": GLM,
}

ALIASES: Final[Mapping[str, str]] = {
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "nemotron3": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "minimax-m2": "minimax_m2",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm": "glm45",
    "glm47": "glm45",
}
