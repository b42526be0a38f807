"""Record conversations as a family's own code renders them: `python -m tests.text.renderers.record FILE`.

FILE  encoding/encoding_dsv32.py of DeepSeek V3.2 (MIT licence), which this program imports
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from tests.text.renderers.conversations import CONVERSATIONS

DEEPSEEK = Path(__file__).with_name("deepseek_v32.json")


def deepseek(file: str) -> dict[str, str]:
    specification = importlib.util.spec_from_file_location("encoding_dsv32", file)
    assert specification is not None
    assert specification.loader is not None
    reference: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(reference)
    rendered = {}
    for name, (messages, tools) in CONVERSATIONS.items():
        conversation = [dict(message) for message in messages]
        if tools:
            if conversation[0]["role"] != "system":
                conversation.insert(0, {"role": "system", "content": ""})
            conversation[0]["tools"] = tools
        for message in conversation:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message.get("tool_calls", [])
            ]
        for mode in ("chat", "thinking"):
            try:
                rendered[f"{name}, {mode}"] = reference.encode_messages(conversation, mode)
            except (AssertionError, reference.__dict__.get("DS32EncodingError", AssertionError)):
                continue  # the reference demands thoughts
    return rendered


if __name__ == "__main__":
    DEEPSEEK.write_text(json.dumps(deepseek(sys.argv[1]), ensure_ascii=False, indent=1) + "\n")
