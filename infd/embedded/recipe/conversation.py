"""What the model learns from: finished conversations, drawn by one generator a subject.

A generator is a function `draw(rng, pool) -> Conversation`. It takes phrases,
names and numbers from the pool it is given: what stands in `Pool.HELD_OUT` is
never drawn for training, so that the evaluation asks for skill and not memory.
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
    """Which half of the phrases, names and numbers a conversation is made of."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class Expect(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When the last answer counts as right. Everything that is given must hold.

    text      the answer is this, but for space around it
    contains  of each group at least one alternative stands in the answer, whatever its case
    calls     the answer calls these tools, [{"name": ..., "arguments": {...}}], in this order and no others
    json      the answer is JSON, and equal to this
    """

    text: str | None = None
    contains: list[list[str]] = []
    calls: list[dict[str, Any]] | None = None
    json: Any = None


class Conversation(Struct, frozen=True, kw_only=True):
    """One exchange, as the API would carry it.

    kind      the row of the evaluation's table that it counts in: "tools", "arithmetic", ...
    messages  role, content, and where there are any reasoning_content and tool_calls; the last one is the assistant's
    tools     what is offered, in the API's form: [{"type": "function", "function": {...}}]
    thinking  whether the last answer is thought about first
    """

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    thinking: bool = False
    expect: Expect = Expect()


# One phrase in this many is held out.
HELD_OUT_SHARE: Final = 6


class Phrases(list[str]):
    """A list of which every sixth phrase is held out, and more phrases that are for training alone."""

    def __init__(self, written: Sequence[str], more: Sequence[str]) -> None:
        super().__init__(written)
        self.more = more


def part(words: Sequence[Word], pool: Pool) -> Sequence[Word]:
    """Return the words of a list that belong to a pool. A list needs at least six."""
    assert len(words) >= HELD_OUT_SHARE
    if pool is Pool.HELD_OUT:
        return words[HELD_OUT_SHARE - 1 :: HELD_OUT_SHARE]
    more: Sequence[Any] = words.more if isinstance(words, Phrases) else ()
    return [*(word for place, word in enumerate(words, 1) if place % HELD_OUT_SHARE), *more]


def pick(rng: Random, words: Sequence[Word], pool: Pool) -> Word:
    """Draw one of the words that belong to a pool."""
    return rng.choice(part(words, pool))
