"""Draft the tokens that followed an earlier occurrence of the choice's last tokens, in the choice or earlier answers.
Within the choice, drafts go on as the answer did where it left the text that it follows (`trail`).

Answers are remembered by prefix root, so that a draft derives only from requests of the same tenant, adapter and salt.
The longer the run of tokens that occurred before, the more tokens are drafted.

Source: Oliaro et al. 2024, SuffixDecoding. Chains of equal pairs of tokens take the place of the suffix tree.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from infd.drafting.drafter import RUN
from infd.drafting.occurrences import ENTRY_BYTES, Occurrences
from infd.drafting.trail import Trail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.request import Request

FACTOR: Final = 2  # drafts per token of the run that occurred before
LONGEST: Final = 4096  # most tokens of a remembered answer
ROOT_BYTES: Final = 2048  # approximate memory of a root without tokens


class Answers:
    """The answers to requests of one prefix root, one after another."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = array("i", tokens)
        self.seen = Occurrences(RUN)

    @property
    def bytes(self) -> int:
        """Return the approximate memory, once all tokens are read."""
        return ROOT_BYTES + (4 + ENTRY_BYTES) * len(self.tokens)


class SuffixDrafter:
    """Implements Drafter."""

    sure = False

    def __init__(self, drafting: SuffixDrafting, root: bytes, prompt_tokens: int) -> None:
        self.run = 0
        self._trail = Trail(prompt_tokens)
        self._drafting = drafting
        self._root = root
        self._prompt_tokens = prompt_tokens

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        trail, other, earlier = self._trail, None, self._drafting.answers(self._root)
        trail.follow(tokens)
        if earlier is not None:
            earlier.seen.extend(earlier.tokens, len(earlier.tokens) - 1)
            other = earlier.seen.find(tokens, earlier.tokens)
        if earlier is None or other is None or trail.run >= other[0]:
            self.run = trail.run
            return trail.drafts(tokens, min(most, FACTOR * self.run))
        self.run, place = other
        return earlier.tokens[place : place + min(most, FACTOR * self.run)].tolist()

    def finish(self, tokens: Sequence[int]) -> None:
        """Remember the answer for later requests of the root."""
        self._drafting.remember(self._root, tokens[self._prompt_tokens :])


class SuffixDrafting:
    """Implements Drafting. The answers of the root whose last answer is oldest are forgotten first.

    limit  most bytes of remembered answers, see Answers.bytes
    """

    def __init__(self, most: int, limit: int) -> None:
        self.most = most
        self._limit = limit
        self._bytes = 0
        self._answers: dict[bytes, Answers] = {}  # in the order in which answers came

    def drafter(self, request: Request, root: bytes) -> SuffixDrafter:
        return SuffixDrafter(self, root, len(request.prompt))

    def answers(self, root: bytes) -> Answers | None:
        """Return the answers of a root; None if none is remembered."""
        return self._answers.get(root)

    def remember(self, root: bytes, answer: Sequence[int]) -> None:
        """Remember an answer, and forget others until the limit holds."""
        if not answer:
            return
        held = self._answers.pop(root, None)
        if held is None:
            held = Answers(answer[:LONGEST])
        else:
            self._bytes -= held.bytes
            held.tokens.extend(answer[:LONGEST])
        self._answers[root] = held
        self._bytes += held.bytes
        while self._bytes > self._limit:
            first = next(iter(self._answers))
            oldest = self._answers.pop(first)
            self._bytes -= oldest.bytes
            if not self._answers and len(oldest.tokens) > 1:  # the only root: the newer half stays
                kept = Answers(oldest.tokens[len(oldest.tokens) // 2 :])
                self._answers[first] = kept
                self._bytes += kept.bytes
