"""Draft what followed the choice's last tokens, in the choice itself or in earlier answers to similar requests.

Answers are remembered by prefix root, so that a draft derives only from requests of the same tenant, adapter and salt.
The longer the run of tokens that occurred before, the more tokens are drafted.

Source: Oliaro et al. 2024, SuffixDecoding. A hash table for each of a few lengths takes the place of the suffix tree.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from infd.drafting.occurrences import ENTRY_BYTES, Occurrences, continued

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.request import Request

LENGTHS: Final = (16, 8, 4, 2)
FACTOR: Final = 2  # drafts per token of the run that occurred before
LONGEST: Final = 4096  # most tokens of a remembered answer


class Answers:
    """The answers to requests of one prefix root, one after another."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self.seen = Occurrences(LENGTHS)

    def add(self, answer: Sequence[int]) -> None:
        self.tokens.extend(answer[:LONGEST])

    @property
    def bytes(self) -> int:
        """Return the approximate memory, once all tokens are read."""
        return (4 + ENTRY_BYTES * len(LENGTHS)) * len(self.tokens)


class SuffixDrafter:
    """Implements Drafter."""

    def __init__(self, answers: Answers, drafting: SuffixDrafting, prompt_tokens: int) -> None:
        self._seen = Occurrences(LENGTHS)
        self._answers = answers
        self._drafting = drafting
        self._prompt_tokens = prompt_tokens

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        self._seen.extend(tokens, len(tokens) - 1)
        earlier = self._answers
        earlier.seen.extend(earlier.tokens, len(earlier.tokens) - 1)
        own, other = self._seen.find(tokens), earlier.seen.find(tokens)
        if own is not None and (other is None or own[0] >= other[0]):
            return continued(tokens, own[1], min(most, FACTOR * own[0]))
        if other is not None:
            return earlier.tokens[other[1] : other[1] + min(most, FACTOR * other[0])].tolist()
        return []

    def finish(self, tokens: Sequence[int]) -> None:
        """Remember the answer for later requests of the root."""
        self._answers.add(tokens[self._prompt_tokens :])
        self._drafting.evict()


class SuffixDrafting:
    """Implements Drafting. The answers of the root that was used least recently are forgotten first.

    limit  most bytes of remembered answers, see Answers.bytes
    """

    def __init__(self, most: int, limit: int) -> None:
        self.most = most
        self._limit = limit
        self._answers: dict[bytes, Answers] = {}  # in the order of use

    def drafter(self, request: Request, root: bytes) -> SuffixDrafter:
        answers = self._answers.pop(root, None) or Answers()
        self._answers[root] = answers
        return SuffixDrafter(answers, self, len(request.prompt))

    def evict(self) -> None:
        """Forget answers until the limit holds."""
        while self._answers and sum(each.bytes for each in self._answers.values()) > self._limit:
            del self._answers[next(iter(self._answers))]
