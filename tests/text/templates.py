"""Chat templates modelled on those of common model families, and conversations to render."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

# One file a family, each with the constructs of its templates; `parts` has content in parts, `corners` the rare
# features of the language: whitespace control, scopes, macros, filters, loop variables.
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).with_name("families").iterdir())
}


@cache
def published() -> dict[str, str]:
    """Return the chat templates of published checkpoints by name, see TEMPLATES.md."""
    data = lzma.decompress(Path(__file__).with_name("published_templates.json.xz").read_bytes())
    templates: dict[str, str] = json.loads(data)
    return templates


CHATML, PARTS = TEMPLATES["qwen3"], TEMPLATES["parts"]

TOOLS: list[dict[str, Any]] = [
    {
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
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]

_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 1}}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Hello"}],
    "with a system message": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Hi\n\n"}],
    "several turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1 < 3?"},
        {"role": "assistant", "content": "  Yes & no.  "},
        {"role": "user", "content": "你好 \"quoted\" 'too' {{ not_rendered }} {% raw %}"},
    ],
    "thinking": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nanswer"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "done", "reasoning_content": "\nlet me see\n"},
    ],
    "reasoning by its other name": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "done", "reasoning": "let me see"},
    ],
    "tools": [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"sky": "blue"}'},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And now?"},
    ],
    "two calls": [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": "I shall ask.", "tool_calls": [_CALL, _CALL]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ],
    "roles out of order": [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "twice"}],
    "calls after an answer": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "\nanswer\n"},
        {"role": "user", "content": "second /nothink"},
        {"role": "assistant", "content": "", "reasoning_content": "which?", "tool_calls": [_CALL]},
        {"role": "tool", "name": "weather", "content": "{}"},
    ],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]},
    ],
    "thinking, then a question": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nanswer"},
        {"role": "user", "content": "again?"},
    ],
}

DOCUMENTS = [{"doc_id": 1, "title": "One", "text": "It is — ünlike — long."}, {"doc_id": "b", "text": "x"}]
