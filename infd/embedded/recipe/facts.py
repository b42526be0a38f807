"""What the model knows about infd, asked in many ways.

The facts, and how they are asked for, stand in facts.toml. Written questions are joined by
composed ones: what somebody wants to do in "how do I ...", what it is about in "what is ...".
The evaluation asks written questions only, the sixth, twelfth, ... of each fact; no training
question contains one of those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.embedded.recipe import slots
from infd.embedded.recipe.conversation import Conversation, Expect, Phrases, Pool, part, pick
from infd.embedded.recipe.talk import Turn, converse, fold, roughened

if TYPE_CHECKING:
    from random import Random

COMPOSED_SHARE: Final = 0.45
EARLIER_SHARE: Final = 0.2

_FRAMES: Final[dict[str, list[str]]] = slots.read("facts")["frames"]


class Fact(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing to know. The fields are told at the top of facts.toml."""

    id: str
    says: tuple[str, ...]
    contains: list[list[str]]
    thought: str
    questions: Phrases
    goals: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    check: tuple[str, ...] = ()

    def answered(self, rng: Random, question: str, recall: str) -> Turn:
        return Turn(
            question=question,
            answer=rng.choice(self.says),
            expect=Expect(contains=self.contains),
            thought=f"{recall} {self.thought}.",
        )


def read(name: str) -> tuple[Fact, ...]:
    """Return the facts of a file."""
    return slots.converted(slots.read(name)["fact"], tuple[Fact, ...])


def held_out(facts: tuple[Fact, ...]) -> tuple[str, ...]:
    """Return the questions that only the evaluation asks, folded."""
    return tuple(fold(question) for fact in facts for question in part(fact.questions, Pool.HELD_OUT))


FACTS: Final = read("facts")
_HELD_OUT: Final = held_out(FACTS)


def asked(rng: Random, fact: Fact, pool: Pool, kept: tuple[str, ...]) -> str:
    """Ask for a fact. No training question contains one of those `kept` for the evaluation."""
    if pool is Pool.HELD_OUT:
        return pick(rng, fact.questions, pool)
    while True:
        question = roughened(rng, _phrased(rng, fact))
        folded = fold(question)
        if not any(phrase in folded for phrase in kept):
            return question


def _phrased(rng: Random, fact: Fact) -> str:
    composed = [(_FRAMES["goal"], goal) for goal in fact.goals] + [(_FRAMES["topic"], topic) for topic in fact.topics]
    if not composed or rng.random() >= COMPOSED_SHARE:
        return pick(rng, fact.questions, Pool.TRAIN)
    frames, blank = rng.choice(composed)
    return rng.choice(frames).format(blank)


def turn(rng: Random, pool: Pool) -> Turn:
    """Ask for one fact."""
    fact = rng.choice(FACTS)
    return fact.answered(rng, asked(rng, fact, pool, _HELD_OUT), "This is about infd. I remember:")


def draw(rng: Random, pool: Pool) -> Conversation:
    """Ask for a fact, now and then after another one."""
    earlier = [turn(rng, pool)] if rng.random() < EARLIER_SHARE else []
    return converse(rng, "infd", [*earlier, turn(rng, pool)], pool)
