"""Generate drills: conversations of many sums to calculate, or many words to copy.

Drills train arithmetic and copying with few tokens, because nearly every token of
an answer is part of a result or a copy.
"""

from __future__ import annotations

import json
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Final

from infd.embedded.recipe import arithmetic
from infd.embedded.recipe.conversation import Conversation
from infd.embedded.recipe.slots import KINDS, listed

if TYPE_CHECKING:
    from random import Random

    from infd.embedded.recipe.conversation import Pool

LETTERS_SHARE: Final = 0.35
# Kinds of slots.py whose values are text.
COPIED: Final = tuple(sorted(kind for kind in KINDS if kind not in {"decimal"}))


def sums(rng: Random, pool: Pool) -> Conversation:
    """Draw a conversation with many exercises in one question. The answer has an equation or the reasoning for each."""
    problems = [arithmetic.exercise(rng, pool) for _ in range(rng.randint(8, 24))]
    slowly = rng.random() < 0.3
    if slowly:
        problems = problems[: len(problems) // 2]
    asked = "Work these out step by step:" if slowly else "Work these out:"
    said = [problem.thought if slowly else problem.answer for problem in problems]
    return _rows(asked, [problem.answer.split(" = ")[0] for problem in problems], "\n".join(said))


def copies(rng: Random, pool: Pool) -> Conversation:
    """Draw a conversation whose answer copies many values: as lines, as a JSON list, or as a JSON object."""
    values = [
        _letters(rng) if rng.random() < LETTERS_SHARE else str(KINDS[rng.choice(COPIED)](rng, pool))
        for _ in range(rng.randint(4, 12))
    ]
    form = rng.randrange(3)
    if form == 0:
        return _rows("Repeat these lines:", values, "\n".join(values))
    if form == 1:
        return _rows("Write these lines as a JSON list:", values, json.dumps(values, ensure_ascii=False))
    keys = list(dict.fromkeys(_key(rng, pool) for _ in values))
    pairs = dict(zip(keys, values, strict=False))
    wanted = {key: pairs[key] for key in rng.sample(list(pairs), rng.randint(1, len(pairs)))}
    asked = f"Give {', '.join(wanted)} of these lines as JSON:"
    return _rows(asked, [f"{key}: {value}" for key, value in pairs.items()], json.dumps(wanted, ensure_ascii=False))


def _key(rng: Random, pool: Pool) -> str:
    if rng.random() < LETTERS_SHARE:
        return _letters(rng).lower()
    words = [
        listed(rng, rng.choice(("words", "attributes", "verbs")), pool) for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]
    return "_".join(words)


def _letters(rng: Random) -> str:
    """Draw meaningless letters, so that the model learns to copy any text."""
    word = "".join(rng.choice(ascii_lowercase) for _ in range(rng.randint(2, 10)))
    return word.capitalize() if rng.random() < 0.4 else word


def _rows(asked: str, lines: list[str], answer: str) -> Conversation:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "\n".join([asked, *lines])},
        {"role": "assistant", "content": answer},
    ]
    return Conversation(kind="drill", messages=messages)
