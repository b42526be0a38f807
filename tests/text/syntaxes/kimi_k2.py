"""Kimi K2: a section of calls; the name, with a number, is outside of JSON, and is the call's id too."""

from __future__ import annotations

from tests.text.syntaxes.family import Family
from tests.text.transcripts import Message


def call(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


PARIS, ROME = ("weather", '{"city": "Paris"}'), ("weather", '{"city": "Rome"}')

FAMILIES = {
    "kimi_k2": Family(
        {
            "nothing but text": ("Four <| five.", Message("Four <| five.")),
            "one call": (section(call(PARIS[0], 0, PARIS[1])), Message(calls=(PARIS,))),
            "two calls after text": (
                "Let me see." + section(call(PARIS[0], 0, PARIS[1]), call(ROME[0], 1, ROME[1])),
                Message("Let me see.", calls=(PARIS, ROME)),
            ),
            "a call without arguments, then another": (
                section(call("now", 0, "{}"), call(ROME[0], 1, ROME[1])),
                Message(calls=(("now", "{}"), ROME)),
            ),
            "a mark within a text": (
                section(call("f", 0, '{"a": "<|tool_call_end|>"}')),
                Message(calls=(("f", '{"a": "<|tool_call_end|>"}'),)),
            ),
            "cut within the arguments": (
                section(call("f", 0, '{"a": "b'))[: -len("<|tool_call_end|><|tool_calls_section_end|>")],
                Message(calls=(("f", '{"a": "b'),)),
            ),
            "cut before the arguments": (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0",
                Message("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"),
            ),
        },
        templates=("llama.cpp/moonshotai-Kimi-K2",),
    )
}
