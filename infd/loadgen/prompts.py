"""Random prompts of a given length in tokens, without the server's tokenizer.

The server's token counts of two probe prompts give the chat template's overhead
and the tokens per word. These figures convert a length in tokens to words.
"""

from __future__ import annotations

import random
from typing import Literal

from msgspec import Struct

Kind = Literal["random", "shared-prefix"]

PROBES = (32, 96)  # numbers of words

# Short, common words, because these are one token each in most vocabularies.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service
    friend father power hour game line end member law car city name team minute idea body back parent face level
    office door health person art war history party result change morning reason research girl guy moment air
    teacher force education
""".split()  # noqa: SIM905 - readable as a paragraph


class WordCost(Struct, frozen=True):
    """The linear model tokens = overhead + words * per_word."""

    overhead: float = 0.0
    per_word: float = 1.0

    @classmethod
    def from_probes(cls, tokens: tuple[int, int]) -> WordCost:
        """Fit overhead and slope to the server's token counts of the two probes."""
        per_word = (tokens[1] - tokens[0]) / (PROBES[1] - PROBES[0])
        if per_word <= 0:
            return cls()
        return cls(tokens[0] - PROBES[0] * per_word, per_word)

    def words(self, tokens: int) -> int:
        """Return the number of words of a prompt of about `tokens` tokens, at least 1."""
        return max(1, round((tokens - self.overhead) / self.per_word))


def words(rng: random.Random, count: int) -> str:
    """Return `count` random words."""
    return " ".join(rng.choices(_WORDS, k=count))


class Prompts:
    """An endless sequence of prompts; equal seeds give equal sequences.

    length  words in a prompt
    shared  fraction of a prompt that all prompts share as a prefix, if kind is "shared-prefix"
    """

    def __init__(self, kind: Kind, length: int, seed: int, *, shared: float) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._own = length
        self._prefix = ""
        if kind == "shared-prefix":
            prefix = min(length - 1, round(length * shared))
            self._own = length - prefix
            self._prefix = words(self._rng, prefix) + " " if prefix else ""

    def take(self) -> str:
        return self._prefix + words(self._rng, self._own)
