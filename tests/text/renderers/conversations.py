"""Conversations that renderers render: plain, system messages, tools, parallel calls, thoughts, several turns."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say what the weather is <now> & here — 'é'",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["city"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [WEATHER, TIME]


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, content: str, name: str = "weather") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": name, "content": content}


USER = {"role": "user", "content": "What is the weather in Zürich? 你好 \"x\" 'y' {{ z }}"}
SYSTEM = {"role": "system", "content": "Be brief.\nAlways."}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        call(1, "weather", city="Zürich", days=1, more={"a": [1, 2.5, None, True], "é": "\n"}),
        call(2, "time"),
    ],
}
RESULTS = [result(1, '{"sky": "blue"}'), result(2, "12:30", "time")]
ONE_CALL = {"role": "assistant", "content": "", "tool_calls": [call(3, "weather", city="Bern")]}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one question": ([USER], None),
    "a system message": ([SYSTEM, USER], None),
    "several turns": ([SYSTEM, USER, {"role": "assistant", "content": "  Blue. "}, USER], None),
    "offered tools": ([SYSTEM, USER], TOOLS),
    "offered tools, no system message": ([USER], TOOLS),
    "parallel calls": ([SYSTEM, USER, CALLED, *RESULTS], TOOLS),
    "an answer after calls": (
        [SYSTEM, USER, CALLED, *RESULTS, {"role": "assistant", "content": "Blue, half past twelve."}, USER],
        TOOLS,
    ),
    "calls in two rounds": ([USER, ONE_CALL, result(3, "rain"), {**ONE_CALL}, result(3, "sun")], TOOLS),
    "thoughts": (
        [
            USER,
            {**ONE_CALL, "reasoning_content": "I look it up.\n\nNow."},
            result(3, "rain"),
            {"role": "assistant", "content": "Rain.", "reasoning_content": "It says rain."},
            {"role": "user", "content": "Sure?"},
            {**ONE_CALL, "reasoning_content": "Again."},
            result(3, "rain"),
        ],
        TOOLS,
    ),
}
