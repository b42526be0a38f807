"""Prompts of a wanted length in tokens, without knowing the tokenizer.

Two probes of known length tell what the server's template adds and how many
tokens a word costs; after that a length in tokens is a number of words.
"""

from __future__ import annotations

import random
from typing import Literal

from msgspec import Struct

Kind = Literal["random", "shared-prefix"]

PROBES = (32, 96)  # words

# Short and common, so that most vocabularies hold each as one token.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service
    friend father power hour game line end member law car city name team minute idea body back parent face level
    office door health person art war history party result change morning reason research girl guy moment air
    teacher force education
""".split()  # noqa: SIM905 - a list of words reads best as words


class WordCost(Struct, frozen=True):
    """tokens = overhead + words * per_word."""

    overhead: float = 0.0
    per_word: float = 1.0

    @classmethod
    def from_probes(cls, tokens: tuple[int, int]) -> WordCost:
        """Solve for the cost, given how many tokens the server counted in each probe."""
        per_word = (tokens[1] - tokens[0]) / (PROBES[1] - PROBES[0])
        if per_word <= 0:
            return cls()
        return cls(tokens[0] - PROBES[0] * per_word, per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.per_word))


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


class Prompts:
    """An endless supply. Equal seeds give equal prompts, in the order in which they are taken.

    shared  the part of each prompt that all have in common, where kind is "shared-prefix"
    """

    def __init__(self, kind: Kind, length: int, seed: int, *, shared: float) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
        self._own = length
        self._prefix = ""
        if kind == "shared-prefix":
            prefix = min(length - 1, round(length * shared))
            self._own = length - prefix
            self._prefix = words(self._rng, prefix) + " " if prefix else ""

    def take(self) -> str:
        return self._prefix + words(self._rng, self._own)
