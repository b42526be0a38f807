"""How often each subject is drawn, and how single exchanges become long conversations."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from infd.embedded.recipe import arithmetic, drills, facts, manners, strings, structured, tools, unknown
from infd.embedded.recipe.styles import ORDERS, STYLES, ordered, restyled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from infd.embedded.recipe.conversation import Conversation, Pool

    Draw = Callable[[Random, Pool], Conversation]

SUBJECTS: Final[Mapping[Draw, float]] = MappingProxyType(
    {
        facts.draw: 0.25,
        manners.draw: 0.12,
        unknown.draw: 0.06,
        arithmetic.draw: 0.12,
        strings.draw: 0.10,
        tools.draw: 0.25,
        structured.draw: 0.10,
    }
)
CHAINED: Final = 0.06  # of all conversations are several, one after the other
DRILLED: Final = 0.08  # are many small exercises of one subject, one after the other
SUMS: Final = 0.12  # are rows of sums
COPIES: Final = 0.15  # are rows of words to copy
STYLED: Final = 0.04  # are told how to speak
BESIDE: Final = 0.03  # have tools beside them that nobody needs
_LONGEST: Final = 8
_DRILLS: Final[tuple[Draw, ...]] = (arithmetic.draw, arithmetic.draw, arithmetic.draw, strings.draw, structured.draw)


def draw(rng: Random, pool: Pool) -> Conversation:
    """Draw a conversation of any subject."""
    (way,) = rng.choices(list(_WAYS), list(_WAYS.values()))
    return way(rng, pool)


def chained(rng: Random, pool: Pool) -> Conversation:
    """Draw several conversations, and let them follow one another: the last one is asked for in their presence."""
    last = _single(rng, pool)
    if last.messages[0]["role"] == "system" or last.tools:
        last = plain(rng, pool)
    before = [message for _ in range(rng.randint(1, _LONGEST)) for message in plain(rng, pool).messages]
    return replace(last, messages=[*before, *last.messages])


def drilled(rng: Random, pool: Pool) -> Conversation:
    """Draw many exercises of one subject, one after the other."""
    subject = rng.choice(_DRILLS)
    exercises = [_bare(rng, pool, subject) for _ in range(rng.randint(4, 14))]
    return replace(exercises[-1], messages=[message for one in exercises for message in one.messages])


def plain(rng: Random, pool: Pool) -> Conversation:
    """Draw a conversation without tools and system message, not thought about, and not to be answered in JSON."""
    while True:
        one = _bare(rng, pool, _single)
        if one.expect.json is None:
            return one


def _single(rng: Random, pool: Pool) -> Conversation:
    subject: Draw = rng.choices(list(SUBJECTS), list(SUBJECTS.values()))[0]
    return subject(rng, pool)


def _styled(rng: Random, pool: Pool) -> Conversation:
    style = rng.choice(sorted(STYLES))
    return ordered(restyled(plain(rng, pool), STYLES[style]), rng.choice(ORDERS[style]))


def _beside(rng: Random, pool: Pool) -> Conversation:
    one = plain(rng, pool)
    return tools.beside(rng, pool, one) if one.kind in {"infd", "chat"} else one


def _bare(rng: Random, pool: Pool, subject: Draw) -> Conversation:
    while True:
        one = subject(rng, pool)
        if not one.tools and not one.thinking and one.messages[0]["role"] != "system":
            return one


_WAYS: Final[Mapping[Draw, float]] = MappingProxyType(
    {
        chained: CHAINED,
        drilled: DRILLED,
        drills.sums: SUMS,
        drills.copies: COPIES,
        _styled: STYLED,
        _beside: BESIDE,
        _single: 1 - CHAINED - DRILLED - SUMS - COPIES - STYLED - BESIDE,
    }
)
