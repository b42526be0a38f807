"""Conversations for training and evaluation, and the split of phrases, names and numbers into pools.

Each subject has a generator `draw(rng, pool) -> Conversation`. Phrases, names and
numbers of `Pool.HELD_OUT` are never drawn for training, so that the evaluation
cannot be passed by memorizing.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random


Word = TypeVar("Word")


class Pool(enum.Enum):
    """The part of all phrases, names and numbers from which a conversation is drawn."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class Expect(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Conditions for a correct last answer, which must meet every condition that is set.

    text      the answer equals this text, except for white space
    contains  the answer contains at least one alternative of each group, ignoring case
    calls     the answer calls exactly these tools, [{"name": ..., "arguments": {...}}], in this order
    json      the answer is JSON equal to this value
    """

    text: str | None = None
    contains: list[list[str]] = []
    calls: list[dict[str, Any]] | None = None
    json: Any = None


class Conversation(Struct, frozen=True, kw_only=True):
    """A conversation in the API's form.

    kind      row of the evaluation's table: "tools", "arithmetic", ...
    messages  each has role and content, and may have reasoning_content and tool_calls; the last is the assistant's
    tools     definitions, [{"type": "function", "function": {...}}]
    thinking  whether the last answer has reasoning_content
    """

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    thinking: bool = False
    expect: Expect = Expect()


# One phrase in six is held out.
HELD_OUT_SHARE: Final = 6


class Phrases(list[str]):
    """A list of phrases, every sixth of which is held out. `more` are further phrases, for training only."""

    def __init__(self, written: Sequence[str], more: Sequence[str]) -> None:
        super().__init__(written)
        self.more = more


def part(words: Sequence[Word], pool: Pool) -> Sequence[Word]:
    """Return the words of a list that belong to a pool. The list must contain at least HELD_OUT_SHARE words."""
    assert len(words) >= HELD_OUT_SHARE
    if pool is Pool.HELD_OUT:
        return words[HELD_OUT_SHARE - 1 :: HELD_OUT_SHARE]
    more: Sequence[Any] = words.more if isinstance(words, Phrases) else ()
    return [*(word for place, word in enumerate(words, 1) if place % HELD_OUT_SHARE), *more]


def pick(rng: Random, words: Sequence[Word], pool: Pool) -> Word:
    """Draw one of the words that belong to a pool."""
    return rng.choice(part(words, pool))
