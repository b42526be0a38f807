"""Families of the shape "marks around JSON", see `TagJson`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.constraint import CallSyntax
from infd.text.tools.tag_json import TagJson

if TYPE_CHECKING:
    from collections.abc import Mapping

_OBJECT: Final = '{"name": "$name", "arguments": $arguments}'


def _block(opening: str, closing: str) -> TagJson:
    """Return the family that writes each call as an object, on a line of its own, between two marks."""
    return TagJson(
        opens=(opening,),
        closes=(closing,),
        grammar=CallSyntax(call=f"{opening}\n{_OBJECT}\n{closing}", trigger=opening, marks=(opening, closing)),
    )


def _list(opening: str, closing: str = "") -> TagJson:
    """Return the family that writes calls as a list of objects after a mark."""
    marks = (opening, closing) if closing else (opening,)
    return TagJson(
        opens=(opening,),
        closes=marks[1:],
        listed=True,
        grammar=CallSyntax(
            begin=f"{opening}[", call=_OBJECT, between=", ", end=f"]{closing}", trigger=opening, marks=marks
        ),
    )


HERMES: Final = _block("<tool_call>", "</tool_call>")

_BRACKETED: Final = TagJson(
    opens=("<tool_calls>",),
    closes=("</tool_calls>",),
    listed=True,
    separators="",
    grammar=CallSyntax(
        begin="<tool_calls>[",
        call=_OBJECT,
        between=", ",
        end="]</tool_calls>",
        trigger="<tool_calls>",
        marks=("<tool_calls>", "</tool_calls>"),
    ),
)

_LLAMA: Final = TagJson(
    opens=("<|python_tag|>",),
    bare=True,
    arguments=("parameters", "arguments"),
    separators=";",
    grammar=CallSyntax(
        call='{"name": "$name", "parameters": $arguments}', between="; ", trigger='{"name": "', marks=()
    ),
)

# Up to version 10 of Mistral's tokenizers, a list of calls follows the mark. Since version 11, each call has its own
# mark, followed by the name, in some versions by an id, and by the arguments.
_MISTRAL: Final = TagJson(
    opens=("[TOOL_CALLS]",),
    inner=("[CALL_ID]", "[ARGS]"),
    head=r"(?P<name>[^\s\[\]{}(),]++)(?:\[CALL_ID\](?P<id>\w++))?(?:\[ARGS\])?\s*+",
    listed=True,
    short_ids=True,
    grammar=CallSyntax(
        call="[TOOL_CALLS]$name[ARGS]$arguments",
        between="",
        trigger="[TOOL_CALLS]",
        marks=("[TOOL_CALLS]", "[ARGS]"),
    ),
)

_DEEPSEEK_OPENS: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_CLOSES: Final = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_SEP: Final = "<｜tool▁sep｜>"
_DEEPSEEK_MARKS: Final = (*_DEEPSEEK_OPENS, *_DEEPSEEK_CLOSES, _DEEPSEEK_SEP)

# PLaMo 3 writes each of its marks with several tokens, of which these are special.
_PLAMO_TOKENS: Final = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>")

# The body of a call of Inkling; `infd/text/answers/messages.py` parses the header before it.
INKLING: Final = TagJson(bare=True, closes=("<|end_message|>",), arguments=("args", "arguments"))

FAMILIES: Final[Mapping[str, TagJson]] = {
    "hermes": HERMES,
    "llama3_json": _LLAMA,
    "mistral": _MISTRAL,
    "mistral_ids": TagJson(
        opens=_MISTRAL.opens,
        inner=_MISTRAL.inner,
        head=_MISTRAL.head,
        listed=True,
        short_ids=True,
        grammar=CallSyntax(
            call="[TOOL_CALLS]$name[CALL_ID]$id[ARGS]$arguments",
            between="",
            trigger="[TOOL_CALLS]",
            marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        ),
    ),
    "mistral_list": TagJson(
        opens=_MISTRAL.opens,
        inner=_MISTRAL.inner,
        head=_MISTRAL.head,
        listed=True,
        short_ids=True,
        grammar=CallSyntax(
            begin="[TOOL_CALLS][",
            call='{"name": "$name", "arguments": $arguments, "id": "$id"}',
            between=", ",
            end="]",
            trigger="[TOOL_CALLS]",
            marks=("[TOOL_CALLS]",),
        ),
    ),
    "kimi_k2": TagJson(
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        inner=("<|tool_call_argument_begin|>",),
        head=(
            r"(?:<\|tool_call_begin\|>)?\s*+"
            r"(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d++)?)\s*+<\|tool_call_argument_begin\|>\s*+"
        ),
        grammar=CallSyntax(
            begin="<|tool_calls_section_begin|>",
            call="<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
            between="",
            end="<|tool_calls_section_end|>",
            trigger="<|tool_calls_section_begin|>",
            marks=(
                *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
                *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            ),
        ),
    ),
    "deepseek_v3": TagJson(  # also the family of DeepSeek R1
        opens=_DEEPSEEK_OPENS,
        closes=(*_DEEPSEEK_CLOSES, "```"),
        inner=(_DEEPSEEK_SEP,),
        head=r"(?:<｜tool▁call▁begin｜>)?\s*+(?:function)?<｜tool▁sep｜>(?P<name>[^\s`]++)\s*+```json\s*+",
        grammar=CallSyntax(
            begin=_DEEPSEEK_OPENS[0],
            call=(f"{_DEEPSEEK_OPENS[1]}function{_DEEPSEEK_SEP}$name\n```json\n$arguments\n```{_DEEPSEEK_CLOSES[0]}"),
            end=_DEEPSEEK_CLOSES[1],
            trigger=_DEEPSEEK_OPENS[0],
            marks=_DEEPSEEK_MARKS,
        ),
    ),
    "deepseek_v31": TagJson(
        opens=_DEEPSEEK_OPENS,
        closes=_DEEPSEEK_CLOSES,
        inner=(_DEEPSEEK_SEP,),
        head=r"(?:<｜tool▁call▁begin｜>)?\s*+(?P<name>[^\s<]++)\s*+<｜tool▁sep｜>\s*+",
        grammar=CallSyntax(
            begin=_DEEPSEEK_OPENS[0],
            call=f"{_DEEPSEEK_OPENS[1]}$name{_DEEPSEEK_SEP}$arguments{_DEEPSEEK_CLOSES[0]}",
            between="",
            end=_DEEPSEEK_CLOSES[1],
            trigger=_DEEPSEEK_OPENS[0],
            marks=_DEEPSEEK_MARKS,
        ),
    ),
    "granite": _list("<|tool_call|>"),
    "granite_20b_fc": TagJson(
        opens=("<function_call>",),
        grammar=CallSyntax(call=f"<function_call> {_OBJECT}", trigger="<function_call>", marks=("<function_call>",)),
    ),
    "cohere_command3": TagJson(
        opens=("<|START_ACTION|>",),
        closes=("<|END_ACTION|>",),
        names=("tool_name",),
        arguments=("parameters",),
        ids=(),  # the model's ids are ignored, because they number each message's calls from 0 and so are not unique
        listed=True,
        grammar=CallSyntax(
            begin="<|START_ACTION|>[\n",
            call='    {"tool_call_id": "$number", "tool_name": "$name", "parameters": $arguments}',
            between=",\n",
            end="\n]<|END_ACTION|>",
            trigger="<|START_ACTION|>",
            marks=("<|START_ACTION|>", "<|END_ACTION|>"),
        ),
    ),
    "command_r": TagJson(
        opens=("Action: ```json", "Action:```json", "Action:\n```json"),
        closes=("```",),
        names=("tool_name", "name"),
        arguments=("parameters",),
        listed=True,
        grammar=CallSyntax(
            begin="Action:\n```json\n[\n",
            call='    {\n        "tool_name": "$name",\n        "parameters": $arguments\n    }',
            between=",\n",
            end="\n]```",
            trigger="Action:\n```json",
            marks=(),
        ),
    ),
    "jamba": _BRACKETED,
    "minimax": TagJson(
        opens=_BRACKETED.opens,
        closes=_BRACKETED.closes,
        listed=True,
        separators="",
        grammar=CallSyntax(
            begin="<tool_calls>\n",
            call=_OBJECT,
            between="\n",
            end="\n</tool_calls>",
            trigger="<tool_calls>",
            marks=_BRACKETED.marks,
        ),
    ),
    "xlam": TagJson(
        bare=True,
        opens=("```json",),
        closes=("```",),
        listed=True,
        grammar=CallSyntax(begin="[", call=_OBJECT, between=", ", end="]", trigger='[{"name": "', marks=()),
    ),
    "internlm": TagJson(
        opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        closes=("<|action_end|>",),
        inner=("<|action_start|>", "<|plugin|>"),
        arguments=("parameters", "arguments"),
        grammar=CallSyntax(
            call='<|action_start|><|plugin|>\n{"name": "$name", "parameters": $arguments}<|action_end|>',
            trigger="<|action_start|>",
            marks=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        ),
    ),
    "phi4_mini_json": TagJson(
        opens=("functools", "<|tool_call|>"),
        closes=("<|/tool_call|>",),
        bare=True,  # the template renders earlier calls without a mark
        listed=True,
        grammar=CallSyntax(begin="functools[", call=_OBJECT, between=", ", end="]", trigger="functools[", marks=()),
    ),
    "longcat": _block("<longcat_tool_call>", "</longcat_tool_call>"),
    "apertus": TagJson(
        opens=("<|tools_prefix|>",),
        closes=("<|tools_suffix|>",),
        listed=True,
        keyed=True,
        grammar=CallSyntax(
            begin="<|tools_prefix|>[",
            call='{"$name": $arguments}',
            between=", ",
            end="]<|tools_suffix|>",
            trigger="<|tools_prefix|>",
            marks=("<|tools_prefix|>", "<|tools_suffix|>"),
        ),
    ),
    "nemotron_json": _list("<TOOLCALL>", "</TOOLCALL>"),
    "gigachat3": TagJson(
        opens=("<|function_call|>", "function call<|role_sep|>"),
        inner=("<|role_sep|>",),
        grammar=CallSyntax(
            call=f"<|function_call|>{_OBJECT}", trigger="<|function_call|>", marks=("<|function_call|>",)
        ),
    ),
    "functionary": TagJson(
        opens=("<function=",),
        closes=("</function>",),
        head=r"(?P<name>[^\s<>]++)>\s*+",
        grammar=CallSyntax(
            call="<function=$name>$arguments</function>", between="", trigger="<function=", marks=("</function>",)
        ),
    ),
    "plamo3": TagJson(
        opens=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:begin_tool_request:plamo|>"),
        closes=tuple(f"<|plamo:end_tool_{part}:plamo|>" for part in ("arguments", "request", "requests")),
        inner=_PLAMO_TOKENS,
        head=(
            r"(?:<\|plamo:begin_tool_request:plamo\|>)?\s*+<\|plamo:begin_tool_name:plamo\|>(?P<name>[^\s<]++)"
            r"<\|plamo:end_tool_name:plamo\|>\s*+<\|plamo:begin_tool_arguments:plamo\|>"
            r"(?:<\|plamo:constrain\|>json)?(?:<\|plamo:msg\|>)?\s*+"
        ),
        grammar=CallSyntax(
            begin="<|plamo:begin_tool_requests:plamo|>",
            call=(
                "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>$name<|plamo:end_tool_name:plamo|>"
                "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>$arguments"
                "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
            ),
            between="",
            end="<|plamo:end_tool_requests:plamo|>",
            trigger="<|plamo:begin_tool_requests:plamo|>",
            marks=_PLAMO_TOKENS,
        ),
    ),
    "cwm": TagJson(
        opens=("<tool: ",),
        closes=("</tool>",),
        head=r"(?P<name>[^\s<>]++)>\s*+",
        grammar=CallSyntax(call="<tool: $name>\n$arguments\n</tool>", trigger="<tool: ", marks=()),
    ),
    # GLM-4 and GLM-4-0414: the answer is a name and, on the next line, the arguments. A text begins with a newline.
    "glm4": TagJson(
        opens=("<|assistant|>",),
        closes=("<|observation|>",),
        head=r"(?P<name>[\w.:/-]++)[ \t]*+\n\s*+",
        unmarked=True,
        grammar=CallSyntax(
            call="$name\n$arguments",
            between="<|assistant|>",
            trigger="",
            marks=("<|assistant|>", "<|observation|>"),
            otherwise=r"(?:\s(?s:.)*)?",
        ),
    ),
    "solar_open": TagJson(
        opens=("<|tool_calls|>", "<|tool_call:begin|>"),
        closes=("<|tool_call:end|>", "<|calls|>"),
        inner=("<|tool_call:name|>", "<|tool_call:args|>"),
        head=(
            r"(?:<\|tool_call:begin\|>)?\s*+(?P<id>[\w-]++)?"
            r"<\|tool_call:name\|>(?P<name>[^\s<]++)<\|tool_call:args\|>\s*+"
        ),
        grammar=CallSyntax(
            begin="<|tool_calls|>",
            call="<|tool_call:begin|>$id<|tool_call:name|>$name<|tool_call:args|>$arguments<|tool_call:end|>",
            between="",
            end="",
            trigger="<|tool_calls|>",
            marks=(
                *("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"),
                "<|tool_call:end|>",
            ),
        ),
    ),
}

ALIASES: Final[Mapping[str, str]] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "trinity": "hermes",
    "granite4": "hermes",
    "ernie45": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "granite-20b-fc": "granite_20b_fc",
    "cohere": "cohere_command3",
    "cohere_command4": "cohere_command3",
    "hunyuan_a13b": "jamba",
    "hunyuan": "jamba",
    "apriel": "jamba",
    "interns1": "internlm",
    "apertus2509": "apertus",
    "phi4_mini": "phi4_mini_json",
}
