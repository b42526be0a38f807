"""Facts, manners and unknown: equal for equal seeds, correct by their own expectations, without held-out phrases."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from infd.embedded.recipe import facts, manners, slots, unknown
from infd.embedded.recipe.conversation import Phrases, Pool, part
from infd.embedded.recipe.judge import contains_words, meets
from infd.embedded.recipe.talk import fold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.embedded.recipe.conversation import Conversation

pytestmark = pytest.mark.exhaustive

SUBJECTS = {"infd": facts, "chat": manners, "unknown": unknown}
ASKED = facts.FACTS + manners.SMALL_TALK


def drawn(kind: str, count: int, pool: Pool = Pool.TRAIN, seed: int = 1) -> list[Conversation]:
    rng = Random(seed)
    return [SUBJECTS[kind].draw(rng, pool) for _ in range(count)]


def questions(conversations: list[Conversation]) -> list[str]:
    return [
        message["content"]
        for conversation in conversations
        for message in conversation.messages
        if message["role"] == "user"
    ]


@pytest.mark.parametrize("kind", SUBJECTS)
@pytest.mark.parametrize("pool", Pool)
def test_the_same_seed_gives_the_same_conversations(kind: str, pool: Pool):
    assert drawn(kind, 50, pool) == drawn(kind, 50, pool)
    assert drawn(kind, 50, pool) != drawn(kind, 50, pool, seed=2)


@pytest.mark.parametrize("kind", SUBJECTS)
@pytest.mark.parametrize("pool", Pool)
def test_a_drawn_conversation_has_its_kind_and_a_right_answer(kind: str, pool: Pool):
    for conversation in drawn(kind, 1500, pool):
        *earlier, last = conversation.messages
        roles = [message["role"] for message in conversation.messages if message["role"] != "system"]
        assert conversation.kind == kind
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert meets(conversation.expect, last["content"], []), conversation
        assert conversation.expect.contains or conversation.expect.text
        assert conversation.thinking == bool(last.get("reasoning_content"))
        assert not any("reasoning_content" in message for message in earlier)
        assert not any(
            mark in message["content"]
            for message in conversation.messages
            for mark in ("{x}", "{key}", "{value}", "{city", "{int:")
        )


@pytest.mark.parametrize("kind", SUBJECTS)
def test_some_of_them_are_thought_about(kind: str):
    thought = sum(conversation.thinking for conversation in drawn(kind, 1000))

    assert 50 < thought < 300


def test_no_question_that_is_held_out_is_drawn_for_training():
    kept = facts.held_out(ASKED)
    for question in questions(drawn("infd", 10_000) + drawn("chat", 5_000)):
        folded = fold(question)
        assert not any(phrase in folded for phrase in kept if phrase.count(" ") > 4), question


def test_no_phrase_with_blanks_that_is_held_out_is_drawn_for_training():
    """No training conversation contains a subject's held-out phrases, cut at their blanks."""
    groups = [table.questions for table in manners.TABLES] + [
        tuple(asked) for asked in slots.read("unknown")["questions"].values()
    ]
    kept = {fold(phrase) for group in groups for phrase in part(group, Pool.HELD_OUT)}
    trained = {fold(phrase) for group in groups for phrase in part(group, Pool.TRAIN)}

    assert not kept & trained


@pytest.mark.parametrize("file", ["facts", "manners", "common", "arithmetic", "strings", "structured", "unknown"])
def test_no_held_out_phrase_is_a_training_phrase(file: str):
    lists = list(phrases(slots.read(file)))
    assert lists
    for each in lists:
        kept = {fold(asked(phrase)) for phrase in part(each, Pool.HELD_OUT)}
        assert not kept & {fold(asked(phrase)) for phrase in each.more}


def asked(phrase: str | list[str]) -> str:
    """Return the question of a story, without its closing sentence; of any other phrase, all."""
    return phrase if isinstance(phrase, str) else phrase[0]


def phrases(content: object) -> Iterator[Phrases]:
    if isinstance(content, Phrases):
        yield content
    elif isinstance(content, dict | list):
        for each in content.values() if isinstance(content, dict) else content:
            yield from phrases(each)


def test_held_out_questions_are_paraphrases_and_not_pieces_of_others():
    for fact in ASKED:
        trained = [fold(question) for question in part(fact.questions, Pool.TRAIN)]
        for question in map(fold, part(fact.questions, Pool.HELD_OUT)):
            assert not any(question in other for other in trained), (fact.id, question)
            assert not any(other in question for other in trained if other.count(" ") > 4), (fact.id, question)


def test_no_question_belongs_to_two_facts():
    seen: dict[str, str] = {}
    for fact in ASKED:
        for question in {fold(question) for question in fact.questions}:
            assert seen.setdefault(question, fact.id) == fact.id, question


def test_every_wording_of_an_answer_is_right():
    for fact in ASKED:
        for wording in fact.says:
            assert all(any(contains_words(wording, word) for word in group) for group in fact.contains), fact.id


def test_every_fact_is_asked_in_hundreds_of_ways():
    rng = Random(3)
    for fact in facts.FACTS[::9]:
        forms = {facts.draw_question(rng, fact, Pool.TRAIN, ()) for _ in range(400)}

        assert len(forms) > 150, fact.id


def test_ignorance_is_always_plain():
    for conversation in drawn("unknown", 500):
        assert "don't know" in conversation.messages[-1]["content"]


def test_known_facts_are_not_asked_as_unknown_ones():
    known = {fold(question) for fact in ASKED for question in fact.questions}
    known |= {fold(table.questions[0].format(key=key)) for table in manners.TABLES for key in table.pairs}
    last = [conversation.messages[-2]["content"] for conversation in drawn("unknown", 5000)]

    assert not [question for question in last if fold(question) in known]


def test_questions_ask_for_facts_given_earlier():
    """The value precedes the question about it."""
    seen = 0
    for conversation in drawn("chat", 2000):
        answer = conversation.messages[-1]["content"]
        if answer.startswith(("Your name is", "You live in", "Your dog is")):
            name = conversation.expect.contains[0][0]
            assert any(name in message["content"] for message in conversation.messages[:-1])
            seen += 1
    assert seen > 50
