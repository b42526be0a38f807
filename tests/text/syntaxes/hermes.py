"""Hermes: <tool_call>, an object with name and arguments, </tool_call>. Its transcripts are in test_tools.py."""

from __future__ import annotations

from tests.text.syntaxes.family import Family
from tests.text.test_tools import TRANSCRIPTS

FAMILIES = {
    "hermes": Family(
        TRANSCRIPTS,
        templates=(
            "llama.cpp/Qwen-Qwen2.5-7B-Instruct",
            "axolotl/exaone4",
            "llama.cpp/Qwen-Qwen3-0.6B",
            "llama.cpp/Qwen-QwQ-32B",
            "llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
            "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            "llama.cpp/ibm-granite-granite-4.0",
            "vllm/hermes",
        ),
    )
}
