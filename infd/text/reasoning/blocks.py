"""A thought between two marks before the answer; a family is a row of a table.

The model opens the block, or the prompt does (a model that always thinks), or the prompt contains a closed, empty block
(thinking is off). A block that is never closed is a thought without content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.request import Thought
from infd.text.reasoning.base import BlockParser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.text.chat import ChatTemplate


class Block(Struct, frozen=True):
    """One family; see ReasoningSyntax.

    inner  tokens within the marks
    """

    opening: str
    closing: str
    inner: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opening, self.closing, *self.inner)

    def matches(self, template: ChatTemplate) -> bool:
        return template.mentions(self.opening) and template.mentions(self.closing)

    def thought(self, prompt: str, continued: str) -> Thought | None:
        if continued.strip():
            begun = continued.rfind(self.opening) > continued.rfind(self.closing)
            return Thought(self.opening, self.closing, inside=True) if begun else None
        end = prompt.rstrip()
        if end.endswith(self.closing):
            return None
        return Thought(self.opening, self.closing, inside=end.endswith(self.opening))

    def start(self, prompt: str, continued: str, ends: Sequence[str] = ()) -> BlockParser | None:
        thought = self.thought(prompt, continued)
        return None if thought is None else BlockParser(thought, ends)


QWEN3: Final = Block("<think>", "</think>")

# The marks of many families are Qwen3's, so Qwen3 is last.
FAMILIES: Final[Mapping[str, Block]] = {
    "mistral": Block("[THINK]", "[/THINK]"),
    "seed_oss": Block("<seed:think>", "</seed:think>"),
    "minimax_m3": Block("<mm:think>", "</mm:think>"),
    "cohere_command3": Block("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": Block("<|channel>thought", "<channel|>", inner=("<|channel>",)),
    "kimi": Block("◁think▷", "◁/think▷"),
    "granite": Block("Here is my thought process:", "Here is my response:"),
    "apriel": Block("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "qwen3": QWEN3,
}

_LIKE_QWEN3: Final = (
    *("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "deepseek_v4", "glm45", "glm47", "ling3", "kimi_k2"),
    *(
        "minimax_m2",
        "mimo",
        "nemotron_v3",
        "olmo3",
        "poolside_v1",
        "step3",
        "step3p5",
        "holo2",
        "granite_thinking_parser",
    ),
)
ALIASES: Final[Mapping[str, str]] = {
    **dict.fromkeys(_LIKE_QWEN3, "qwen3"),
    "cohere_command4": "cohere_command3",
    "identity": "none",
}
