"""Marks around each value: Qwen3-Coder, Seed-OSS, MiniMax M2, DeepSeek's DSML, Step3, GLM.

No published template of Step3 is at hand: its transcripts follow the format that the parsers of other servers describe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.text.syntaxes.family import Family
from tests.text.transcripts import Message

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMAS = {
    "weather": b"""{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}""",
    "f": b"""{"type": "object", "$defs": {"point": {"type": "object"}}, "properties": {
        "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
        "o": {"type": "object"}, "l": {"type": "array"}, "ref": {"$ref": "#/$defs/point"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "list": {"type": ["integer", "string"]},
        "enum": {"enum": [1, 2, "auto"]}, "maybe": {"type": "integer", "nullable": true},
        "all": {"allOf": [{"type": "number"}, {"minimum": 0}]}, "any": {"description": "of no type"}}}""",
}


class Shape(NamedTuple):
    """How a family writes calls.

    write    writes parameters with their values as the model writes these
    section  writes calls
    value    closing mark of a value
    call     closing mark of a call
    """

    write: Callable[[str, dict[str, str]], str]
    section: Callable[..., str]
    value: str
    call: str


def transcripts(shape: Shape) -> dict[str, tuple[str, Message]]:
    """Return the transcripts that every family has."""
    write, section = shape.write, shape.section
    paris, rome = write("weather", {"city": "Paris", "days": "2"}), write("weather", {"city": "Rome"})
    called, other = ("weather", '{"city": "Paris", "days": 2}'), ("weather", '{"city": "Rome"}')
    now = write("now", {})
    return {
        "nothing but text": ("Four < five <func.", Message("Four < five <func.")),
        "one call": (section(paris), Message(calls=(called,))),
        "two calls after text": (f"Let me see.\n{section(paris, rome)}", Message("Let me see.", calls=(called, other))),
        "text after a call": (f"{section(rome)}\nDone.", Message("Done.", calls=(other,))),
        "a call without arguments, then another": (section(now, rome), Message(calls=(("now", "{}"), other))),
        "a tool that was not offered": (
            section(write("g", {"a": "7", "b": '{"c": 1}'})),
            Message(calls=(("g", r'{"a": "7", "b": "{\"c\": 1}"}'),)),
        ),
        "texts": (
            section(write("f", {"s": 'a "quoted"\\ \t<b> é🙂\r', "x": "", "any": "1"})),
            Message(calls=(("f", r'{"s": "a \"quoted\"\\ \t<b> é🙂\r", "x": "", "any": "1"}'),)),
        ),
        "texts that look like numbers": (
            section(write("f", {"s": "007", "x": "1e5", "either": "12"})),
            Message(calls=(("f", '{"s": "007", "x": "1e5", "either": "12"}'),)),
        ),
        "newlines at both ends of a text": (
            section(write("f", {"s": "\n\na\n\nb\n\n"})),
            Message(calls=(("f", r'{"s": "\n\na\n\nb\n\n"}'),)),
        ),
        "numbers and words": (
            section(write("f", {"i": "-7", "n": "1e5", "all": "0.5", "b": "True", "maybe": "None", "either": "null"})),
            Message(
                calls=(("f", '{"i": -7, "n": 1e5, "all": 0.5, "b": true, "maybe": null, "either": null}'),),
            ),
        ),
        "documents": (
            section(write("f", {"o": '{"a": [1, "}"]}', "l": "[\n1]", "ref": "{'x': [True, None]}"})),
            Message(calls=(("f", '{"o": {"a": [1, "}"]}, "l": [\n1], "ref": {"x": [true, null]}}'),)),
        ),
        "values that are not of their types": (
            section(write("f", {"i": "007", "n": "many", "b": "yes", "o": '{"a": ', "l": "{}", "maybe": "1.5"})),
            Message(
                calls=(("f", r'{"i": "007", "n": "many", "b": "yes", "o": "{\"a\": ", "l": "{}", "maybe": "1.5"}'),),
            ),
        ),
        "values of several types": (
            section(write("f", {"list": "12", "enum": "auto", "either": "nullify", "i": "7.0"})),
            Message(calls=(("f", '{"list": 12, "enum": "auto", "either": "nullify", "i": 7.0}'),)),
        ),
        "cut within a text": (
            section(write("f", {"s": "abc"})).partition("bc")[0],
            Message(calls=(("f", '{"s": "a'),)),
        ),
        "cut within a number": (
            section(write("f", {"i": "123"})).partition("23")[0],
            Message(calls=(("f", '{"i": 1'),)),
        ),
        "cut within the name": (
            section(now).partition("now")[0] + "no",
            Message(section(now).partition("now")[0] + "no"),
        ),
        "something else within a call": (
            f"{section(rome).partition(shape.call)[0]}Well.",
            Message("Well.", calls=(other,)),
        ),
    }


def functions(opening: str, closing: str, *, newlines: bool) -> Shape:
    line = "\n" if newlines else ""

    def write(name: str, values: dict[str, str]) -> str:
        parameters = "".join(f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in values.items())
        return f"{opening}\n<function={name}>\n{parameters}</function>\n{closing}"

    return Shape(write, lambda *calls: "\n".join(calls), "</parameter>", "</function>")


def invokes(prefix: str, section: tuple[str, str], call: tuple[str, str] = ("", "\n"), attribute: str = "") -> Shape:
    def write(name: str, values: dict[str, str]) -> str:
        parameters = "".join(
            f'<{prefix}parameter name="{key}"{attribute}>{value}</{prefix}parameter>\n' for key, value in values.items()
        )
        return f'{call[0]}<{prefix}invoke name="{name}">\n{parameters}</{prefix}invoke>{call[1]}'

    return Shape(
        write,
        lambda *calls: f"{section[0]}\n{''.join(calls)}{section[1]}",
        f"</{prefix}parameter>",
        f"</{prefix}invoke>",
    )


def pairs(line: str, *, call: str = "tool_call", prefix: str = "", section: str = "%s", between: str = "\n") -> Shape:
    def write(name: str, values: dict[str, str]) -> str:
        parameters = "".join(
            f"<{prefix}arg_key>{key}</{prefix}arg_key>{line}<{prefix}arg_value>{value}</{prefix}arg_value>{line}"
            for key, value in values.items()
        )
        return f"<{prefix}{call}>{name}{line}{parameters}</{prefix}{call}>"

    return Shape(write, lambda *calls: section % between.join(calls), f"</{prefix}arg_value>", f"</{prefix}{call}>")


QWEN = functions("<tool_call>", "</tool_call>", newlines=True)
SEED = functions("<seed:tool_call>", "</seed:tool_call>", newlines=False)
MINIMAX = invokes("", ("<minimax:tool_call>", "</minimax:tool_call>"))
STEP = invokes(
    "steptml:",
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    ("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>\n"),
)


def dsml(section: str, namespace: str = "｜DSML｜") -> dict[str, tuple[str, Message]]:
    shape = invokes(namespace, (f"<{namespace}{section}>", f"</{namespace}{section}>"))
    one = (
        f'<{namespace}{section}>\n<{namespace}invoke name="f">\n'
        f'<{namespace}parameter name="i" string="true">7</{namespace}parameter>\n'
        f'<{namespace}parameter name="s" string="false">7</{namespace}parameter>\n'
        f'<{namespace}parameter name="x" string="false">"a"</{namespace}parameter>\n'
        f'<{namespace}parameter name="y" string="false">a</{namespace}parameter>\n'
        f"</{namespace}invoke>\n</{namespace}{section}>"
    )
    stated = ("f", '{"i": "7", "s": 7, "x": "a", "y": "a"}')
    return {**transcripts(shape), "types that the model states": (one, Message(calls=(stated,)))}


def kimi(name: str, values: dict[str, str]) -> str:
    arguments = "".join(
        f'<|open|>argument key="{key}"<|sep|>{value}<|close|>argument<|sep|>' for key, value in values.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{arguments}<|close|>call<|sep|>'


def mini(name: str, values: dict[str, str]) -> str:
    parameters = "".join(f'<param name="{key}">{value}</param>' for key, value in values.items())
    return f'<function name="{name}">{parameters}</function>'


def hunyuan(name: str, values: dict[str, str]) -> str:
    parameters = "".join(
        f"<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n"
        for key, value in values.items()
    )
    return f"<tool_call:opensource>{name}<tool_sep:opensource>\n{parameters}</tool_call:opensource>\n"


HUNYUAN = Shape(
    hunyuan,
    lambda *calls: f"<tool_calls:opensource>\n{''.join(calls)}</tool_calls:opensource>",
    "</arg_value:opensource>",
    "</tool_call:opensource>",
)
NAMESPACE = "]<]minimax[>["


def elements(name: str, values: dict[str, str]) -> str:
    parameters = "".join(f"{NAMESPACE}<{key}>{value}{NAMESPACE}</{key}>" for key, value in values.items())
    return f'{NAMESPACE}<invoke name="{name}">{parameters}{NAMESPACE}</invoke>\n'


M3 = Shape(
    elements,
    lambda *calls: f"{NAMESPACE}<tool_call>\n{''.join(calls)}{NAMESPACE}</tool_call>",
    "",
    f"{NAMESPACE}</invoke>",
)
KIMI = Shape(
    kimi,
    lambda *calls: f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>",
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
)
MINI = Shape(mini, lambda *calls: "\n".join(calls), "</param>", "</function>")
KIMI_STATED = (
    '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    '<|open|>argument key="i" type="string"<|sep|>7<|close|>argument<|sep|>'
    '<|open|>argument key="s" type="number"<|sep|>7<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
KIMIS = {"types that the model states": (KIMI_STATED, Message(calls=(("f", '{"i": "7", "s": 7}'),)))}
MINIS = {
    "a text between marks": (
        mini("f", {"i": "<![CDATA[7]]>", "s": "<![CDATA[<a>]]</param>\n& b]]>", "x": "<![CDAT"}),
        Message(calls=(("f", r'{"i": "7", "s": "<a>]]</param>\n& b", "x": "<![CDAT"}'),)),
    ),
}


def nested(value: str, name: str = "f", key: str = "o") -> str:
    """Return a call with a value in which <key> and </key> stand for tags."""
    return M3.section(M3.write(name, {key: value.replace("<", f"{NAMESPACE}<")}))


NESTED = {
    "an object": (
        nested("<a>x<y>z</y></a>").replace(f"{NAMESPACE}<y>z{NAMESPACE}</y>", "<y>z</y>"),
        Message(calls=(("f", '{"o": {"a": "x<y>z</y>"}}'),)),
    ),
    "an array of objects": (
        nested("<item><k>1</k></item>\n<item><k> two </k><l><item>a</item></l></item>"),
        Message(calls=(("f", '{"o": [{"k": "1"}, {"k": " two ", "l": ["a"]}]}'),)),
    ),
    "an element of the parameter's name": (
        nested("<o><o>1</o></o><a></a>"),
        Message(calls=(("f", '{"o": {"o": {"o": "1"}, "a": ""}}'),)),
    ),
    "members with types": (
        nested("<i>7</i><b>true</b><l><item>1.5</item><item></item></l><d></d>", "g", "p"),
        Message(calls=(("g", '{"p": {"i": 7, "b": true, "l": [1.5, null], "d": {}}}'),)),
    ),
    "JSON instead of elements": (
        M3.section(M3.write("f", {"o": '{"a": [1]}', "l": ""})),
        Message(calls=(("f", '{"o": {"a": [1]}, "l": []}'),)),
    ),
    "no mark after the value": (
        M3.section(M3.write("f", {"s": "a"})).replace(f"{NAMESPACE}</s>", ""),
        Message(calls=(("f", '{"s": "a"}'),)),
    ),
    "cut within elements": (
        nested("<a>x</a><b>y</b>").partition("y")[0],
        Message(calls=(("f", '{"o": ' + nested("<a>x</a><b>y</b>").partition("y")[0].partition("<o>")[2]),)),
    ),
}
MEMBERS = b"""{"type": "object", "$defs": {"list": {"type": "array", "items": {"type": ["number", "null"]}}},
    "properties": {"p": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"i": {"type": "integer"},
        "b": {"type": "boolean"}, "l": {"$ref": "#/$defs/list"}, "d": {"type": "object"}}}]}}}"""

OWN = {
    "no newlines around a value": (
        "<tool_call><function=f><parameter=s>a</parameter><parameter=x>\n</parameter></function></tool_call>",
        Message(calls=(("f", '{"s": "a", "x": ""}'),)),
    ),
    "no mark before the call": (
        "Yes.\n<function=f>\n<parameter=i>\n7\n</parameter>\n</function>\n</tool_call>",
        Message("Yes.", calls=(("f", '{"i": 7}'),)),
    ),
    "no mark after the value": (
        "<tool_call>\n<function=f>\n<parameter=s>\na\n</function>\n</tool_call>\nYes.",
        Message("Yes.", calls=(("f", '{"s": "a"}'),)),
    ),
    "no mark after the call": (
        "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n</tool_call>\nYes.",
        Message("Yes.", calls=(("f", '{"s": "a"}'),)),
    ),
    "no marks after the first call": (
        "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        Message(calls=(("f", '{"s": "a"}'), ("g", "{}"))),
    ),
    "marks within a text": (
        QWEN.write("f", {"s": "<tool_call></function> </tool_calls><parameter=x>\n</paramete"}),
        Message(calls=(("f", r'{"s": "<tool_call></function> </tool_calls><parameter=x>\n</paramete"}'),)),
    ),
    "a mark in a text": ("Write <tool_call> first.", Message("Write <tool_call> first.")),
}

FAMILIES = {
    "qwen3_coder": Family(
        {**transcripts(QWEN), **OWN},
        templates=(
            "llama.cpp/Qwen3-Coder",
            "llama.cpp/Qwen3.5-4B",
            "llama.cpp/StepFun3.5-Flash",
            "llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "vllm/qwen3coder",
        ),
        schemas=SCHEMAS,
    ),
    "seed_oss": Family(transcripts(SEED), templates=("llama.cpp/ByteDance-Seed-OSS",), schemas=SCHEMAS),
    "minimax_m2": Family(transcripts(MINIMAX), templates=("llama.cpp/MiniMax-M2",), schemas=SCHEMAS),
    "minimax_m3": Family(
        {**transcripts(M3), **NESTED},
        templates=("llama.cpp/MiniMax-M3",),
        schemas={**SCHEMAS, "g": MEMBERS},
        lossy={"llama.cpp/MiniMax-M3": "leaves null members out, and writes values without their types"},
    ),
    "deepseek_v32": Family(dsml("function_calls"), templates=("llama.cpp/deepseek-ai-DeepSeek-V3.2",), schemas=SCHEMAS),
    "deepseek_v4": Family(
        dsml("tool_calls"),
        templates=("llama.cpp/deepseek-ai-DeepSeek-V4", "llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731"),
        schemas=SCHEMAS,
    ),
    # Source: tests/tokenizers_/fixtures/deepseek_v41 of vLLM 0.33, prompts that the model's own encoder has written.
    "deepseek_v41": Family(dsml("calls", "｜DSML｜ "), schemas=SCHEMAS),
    # Sources of the next five: the parsers of vLLM 0.33 and their tests (dots, hy_v4, k2_horizon), and the parsers of
    # SGLang 0.5.23 (all but hy_v4).
    "dots": Family(transcripts(invokes("", ("<dots_function_call>", "</dots_function_call>"))), schemas=SCHEMAS),
    "gigachat35": Family(dsml("tool_calls", "｜GCML｜"), schemas=SCHEMAS),
    "hy_v4": Family(transcripts(pairs("", section="<tool_calls>%s</tool_calls>", between="")), schemas=SCHEMAS),
    "longcat2": Family(
        transcripts(pairs("\n", call="tool_call", prefix="longcat_"))
        | {  # as mlx-vlm's tests have it
            "without newlines": (
                (
                    "<longcat_tool_call>weather<longcat_arg_key>city</longcat_arg_key><longcat_arg_value>Paris"
                    "</longcat_arg_value><longcat_arg_key>days</longcat_arg_key><longcat_arg_value>3</longcat_arg_value>"
                    "</longcat_tool_call>"
                ),
                Message(calls=(("weather", '{"city": "Paris", "days": 3}'),)),
            )
        },
        schemas=SCHEMAS,
    ),
    "iquest_q1": Family(transcripts(pairs("", call="iquest_tool_call")), schemas=SCHEMAS),
    # Its template asks for newlines, and for a type before each value if `tool_call_format` is "xml_typed".
    "k2_horizon": Family(
        transcripts(pairs("\n", prefix="ifm|", section="<ifm|tool_calls>\n%s\n</ifm|tool_calls>"))
        | {
            "without newlines": (
                (
                    "<ifm|tool_calls><ifm|tool_call>weather<ifm|arg_key>days</ifm|arg_key><ifm|arg_value>3</ifm|arg_value>"
                    "</ifm|tool_call></ifm|tool_calls>"
                ),
                Message(calls=(("weather", '{"days": 3}'),)),
            ),
            "types before values": (
                (
                    "<ifm|tool_calls>\n<ifm|tool_call>g\n<ifm|arg_key>id</ifm|arg_key>\n<ifm|arg_type>string</ifm|arg_type>\n"
                    "<ifm|arg_value>12</ifm|arg_value>\n<ifm|arg_key>all</ifm|arg_key>\n"
                    "<ifm|arg_type>boolean</ifm|arg_type><ifm|arg_value>true</ifm|arg_value>\n<ifm|arg_key>page</ifm|arg_key>"
                    "<ifm|arg_type>integer</ifm|arg_type>\n<ifm|arg_value>2</ifm|arg_value>\n</ifm|tool_call>\n"
                    "</ifm|tool_calls>"
                ),
                Message(calls=(("g", '{"id": "12", "all": true, "page": 2}'),)),
            ),
        },
        schemas=SCHEMAS,
    ),
    "step3": Family(transcripts(STEP), schemas=SCHEMAS),
    "hy_v3": Family(transcripts(HUNYUAN), templates=("llama.cpp/tencent-Hy3",), schemas=SCHEMAS),
    "kimi_k3": Family({**transcripts(KIMI), **KIMIS}, templates=("llama.cpp/Kimi-K3",), schemas=SCHEMAS),
    "minicpm5": Family({**transcripts(MINI), **MINIS}, templates=("llama.cpp/openbmb-MiniCPM5-1B",), schemas=SCHEMAS),
    "glm45": Family(
        transcripts(pairs("\n")),
        templates=(
            "llama.cpp/GLM-4.6",
            "llama.cpp/inclusionai-ling-3.0-flash",
            "llama.cpp/poolside-Laguna-XS.2",
            "llama.cpp/poolside-Laguna-XS-2.1",
        ),
        schemas=SCHEMAS,
    ),
    "glm47": Family(
        transcripts(pairs("")),
        templates=("llama.cpp/GLM-4.7-Flash", "llama.cpp/Spark2.5", "llama.cpp/poolside-Laguna-S-2.1"),
        schemas=SCHEMAS,
    ),
}
