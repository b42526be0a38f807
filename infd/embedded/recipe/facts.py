"""Generate conversations about facts of infd.

facts.toml contains the facts, each with complete questions. Further questions are
composed from goals ("how do I ...") and topics ("what is ..."). The evaluation
uses every sixth complete question of a fact; no training question contains an
evaluation question.
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
    """One fact; the top of facts.toml explains the fields."""

    id: str
    says: tuple[str, ...]
    contains: list[list[str]]
    thought: str
    questions: Phrases
    goals: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    check: tuple[str, ...] = ()

    def answered(self, rng: Random, question: str, recall: str) -> Turn:
        """Return `question` with the fact as the answer; `recall` begins the reasoning."""
        return Turn(
            question=question,
            answer=rng.choice(self.says),
            expect=Expect(contains=self.contains),
            thought=f"{recall} {self.thought}.",
        )


def read(name: str) -> tuple[Fact, ...]:
    """Return the facts in NAME.toml."""
    return slots.converted(slots.read(name)["fact"], tuple[Fact, ...])


def held_out(facts: tuple[Fact, ...]) -> tuple[str, ...]:
    """Return the held-out questions, folded by `fold`."""
    return tuple(fold(question) for fact in facts for question in part(fact.questions, Pool.HELD_OUT))


FACTS: Final = read("facts")
_HELD_OUT: Final = held_out(FACTS)


def draw_question(rng: Random, fact: Fact, pool: Pool, excluded: tuple[str, ...]) -> str:
    """Draw a question for a fact. Training questions contain no phrase from `excluded`, the held-out questions."""
    if pool is Pool.HELD_OUT:
        return pick(rng, fact.questions, pool)
    while True:
        question = roughened(rng, _phrased(rng, fact))
        folded = fold(question)
        if not any(phrase in folded for phrase in excluded):
            return question


def _phrased(rng: Random, fact: Fact) -> str:
    composed = [(_FRAMES["goal"], goal) for goal in fact.goals] + [(_FRAMES["topic"], topic) for topic in fact.topics]
    if not composed or rng.random() >= COMPOSED_SHARE:
        return pick(rng, fact.questions, Pool.TRAIN)
    frames, blank = rng.choice(composed)
    return rng.choice(frames).format(blank)


def turn(rng: Random, pool: Pool) -> Turn:
    """Draw a question about infd, with its answer."""
    fact = rng.choice(FACTS)
    return fact.answered(rng, draw_question(rng, fact, pool, _HELD_OUT), "This is about infd. I remember:")


def draw(rng: Random, pool: Pool) -> Conversation:
    """Draw a conversation about a fact, sometimes after another fact."""
    earlier = [turn(rng, pool)] if rng.random() < EARLIER_SHARE else []
    return converse(rng, "infd", [*earlier, turn(rng, pool)], pool)
