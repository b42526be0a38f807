"""The evaluation's questions, drawn once from the held-out pool and stored in heldout.jsonl before training.

python -m infd.embedded.recipe.heldout > infd/embedded/recipe/heldout.jsonl
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from infd.embedded.recipe import arithmetic, facts, manners, strings, structured, tools, unknown
from infd.embedded.recipe.conversation import Conversation, Pool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from infd.embedded.recipe.mixture import Draw

FILE: Final = Path(__file__).parent / "heldout.jsonl"
SEED: Final = 7
COUNTS: Final[Mapping[Draw, int]] = MappingProxyType(
    {
        arithmetic.draw: 150,
        facts.draw: 200,
        manners.draw: 80,
        strings.draw: 80,
        structured.draw: 80,
        tools.draw: 200,
        unknown.draw: 60,
    }
)


def read() -> list[Conversation]:
    """Return the stored questions, each with the correct answer from its generator."""
    return [msgspec.json.decode(line, type=Conversation) for line in FILE.read_bytes().splitlines()]


def drawn() -> Iterator[Conversation]:
    """Yield distinct questions: for each subject, the number in COUNTS."""
    rng = random.Random(SEED)  # noqa: S311
    seen: set[bytes] = set()
    for draw, count in COUNTS.items():
        found = 0
        while found < count:
            one = draw(rng, Pool.HELD_OUT)
            asked = msgspec.json.encode((one.messages[:-1], one.tools))
            if asked not in seen:
                seen.add(asked)
                found += 1
                yield one


if __name__ == "__main__":
    for conversation in drawn():
        sys.stdout.buffer.write(msgspec.json.encode(conversation) + b"\n")
