"""A thought ends at its budget, whatever tokens spell its marks, and beside a grammar of the whole answer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from infd.constraint import AfterThought, Regex, Thought, ThoughtBudget
from infd.errors import GrammarFailed
from infd.grammar import budget
from infd.grammar.budget import BudgetGrammar, BudgetMatcher, spell
from infd.grammar.llguidance import LlguidanceCompiler
from infd.grammar.protocol import Limits, Vocabulary
from infd.text.answers.harmony import CHANNEL, END, MARKS, MESSAGE, START, Harmony
from infd.text.markup import Reading
from infd.text.reasoning.base import BlockParser
from infd.text.syntax import Syntax

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.grammar.protocol import Compiler, Matcher

MARKED = ("<think>", "</think>", "<tool_call>")
DIGITS = Regex("[0-9]{3}")
KINDS = ["one token", "special", "spelled"]


def vocabulary(kind: str, marks: tuple[str, ...] = MARKED) -> Vocabulary:
    """Return every byte, some pairs, tokens across a mark's boundary, an end id, the marks unless "spelled"."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"k>", b"</", b"\n\n", b"k>\n", b".</", b"ink", b"final"]
    number = len(pieces)
    if kind != "spelled":
        pieces += [mark.encode() for mark in marks]
    special = frozenset(range(number, len(pieces))) if kind == "special" else frozenset()
    end = len(pieces)
    return Vocabulary([*pieces, b"<end>"], special | {end}, frozenset({end}), end + 20, lambda text: [])


def allowed(compiler: Compiler, matcher: Matcher) -> list[int]:
    """Return the tokens of the vocabulary that the matcher's mask allows."""
    rows = np.full((2, compiler.vocabulary.words), 0x55555555, dtype=np.int32)
    failures = budget.fill(compiler, [matcher, matcher], rows)
    assert failures == [None, None]
    assert (rows[0] == rows[1]).all()
    bits = np.unpackbits(rows[0].view(np.uint8), bitorder="little")[: len(compiler.vocabulary.tokens)]
    return np.flatnonzero(bits).tolist()


def walked(
    compiler: Compiler,
    matcher: Matcher,
    draw: random.Random,
    tokens: int,
    *,
    tempting: tuple[str, ...],
    read: Sequence[int] = (),
) -> list[int]:
    """Append random allowed tokens, often of the `tempting` texts, until an end id.

    read  tokens that the matcher has read
    """
    words, found = compiler.vocabulary, []
    marks = [spell(words, text) for text in tempting]
    planned: list[int] = []
    for at in range(tokens):
        choices = allowed(compiler, matcher)
        assert choices
        if not planned and draw.random() < 0.2:
            planned = list(draw.choice(marks))
        token = planned.pop(0) if planned else -1
        if token not in choices:
            planned, token = [], draw.choice(choices)
        assert at + len(read) >= matcher.unmasked or len(choices) == len(words.tokens)
        matcher.advance([token])
        found.append(token)
        if token in words.end_ids:
            break
    return found


def counted(words: Vocabulary, tokens: list[int], parser: Any) -> int:
    """Return the number of thought tokens, marks included, that the parser of the answer's text counts."""
    reading = Reading(parser)
    for token in tokens:
        if token not in words.end_ids:
            reading.feed(words.tokens[token].decode("latin-1"))
            reading.count()
    aside = reading.take()
    return 0 if aside is None else aside.thought_tokens


def limited(tokens: int, *, inside: bool, answer: Any = None) -> ThoughtBudget:
    return ThoughtBudget(tokens, ("<think>",), ("</think>",), ("</think>",), inside=inside, answer=answer)


def matcher_of(compiler: Compiler, wanted: ThoughtBudget) -> BudgetMatcher:
    inner = None if wanted.answer is None else compiler.compile(wanted.answer, Limits())
    forced = [spell(compiler.vocabulary, text) for text in wanted.forced]
    grammar = BudgetGrammar(wanted, compiler.vocabulary, forced, inner)
    matcher = grammar.matcher()
    assert grammar.unmasked == matcher.unmasked
    return matcher


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("constrained", [True, False])
def test_no_random_answer_thinks_longer_than_its_budget(kind: str, inside: bool, constrained: bool):
    compiler, draw = LlguidanceCompiler(vocabulary(kind)), random.Random(f"{kind}{inside}{constrained}")
    words = compiler.vocabulary
    marks = sum(len(spell(words, mark)) for mark in ("</think>", *([] if inside else ["<think>"])))
    thought, reached = Thought("<think>", "</think>", inside=inside), 0
    for _ in range(60):
        tokens = draw.choice([0, 1, 2, 3, 7, 20])
        answer = AfterThought(thought, DIGITS) if constrained else None
        matcher = matcher_of(compiler, limited(tokens, inside=inside, answer=answer))
        opening = [] if inside or draw.random() < 0.3 else list(spell(words, "<think>"))
        matcher.advance(opening)
        found = [*opening, *walked(compiler, matcher, draw, 60, tempting=("<think>", "</think>", "\n"), read=opening)]
        thinking = counted(words, found, BlockParser(thought))
        assert thinking <= tokens + marks + 3 * constrained  # a grammar has the model complete a character
        reached += thinking >= tokens > 0
        if constrained and found[-1] in words.end_ids:
            text = b"".join(words.tokens[token] for token in found[:-1])
            assert text.rpartition(b"</think>")[2].strip().isdigit()
    assert reached > 5


def test_a_budget_of_zero_closes_a_thought_at_once():
    compiler = LlguidanceCompiler(vocabulary("special"))
    opening, closing = (spell(compiler.vocabulary, mark)[0] for mark in ("<think>", "</think>"))
    opened = matcher_of(compiler, limited(0, inside=True))
    assert allowed(compiler, opened) == [closing]
    opened.advance([closing])
    assert len(allowed(compiler, opened)) == len(compiler.vocabulary.tokens)
    assert opened.unmasked > 10**9

    unopened = matcher_of(compiler, limited(0, inside=False))
    unopened.advance([opening])
    assert allowed(compiler, unopened) == [closing]


def test_a_closing_mark_that_the_model_has_begun_is_continued():
    compiler = LlguidanceCompiler(vocabulary("spelled"))
    matcher = matcher_of(compiler, limited(3, inside=True))
    begun = spell(compiler.vocabulary, "</think>")
    matcher.advance([ord("a"), *begun[:2]])
    forced = []
    while len(choices := allowed(compiler, matcher)) == 1:
        forced += choices
        matcher.advance(choices)
    assert tuple(forced) == begun[2:]


def test_a_text_without_a_thought_is_free_for_good():
    compiler = LlguidanceCompiler(vocabulary("one token"))
    matcher = matcher_of(compiler, limited(5, inside=False))
    assert matcher.unmasked == 5
    matcher.advance(list(b" It is"))
    assert matcher.unmasked > 10**9
    matcher.advance([*spell(compiler.vocabulary, "<think>"), *b"a long text that is content"])
    assert len(allowed(compiler, matcher)) == len(compiler.vocabulary.tokens)


def test_a_call_within_an_open_thought_ends_it():
    compiler = LlguidanceCompiler(vocabulary("one token"))
    wanted = ThoughtBudget(4, ("<think>",), ("</think>", "\n<tool_call>"), ("</think>",), inside=True)
    matcher = matcher_of(compiler, wanted)
    matcher.advance([*b"ab\n", *spell(compiler.vocabulary, "<tool_call>"), *b'{"name": "long"}'])
    assert len(allowed(compiler, matcher)) == len(compiler.vocabulary.tokens)


def test_a_thought_that_quotes_its_marks_in_other_tokens_is_limited_all_the_same():
    compiler = LlguidanceCompiler(vocabulary("one token"))
    words, marks = compiler.vocabulary, frozenset(MARKED)
    closing, call = (spell(words, mark) for mark in ("</think>", "<tool_call>"))
    ends = ("</think>", "\n<tool_call>")

    def thinking(text: bytes, *, inside: bool) -> BudgetMatcher:
        wanted = ThoughtBudget(len(text), ("<think>",), ends, ("</think>",), inside=inside, marks=marks)
        matcher = matcher_of(compiler, wanted)
        matcher.advance([] if inside else spell(words, "<think>"))
        matcher.advance(list(text))
        return matcher

    for inside in (True, False):
        for quoted in (b"the </think>", b"so\n<tool_call>"):
            quoting = thinking(quoted, inside=inside)
            assert tuple(allowed(compiler, quoting)) == closing
            quoting.advance(closing)
            assert quoting.unmasked > 10**9
        called = thinking(b"so\n", inside=inside)
        called.advance(call)
        assert called.unmasked > 10**9
        # Within a line the mark's token is part of the thought.
        quoting = thinking(b"so ", inside=inside)
        quoting.advance(call)
        assert quoting.unmasked < 10**9

    # An answer that spells the opening mark spells the closing mark too.
    spelling = matcher_of(compiler, ThoughtBudget(9, ("<think>",), ends, ("</think>",), marks=marks))
    spelling.advance(list(b"<think>ab"))
    assert spelling.unmasked < 20
    spelling.advance(list(b"</think>"))
    assert spelling.unmasked > 10**9


@pytest.mark.parametrize("inside", [True, False])
def test_a_budget_finds_the_marks_that_the_parser_finds_in_random_tokens(inside: bool):
    words, draw, over = vocabulary("one token"), random.Random(f"{inside}"), 0
    compiler = LlguidanceCompiler(words)
    marks, thought = frozenset(MARKED[:2]), Thought("<think>", "</think>", inside=inside)
    tokens = {spell(words, mark)[0]: mark for mark in marks}
    pieces = [spell(words, mark) for mark in marks] + [tuple(mark.encode()) for mark in marks]
    pieces += [tuple(text) for text in (b"<th", b"k>", b"</", b"a", b"\n")]
    for _ in range(400):
        matcher = matcher_of(
            compiler, ThoughtBudget(99, ("<think>",), ("</think>",), ("</think>",), inside=inside, marks=marks)
        )
        parser = BlockParser(thought)
        reading = Reading(parser, tokens=marks)
        opening = [] if inside else [draw.choice([spell(words, "<think>"), tuple(b"<think>"), (ord(" "),)])]
        for token in [each for piece in opening + draw.choices(pieces, k=6) for each in piece]:
            text = words.tokens[token].decode()
            was_inside = parser.inside
            reading.feed_token(text, tokens[token]) if token in tokens else reading.feed(text)
            matcher.advance([token])
            if was_inside or parser.inside:
                assert parser.inside == (matcher.unmasked < 10**9)
            over += was_inside and not parser.inside
    assert over > 100


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("remembered", [64, 2])
def test_copies_rollbacks_and_validation_agree(constrained: bool, remembered: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budget, "_REMEMBERED", remembered)
    compiler, draw = LlguidanceCompiler(vocabulary("spelled")), random.Random(7)
    thought = Thought("<think>", "</think>", inside=True)
    for tokens in range(6):
        wanted = limited(tokens, inside=True, answer=AfterThought(thought, DIGITS) if constrained else None)
        matcher = matcher_of(compiler, wanted)
        found = walked(compiler, matcher, draw, 25, tempting=("</think>",))
        fresh = matcher_of(compiler, wanted)
        assert fresh.validate(found) == len(found)
        if found[-1] in compiler.vocabulary.end_ids:
            found.pop()
            matcher.rollback(1)
        for kept in range(len(found), -1, -1):
            fresh = matcher_of(compiler, wanted)
            fresh.advance(found[:kept])
            expected = allowed(compiler, fresh)
            assert allowed(compiler, matcher) == expected
            assert allowed(compiler, matcher.copy()) == expected
            if kept:
                matcher.rollback(1)


@pytest.mark.parametrize("calls", [True, False])
def test_thoughts_of_channels_share_one_budget(calls: bool):
    draw = random.Random(3)
    words = vocabulary("special", MARKS)
    compiler = LlguidanceCompiler(words)
    syntax = Syntax(whole=Harmony())
    prompt = f"{START}assistant"
    headers = (f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant", f"{CHANNEL}final{MESSAGE}", END)
    for _ in range(40):
        tokens = draw.choice([0, 3, 10])
        wanted = syntax.budget(tokens, prompt, calls=calls)
        assert wanted is not None
        matcher = matcher_of(compiler, wanted)
        matcher.advance(spell(words, headers[0]))
        found = [
            *spell(words, headers[0]),
            *walked(compiler, matcher, draw, 80, tempting=headers, read=spell(words, headers[0])),
        ]
        text = b"".join(words.tokens[token] for token in found).decode("latin-1")
        parts = text.split(headers[0])[1:]
        thought = sum(len(spell(words, part.partition(END)[0])) for part in parts if part.partition(END)[0])
        assert thought <= tokens + 3 * len(parts)  # a pair of letters is one token
        forced = [part.partition(END) for part in parts]
        assert calls or not any(
            ended and rest.startswith(f"{START}assistant{CHANNEL}comm") for _, ended, rest in forced
        )


def test_a_vocabulary_that_cannot_spell_the_mark_is_refused():
    words = Vocabulary([b"a", b"<end>"], frozenset({1}), frozenset({1}), 2, lambda text: [])
    with pytest.raises(GrammarFailed, match="</think>"):
        spell(words, "</think>")


def test_a_grammar_that_forbids_the_mark_prevails():
    compiler = LlguidanceCompiler(vocabulary("special"))
    matcher = matcher_of(compiler, limited(0, inside=True, answer=Regex("[0-9]+")))
    assert {chr(token) for token in allowed(compiler, matcher)} == set("0123456789")
