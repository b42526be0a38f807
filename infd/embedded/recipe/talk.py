"""Turns for facts.py, manners.py and unknown.py: vary the phrasing of questions, and chain turns into conversations.

Training questions imitate what users type: without capitals and punctuation, with
typos and politeness. Held-out questions are not varied.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.embedded.recipe import slots
from infd.embedded.recipe.conversation import Conversation, Expect, Pool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

THINKING_SHARE: Final = 0.15

_HABITS: Final = slots.read("talk")


class Turn(Struct, frozen=True, kw_only=True):
    """A question with its answer.

    expect   conditions for a correct answer
    thought  reasoning before the answer
    """

    question: str
    answer: str
    expect: Expect
    thought: str


def fold(text: str) -> str:
    """Return the words of `text` in lower case, without punctuation, with a space before and after, for comparison."""
    return f" {' '.join(re.findall(r'[a-z0-9_]+', text.lower()))} "


def fill(rng: Random, text: str, pool: Pool) -> str:
    """Fill the blanks of a phrase, such as {city}, {int:1:9} or {made_up}, each with a new value."""

    def value(blank: re.Match[str]) -> str:
        if blank[1] == "made_up":
            return slots.made_up(rng, pool)
        return slots.listed(rng, "topics", pool) if blank[1] == "topics" else str(slots.fill(rng, blank[1], pool))

    return re.sub(r"\{([^{}]+)\}", value, text)


def typed(rng: Random, text: str) -> str:
    """Vary capitals and punctuation of a phrase, without changing words."""
    if rng.random() < 0.4:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.25:
        text = text.rstrip("?.! ")
    return text


def roughened(rng: Random, text: str) -> str:
    """Vary a phrase with synonyms, typos and politeness."""
    if rng.random() < 0.35:
        for start, others in _HABITS["otherwise"].items():
            if text.startswith(start):
                text = rng.choice(others) + text.removeprefix(start)
                break
    if rng.random() < 0.12:
        text = _mistyped(rng, text)
    if rng.random() < 0.15:
        text = rng.choice(_HABITS["before"]) + text
    if rng.random() < 0.1:
        text = text.rstrip("?") + rng.choice(_HABITS["behind"])
    if rng.random() < 0.03:
        return text.upper()
    if rng.random() < 0.4:
        text = re.sub(r"\b[a-z]+\b", lambda word: _HABITS["names"].get(word[0], word[0]), text)
    return typed(rng, text)


def _mistyped(rng: Random, text: str) -> str:
    words = text.split(" ")
    places = [place for place, word in enumerate(words) if len(word) > 3 and word.isalpha()]
    if not places:
        return text
    place = rng.choice(places)
    word = words[place]
    at = rng.randrange(1, len(word) - 1)
    words[place] = rng.choice(
        (
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
        )
    )
    return " ".join(words)


def converse(
    rng: Random,
    kind: str,
    turns: Sequence[Turn],
    pool: Pool,
    *,
    system: str | None = None,
    thinking: bool | None = None,
) -> Conversation:
    """Chain turns into a conversation with the Expect of the last turn.

    system    system message; None: at random a generic message or none
    thinking  whether the last answer has reasoning; None: at random
    """
    messages: list[dict[str, Any]] = (
        slots.opening(rng, pool) if system is None else [{"role": "system", "content": system}]
    )
    if thinking is None:
        thinking = rng.random() < THINKING_SHARE
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    if thinking:
        messages[-1]["reasoning_content"] = turns[-1].thought
    return Conversation(kind=kind, messages=messages, thinking=thinking, expect=turns[-1].expect)
