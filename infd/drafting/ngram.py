"""Draft the tokens that followed an earlier occurrence of the choice's last tokens, in its prompt or its answer.

Source: Saxena 2023, prompt lookup decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.drafting.drafter import RUN
from infd.drafting.occurrences import MOST_INDEXED, Occurrences, continued

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.request import Request


class NgramDrafter:
    """Implements Drafter."""

    sure = False

    def __init__(self, prompt_tokens: int = 0) -> None:
        self.run = 0
        self._seen = Occurrences(RUN, since=prompt_tokens - MOST_INDEXED)

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        self._seen.extend(tokens, len(tokens) - 1)  # the last run has no continuation yet
        found = self._seen.find(tokens, tokens)
        if found is None:
            return []
        self.run, place = found
        return continued(tokens, place, most)

    def finish(self, tokens: Sequence[int]) -> None:
        """No-op: answers are not remembered."""


class NgramDrafting:
    """Implements Drafting."""

    def __init__(self, most: int) -> None:
        self.most = most

    def drafter(self, request: Request, root: bytes) -> NgramDrafter:
        return NgramDrafter(len(request.prompt))
