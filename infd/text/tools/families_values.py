"""Families of the shape "marks around each value", see `TagValues`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.constraint import CallSyntax
from infd.text.tools.elements import Elements
from infd.text.tools.tag_values import ATTRIBUTES, KEY, NAME, SPACE, TAG, Marked, TagValues

if TYPE_CHECKING:
    from collections.abc import Mapping


_MINIMAX: Final = "]<]minimax[>["  # the namespace token before each tag of MiniMax M3


def _functions(opening: str, closing: str, *, newlines: bool) -> TagValues:
    """Return the family that writes <function=...> and <parameter=...> between two marks."""
    line = "\n" if newlines else ""
    return TagValues(
        sections=(opening,),
        head=("<function=", NAME, ">"),
        parameter=("<parameter=", KEY, ">"),
        value_end="</parameter>",
        call_end="</function>",
        closes=(closing,),
        newlines=newlines,
        grammar=CallSyntax(
            call=f"{opening}\n<function=$name>\n$arguments</function>\n{closing}",
            parameter=f"<parameter=$key>{line}$value{line}</parameter>\n",
            excluded=("</function>",),
            trigger=opening,
            marks=(opening, "<function=", "<parameter=", "</parameter>", "</function>", closing),
        ),
    )


def _dsml(namespace: str, section: str) -> TagValues:
    parameter, end = f'<{namespace}parameter name="$key" string="%s">$value', f"</{namespace}parameter>\n"
    opening, closing = f"<{namespace}{section}>", f"</{namespace}{section}>"
    return TagValues(
        sections=(opening,),
        head=(f'<{namespace}invoke name="', NAME, '">'),
        parameter=(f'<{namespace}parameter name="', KEY, '"', ATTRIBUTES, ">"),
        value_end=f"</{namespace}parameter>",
        call_end=f"</{namespace}invoke>",
        closes=(closing,),
        strings=frozenset({'string="true"'}),
        documents=frozenset({'string="false"'}),
        grammar=CallSyntax(
            begin=f"{opening}\n",
            call=f'<{namespace}invoke name="$name">\n$arguments</{namespace}invoke>\n',
            between="",
            end=closing,
            parameter=parameter % "true" + end,
            document=parameter % "false" + end,
            excluded=(f"</{namespace}invoke>",),
            trigger=opening,
            marks=(opening, closing, namespace.strip()),
        ),
    )


def _invokes(section: str) -> TagValues:
    """Return the family that writes <invoke name=...> and <parameter name=...> within a section."""
    opening, closing = f"<{section}>", f"</{section}>"
    return TagValues(
        sections=(opening,),
        head=('<invoke name="', NAME, '">'),
        parameter=('<parameter name="', KEY, '">'),
        value_end="</parameter>",
        call_end="</invoke>",
        closes=(closing,),
        grammar=CallSyntax(
            begin=f"{opening}\n",
            call='<invoke name="$name">\n$arguments</invoke>\n',
            between="",
            end=closing,
            parameter='<parameter name="$key">$value</parameter>\n',
            excluded=("</invoke>",),
            trigger=opening,
            marks=(opening, "</parameter>", "</invoke>", closing),
        ),
    )


def _pairs(
    line: str, *, call: str = "tool_call", argument: str = "arg", section: str = "", typed: bool = False
) -> TagValues:
    """Return a family of GLM's shape.

    line      text that the model writes between marks: a newline, or empty
    call      name of the mark of a call
    argument  beginning of the names of the marks of keys and values
    section   name of the mark around all calls; empty: none
    typed     whether the model may write the type of a value before it
    """
    opening, closing = f"<{call}>", f"</{call}>"
    key, key_end, value, value_end = (f"<{end}{argument}_{part}>" for part in ("key", "value") for end in ("", "/"))
    around = (f"<{section}>", f"</{section}>") if section else ("", "")
    kind = (Marked(f"<{argument}_type>", f"</{argument}_type>"),) if typed else ()
    return TagValues(
        sections=(around[0],) if section else (),
        head=(opening, SPACE, NAME, SPACE, (key, closing)),
        parameter=(key, KEY, key_end, SPACE, *kind, value),
        value_end=value_end,
        call_end=closing,
        closes=(around[1],) if section else (),
        strings=frozenset({"string"} if typed else ()),
        documents=frozenset({"integer", "number", "boolean", "null", "array", "object"} if typed else ()),
        grammar=CallSyntax(
            begin=around[0] + line if section else "",
            call=f"{opening}$name{line}$arguments{closing}",
            between=line,
            end=line + around[1] if section else "",
            parameter=f"{key}$key{key_end}{line}{value}$value{value_end}{line}",
            trigger=around[0] or opening,
            marks=(*filter(None, around), opening, key, key_end, value, value_end, closing),
        ),
    )


# The body of a call of Muse Glimmer; `infd/text/answers/messages.py` parses the header before it.
MUSE: Final = TagValues(
    sections=("<atem:function_calls>",),
    head=('<atem:invoke name="', NAME, '">'),
    parameter=('<atem:parameter name="', KEY, '">'),
    value_end="</atem:parameter>",
    call_end="</atem:invoke>",
    closes=("</atem:function_calls>",),
    doubled=True,
)

FAMILIES: Final[Mapping[str, TagValues]] = {
    "qwen3_coder": _functions("<tool_call>", "</tool_call>", newlines=True),
    "seed_oss": _functions("<seed:tool_call>", "</seed:tool_call>", newlines=False),
    "minimax_m2": _invokes("minimax:tool_call"),
    "dots": _invokes("dots_function_call"),
    "minimax_m3": TagValues(
        sections=(f"{_MINIMAX}<tool_call>",),
        head=(f'{_MINIMAX}<invoke name="', NAME, '">'),
        parameter=(f"{_MINIMAX}<", TAG, ">"),
        value_end=f"{_MINIMAX}</{KEY}>",
        call_end=f"{_MINIMAX}</invoke>",
        closes=(f"{_MINIMAX}</tool_call>",),
        elements=Elements(_MINIMAX),
        tokens=(_MINIMAX,),
        grammar=CallSyntax(  # constrained objects and arrays are JSON, which the parser reads too
            begin=f"{_MINIMAX}<tool_call>\n",
            call=f'{_MINIMAX}<invoke name="$name">$arguments{_MINIMAX}</invoke>\n',
            between="",
            end=f"{_MINIMAX}</tool_call>",
            parameter=f"{_MINIMAX}<$key>$value{_MINIMAX}</$key>",
            excluded=(f"{_MINIMAX}</invoke>",),
            trigger=f"{_MINIMAX}<tool_call>",
            marks=(_MINIMAX,),
        ),
    ),
    "deepseek_v32": _dsml("｜DSML｜", "function_calls"),
    "deepseek_v4": _dsml("｜DSML｜", "tool_calls"),
    "deepseek_v41": _dsml("｜DSML｜ ", "calls"),
    "gigachat35": _dsml("｜GCML｜", "tool_calls"),
    "step3": TagValues(
        sections=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
        between=("function", "<｜tool_sep｜>"),
        head=('<steptml:invoke name="', NAME, '">'),
        parameter=('<steptml:parameter name="', KEY, '">'),
        value_end="</steptml:parameter>",
        call_end="</steptml:invoke>",
        closes=("<｜tool_call_end｜>", "<｜tool_sep｜>", "<｜tool_calls_end｜>"),
        grammar=CallSyntax(
            begin="<｜tool_calls_begin｜>\n",
            call=(
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="$name">\n'
                "$arguments</steptml:invoke><｜tool_call_end｜>\n"
            ),
            between="",
            end="<｜tool_calls_end｜>",
            parameter='<steptml:parameter name="$key">$value</steptml:parameter>\n',
            excluded=("</steptml:invoke>",),
            trigger="<｜tool_calls_begin｜>",
            marks=(
                *("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
                "<｜tool_calls_end｜>",
            ),
        ),
    ),
    "kimi_k3": TagValues(
        sections=("<|close|>response<|sep|>", "<|open|>tools<|sep|>"),
        head=('<|open|>call tool="', NAME, '"', ATTRIBUTES, "<|sep|>"),
        parameter=('<|open|>argument key="', KEY, '"', ATTRIBUTES, "<|sep|>"),
        value_end="<|close|>argument<|sep|>",
        call_end="<|close|>call<|sep|>",
        closes=("<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
        strings=frozenset({'type="string"'}),
        documents=frozenset(f'type="{kind}"' for kind in ("number", "boolean", "null", "object", "array")),
        grammar=CallSyntax(
            begin="<|open|>tools<|sep|>",
            call='<|open|>call tool="$name" index="$number"<|sep|>$arguments<|close|>call<|sep|>',
            between="",
            end="<|close|>tools<|sep|>",
            parameter='<|open|>argument key="$key" type="string"<|sep|>$value<|close|>argument<|sep|>',
            document='<|open|>argument key="$key"<|sep|>$value<|close|>argument<|sep|>',
            excluded=("<|close|>call<|sep|>",),
            trigger="<|open|>",
            marks=("<|open|>", "<|close|>", "<|sep|>"),
        ),
    ),
    "minicpm5": TagValues(
        head=('<function name="', NAME, '">'),
        parameter=('<param name="', KEY, '">'),
        value_end="</param>",
        call_end="</function>",
        verbatim=("<![CDATA[", "]]>"),
        grammar=CallSyntax(
            call='<function name="$name">$arguments</function>',
            parameter='<param name="$key">$value</param>',
            excluded=("<![CDATA[",),
            trigger='<function name="',
            marks=(),
        ),
    ),
    "hy_v3": TagValues(
        sections=("<tool_calls:opensource>",),
        head=("<tool_call:opensource>", SPACE, NAME, SPACE, "<tool_sep:opensource>"),
        parameter=("<arg_key:opensource>", KEY, "</arg_key:opensource>", SPACE, "<arg_value:opensource>"),
        value_end="</arg_value:opensource>",
        call_end="</tool_call:opensource>",
        closes=("</tool_calls:opensource>",),
        grammar=CallSyntax(
            begin="<tool_calls:opensource>\n",
            call="<tool_call:opensource>$name<tool_sep:opensource>\n$arguments</tool_call:opensource>\n",
            between="",
            end="</tool_calls:opensource>",
            parameter=(
                "<arg_key:opensource>$key</arg_key:opensource>\n<arg_value:opensource>$value</arg_value:opensource>\n"
            ),
            excluded=("</tool_call:opensource>",),
            trigger="<tool_calls:opensource>",
            marks=tuple(
                f"<{mark}:opensource>"
                for mark in (
                    *("tool_calls", "/tool_calls", "tool_call", "/tool_call", "tool_sep"),
                    *("arg_key", "/arg_key", "arg_value", "/arg_value"),
                )
            ),
        ),
    ),
    "glm45": _pairs("\n"),
    "glm47": _pairs(""),
    "longcat2": _pairs("\n", call="longcat_tool_call", argument="longcat_arg"),
    "iquest_q1": _pairs("", call="iquest_tool_call"),
    "hy_v4": _pairs("", section="tool_calls"),
    "k2_horizon": _pairs("\n", call="ifm|tool_call", argument="ifm|arg", section="ifm|tool_calls", typed=True),
}

ALIASES: Final[Mapping[str, str]] = {
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "nemotron3": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
    "nanbeige": "qwen3_coder",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "deepseekv41": "deepseek_v41",
    "glm": "glm45",
    "ling3": "glm45",
    "poolside_v1": "glm45",
    "spark25": "glm47",
}
