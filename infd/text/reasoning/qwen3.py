"""<think> ... </think> before the answer: Qwen3, and the many models trained on the same marks.

The model opens the block, or the prompt does (a model that always thinks), or the prompt contains a closed, empty block
(thinking is off). A block that is never closed is a thought without content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.request import Thought
from infd.text.reasoning.base import BlockParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.text.chat import ChatTemplate

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class Qwen3:
    """See ReasoningSyntax."""

    marks = (OPEN, CLOSE)

    def matches(self, template: ChatTemplate) -> bool:
        return template.mentions(OPEN) and template.mentions(CLOSE)

    def thought(self, prompt: str, continued: str) -> Thought | None:
        if continued.strip():
            begun = continued.rfind(OPEN) > continued.rfind(CLOSE)
            return Thought(OPEN, CLOSE, inside=True) if begun else None
        end = prompt.rstrip()
        return None if end.endswith(CLOSE) else Thought(OPEN, CLOSE, inside=end.endswith(OPEN))

    def start(self, prompt: str, continued: str, ends: Sequence[str] = ()) -> BlockParser | None:
        thought = self.thought(prompt, continued)
        return None if thought is None else BlockParser(thought, ends)
