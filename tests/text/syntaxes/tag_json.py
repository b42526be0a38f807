"""The families of the shape "marks around JSON". Hermes has a file of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.text.tools.families_json import FAMILIES as SYNTAXES
from tests.text.syntaxes.family import NOW, PARIS, ROME, Family, standard
from tests.text.transcripts import Message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.text.syntaxes.family import Write

    Calls = Sequence[tuple[str, str]]


def each(call: str, *, begin: str = "", between: str = "", end: str = "") -> Write:
    """Return the writer of a syntax; NAME, ARGUMENTS and NUMBER stand for those in `call`."""

    def write(calls: Calls) -> str:
        written = [
            call.replace("NUMBER", str(number)).replace("NAME", name).replace("ARGUMENTS", arguments)
            for number, (name, arguments) in enumerate(calls)
        ]
        return begin + between.join(written) + end

    return write


def family(
    name: str,
    write: Write,
    *templates: str,
    more: Mapping[str, tuple[str, Message]] = {},
    lossy: Mapping[str, str] = {},
    schemas: Mapping[str, bytes] = {},
) -> Family:
    syntax = SYNTAXES[name]
    bare = (syntax.bare or syntax.unmarked) and not write([PARIS]).startswith(syntax.opens)
    return Family(standard(write, marks=syntax.marks, bare=bare) | dict(more), templates, schemas, lossy)


OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
PARAMETERS = '{"name": "NAME", "parameters": ARGUMENTS}'
BEGIN, END, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
CALL, CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
LIST = {"begin": "[", "between": ", ", "end": "]"}
ACTION = '    {"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}'
KIMI = "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
SOLAR = "<|tool_call:begin|>abcNUMBER<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS<|tool_call:end|>"

FAMILIES = {
    "llama3_json": family(
        "llama3_json",
        each(PARAMETERS, between="; "),
        *("llama.cpp/meta-llama-Llama-3.1-8B-Instruct", "llama.cpp/meta-llama-Llama-3.2-3B-Instruct"),
        *("llama.cpp/meta-llama-Llama-3.3-70B-Instruct", "vllm/llama3.1_json", "vllm/llama3.2_json"),
        "vllm/llama4_json",
        more={
            "behind the mark": (f"Hm. <|python_tag|>{each(PARAMETERS)([PARIS])}", Message("Hm.", calls=(PARIS,))),
            "a type first": (
                '{"type": "function", "name": "now", "parameters": {}}',
                Message(calls=(NOW,)),
            ),
            "an answer in JSON": (
                '{"city": "Paris", "n": {"name": 1}}',
                Message('{"city": "Paris", "n": {"name": 1}}'),
            ),
            "an empty answer in JSON": (' {} {"a"', Message(' {} {"a"')),
            "without a semicolon": (each(PARAMETERS, between="\n")([PARIS, ROME]), Message(calls=(PARIS, ROME))),
            "code behind the mark": ("<|python_tag|>f.call(a=1)", Message("<|python_tag|>f.call(a=1)")),
        },
    ),
    "mistral": family(
        "mistral",
        each("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
        "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512",
        "llama.cpp/unsloth-mistral-Devstral-Small-2507",
        more={
            "no second mark": ('[TOOL_CALLS]now{"a": 1}', Message(calls=(("now", '{"a": 1}'),))),
            "a list": (f"[TOOL_CALLS] {each(OBJECT, **LIST)([PARIS, ROME])}", Message(calls=(PARIS, ROME))),
        },
    ),
    "mistral_ids": family(
        "mistral_ids",
        each("[TOOL_CALLS]NAME[CALL_ID]aaaaaaaaNUMBER[ARGS]ARGUMENTS"),
        "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506",
    ),
    "mistral_list": family(
        "mistral_list",
        each('{"name": "NAME", "arguments": ARGUMENTS, "id": "aaaaaaaaNUMBER"}', **{**LIST, "begin": "[TOOL_CALLS] ["}),
        *("llama.cpp/mistralai-Mistral-Nemo-Instruct-2407", "vllm/mistral", "vllm/mistral3", "vllm/mistral_parallel"),
    ),
    "kimi_k2": family(
        "kimi_k2",
        each(KIMI, begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>"),
        *("llama.cpp/moonshotai-Kimi-K2", "llama.cpp/Kimi-K2-Instruct", "llama.cpp/Kimi-K2-Thinking"),
    ),
    "deepseek_v3": family(
        "deepseek_v3",
        each(
            f"{CALL}function{SEP}NAME\n```json\nARGUMENTS\n```{CALLED}",
            begin=BEGIN,
            between="\n",
            end=END,
        ),
        *("llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
        *("vllm/deepseekr1", "vllm/deepseekv3"),
    ),
    "deepseek_v31": family(
        "deepseek_v31",
        each(f"{CALL}NAME{SEP}ARGUMENTS{CALLED}", begin=BEGIN, end=END),
        *("llama.cpp/deepseek-ai-DeepSeek-V3.1", "vllm/deepseekv31"),
    ),
    "granite": family("granite", each(OBJECT, **{**LIST, "begin": "<|tool_call|>["}), "vllm/granite"),
    "granite_20b_fc": family("granite_20b_fc", each(f"<function_call> {OBJECT}", between="\n"), "vllm/granite_20b_fc"),
    "cohere_command3": family(
        "cohere_command3",
        each(ACTION, begin="<|START_ACTION|>[\n", between=",\n", end="\n]<|END_ACTION|>"),
        *("llama.cpp/Cohere2MoE", "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
    ),
    "command_r": family(
        "command_r",
        each(
            '{\n"tool_name": "NAME",\n"parameters": ARGUMENTS\n}', begin="Action: ```json\n[", between=",", end="]```"
        ),
        "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use",
    ),
    "jamba": family(
        "jamba",
        each(OBJECT, **{**LIST, "begin": "<tool_calls>[", "end": "]</tool_calls>"}),
        *("axolotl/jamba", "llama.cpp/Apriel-1.6-15b-Thinker-fixed", "llama.cpp/unsloth-Apriel-1.5"),
        "vllm/hunyuan_a13b",
    ),
    "minimax": family(
        "minimax",
        each(OBJECT, begin="<tool_calls>\n", between="\n", end="\n</tool_calls>"),
        "llama.cpp/MiniMax-M1",
    ),
    "xlam": family(
        "xlam",
        each(OBJECT, **LIST),
        *("vllm/xlam_llama", "vllm/xlam_qwen"),
        more={"fenced": (f"Hm.\n```json\n{each(OBJECT, **LIST)([PARIS])}\n```", Message("Hm.", calls=(PARIS,)))},
    ),
    "internlm": family(
        "internlm",
        each(f"<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>"),
        "vllm/internlm2_tool",
        more={
            "a space within the mark": (
                f"<|action_start|> <|plugin|>{each(OBJECT)([PARIS])}<|action_end|>",
                Message(calls=(PARIS,)),
            )
        },
    ),
    "phi4_mini_json": family(
        "phi4_mini_json",
        each(OBJECT, **{**LIST, "begin": "functools["}),
        "vllm/phi4_mini",
        "llama.cpp/fireworks-ai-llama-3-firefunction-v2",
        more={"the word": ("functools.partial", Message("functools.partial"))},
    ),
    "longcat": family("longcat", each(f"<longcat_tool_call>{OBJECT}</longcat_tool_call>", between="\n")),
    "apertus": family(
        "apertus",
        each('{"NAME": ARGUMENTS}', **{**LIST, "begin": "<|tools_prefix|>[", "end": "]<|tools_suffix|>"}),
        *("llama.cpp/Apertus-8B-Instruct", "vllm/apertus"),
    ),
    "nemotron_json": family(
        "nemotron_json",
        each(OBJECT, **{**LIST, "begin": "<TOOLCALL>[", "end": "]</TOOLCALL>"}),
        "llama.cpp/NVIDIA-Nemotron-Nano-v2",
    ),
    "gigachat3": family(
        "gigachat3",
        each(f"<|function_call|>{OBJECT}"),
        *("llama.cpp/GigaChat3-10B-A1.8B", "llama.cpp/GigaChat3.1-10B-A1.8B"),
    ),
    "functionary": family(
        "functionary", each("<function=NAME>ARGUMENTS</function>"), "llama.cpp/meetkai-functionary-medium-v3.1"
    ),
    # Source: vllm/parser/plamo3.py and tests/parser/engine/test_plamo3.py of vLLM 0.33.
    "plamo3": family(
        "plamo3",
        each(
            "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME<|plamo:end_tool_name:plamo|>"
            "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>ARGUMENTS"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
            begin="<|plamo:begin_tool_requests:plamo|>",
            end="<|plamo:end_tool_requests:plamo|>",
        ),
    ),
    # Source: `FunctionTool` in serve/tools.py of facebookresearch/cwm. Its own tools bash, edit and create take text.
    "cwm": family(
        "cwm",
        each("<tool: NAME>\nARGUMENTS\n</tool>", between="\n"),
        more={
            "a body that is no object": ("<tool: bash>\nls -l\n</tool>", Message("<tool: bash>\nls -l\n</tool>")),
            "white space in the arguments": (
                '<tool: get_weather>\n{ "some": "json", "data": 10 }\n</tool>',
                Message(calls=(("get_weather", '{ "some": "json", "data": 10 }'),)),
            ),
        },
    ),
    # Sources: the template's lines of `metadata`; for two calls, agent_template/glm4.py of ms-swift 4.6.
    "glm4": family(
        "glm4",
        each("NAME\nARGUMENTS", between="<|assistant|>"),
        *("xinference/GLM-4-0414", "xinference/GLM-4-9B-chat"),
        schemas={"weather": b"", "now": b"", "f": b""},
        more={
            "a space after the name, and the mark of results": (
                'weather \n{"city": "Paris"}<|observation|>',
                Message(calls=(PARIS,)),
            ),
            "a text before a call": ("\nI look.<|assistant|>now\n{}", Message("\nI look.", calls=(NOW,))),
            "a text after a mark": ("now\n{}<|assistant|>\nDone.", Message("<|assistant|>\nDone.", calls=(NOW,))),
            "a word and an object": ('Answer\n{"city": "Paris"}', Message('Answer\n{"city": "Paris"}')),
            "a name in a text": ("weather\nis {fine}", Message("weather\nis {fine}")),
            "an object": ('{"name": "f", "arguments": {}}', Message('{"name": "f", "arguments": {}}')),
        },
    ),
    "solar_open": family(
        "solar_open", each(SOLAR, begin="<|tool_calls|>", end="<|calls|>"), "llama.cpp/upstage-Solar-Open-100B"
    ),
}
