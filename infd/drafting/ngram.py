"""Draft the tokens that followed an earlier occurrence of the choice's last tokens, in its prompt or its answer, and go
on as the answer did where it left the text that it follows (`trail`).

Source: Saxena 2023, prompt lookup decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.drafting.trail import Trail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.request import Request

FACTOR: Final = 7  # drafts per token of the run that occurred before: more would be guessed in vain


class NgramDrafter:
    """Implements Drafter."""

    sure = False

    def __init__(self, prompt_tokens: int = 0) -> None:
        self.run = 0
        self._trail = Trail(prompt_tokens)

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        self._trail.follow(tokens)
        self.run = self._trail.run
        return self._trail.drafts(tokens, min(most, FACTOR * self.run))

    def finish(self, tokens: Sequence[int]) -> None:
        """No-op: answers are not remembered."""


class NgramDrafting:
    """Implements Drafting."""

    def __init__(self, most: int) -> None:
        self.most = most

    def drafter(self, request: Request, root: bytes) -> NgramDrafter:
        return NgramDrafter(len(request.prompt))
