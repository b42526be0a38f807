"""Write prompts of exact lengths in tokens, with the server's tokenizer.

Completions take token ids, drawn from those of common words. Chats take text: words, whose number follows from the
tokens that two probes have, then fitted at the end until the server counts the wanted tokens. Without a tokenizer
(POST /tokenize) the usage of two probe requests gives the tokens per word, and lengths are about right.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from infd.loadgen.datasets.call import Outline

PROBES: Final = (32, 96)  # numbers of words
_FITTINGS: Final = 12  # counts of one prompt; most fit at the first

# Short, common words, because these are one token each in most vocabularies.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service
    friend father power hour game line end member law car city name team minute idea body back parent face level
    office door health person art war history party result change morning reason research girl guy moment air
    teacher force education
""".split()  # noqa: SIM905 - readable as a paragraph

ALL_WORDS: Final = " ".join(_WORDS)


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


class Counter(Protocol):
    """Counts the tokens of a prompt."""

    async def __call__(self, text: str) -> int: ...


class Lengths(Struct):
    """How prompts got their lengths.

    by       "ids": prompts are token ids; "tokenize": the server counted the texts; "probes": lengths are approximate,
             estimated from the usage of two probe requests
    inexact  number of prompts that are some tokens too long or too short
    """

    by: str
    inexact: int = 0


class Writer(Protocol):
    """Writes the prompt of an outline."""

    lengths: Lengths

    async def write(self, outline: Outline, seed: int) -> str | list[int]: ...


class IdWriter:
    """Writes prompts as token ids.

    pool  ids of ordinary words; a prompt of any ids might contain special ones
    """

    def __init__(self, pool: list[int]) -> None:
        self.lengths = Lengths("ids")
        self._pool = sorted(set(pool))

    async def write(self, outline: Outline, seed: int) -> list[int]:
        return [
            token_id
            for block in outline.blocks
            for token_id in _random(seed, block.seed).choices(self._pool, k=block.tokens)
        ]


class TextWriter:
    """Writes prompts as words.

    count  None: the server has no tokenizer, and lengths follow `cost` alone
    """

    def __init__(self, cost: WordCost, count: Counter | None) -> None:
        self.lengths = Lengths("probes" if count is None else "tokenize")
        self._cost = cost
        self._count = count

    async def write(self, outline: Outline, seed: int) -> str:
        *shared, own = outline.blocks
        written: list[str] = []
        cost = self._cost
        for block in shared:
            written += _random(seed, block.seed).choices(_WORDS, k=cost.words(block.tokens))
            cost = WordCost(0.0, cost.per_word)  # the template's tokens count in the first block
        rng = _random(seed, own.seed)
        tail = rng.choices(_WORDS, k=cost.words(own.tokens))
        if self._count is None:
            return " ".join((*written, *tail))
        return await self._fit(written, tail, outline.tokens, rng, self._count)

    async def _fit(self, head: list[str], tail: list[str], tokens: int, rng: random.Random, count: Counter) -> str:
        """Lengthen or shorten the tail until the prompt has `tokens` tokens; the closest text if none has."""
        best, best_off = "", math.inf
        for _ in range(_FITTINGS):
            text = " ".join((*head, *tail))
            off = tokens - await count(text)
            if abs(off) < best_off:
                best, best_off = text, abs(off)
            if off == 0 or (off < 0 and len(tail) == 1 and len(tail[0]) == 1):
                break
            _adjust(tail, off, self._cost.per_word, rng)
        self.lengths.inexact += best_off != 0
        return best


def _adjust(tail: list[str], off: int, per_word: float, rng: random.Random) -> None:
    """Change a tail by about `off` tokens: by whole words, and the rest, less than a word, by letters."""
    if off >= per_word:
        tail += rng.choices(_WORDS, k=int(off / per_word))
    elif off > 0:
        tail[-1] += "".join(rng.choices("bcdfghjkmnpqrstvwxz", k=off))
    elif -off >= per_word and len(tail) > 1:
        del tail[max(1, len(tail) - int(-off / per_word)) :]
    else:
        last = tail.pop()
        if len(last) + off > 0:
            tail.append(last[:off])
        elif not tail:
            tail.append(last[:1])


def words(rng: random.Random, count: int) -> str:
    """Return `count` random words."""
    return " ".join(rng.choices(_WORDS, k=count))


def _random(seed: int, block: str) -> random.Random:
    return random.Random(f"{seed} {block}")  # noqa: S311 - reproducible, not secret


def text_of_messages(prompt: str | list[int] | list[dict[str, Any]]) -> str | list[int]:
    """Return a prompt as one text; token ids stay token ids."""
    found: str | list[int] = body_of(prompt, chat=False)["prompt"]
    return found


def body_of(prompt: str | list[int] | list[dict[str, Any]], *, chat: bool) -> dict[str, Any]:
    """Return the fields of a request that hold a prompt. Messages for completions are joined to one text."""
    if not chat:
        texts = [str(turn.get("content", "")) for turn in prompt if isinstance(turn, dict)] if _messages(prompt) else []
        return {"prompt": "\n".join(texts) if texts else prompt}
    return {"messages": prompt if _messages(prompt) else [{"role": "user", "content": prompt}]}


def _messages(prompt: str | list[int] | list[dict[str, Any]]) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
