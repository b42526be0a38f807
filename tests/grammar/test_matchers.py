"""Masks, matchers and grammars of each engine, over random vocabularies."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.constraint import Choice, Continuation, JsonObject, JsonSchema, Lark, Regex
from infd.errors import GrammarFailed
from infd.grammar.protocol import Limits
from tests.grammar import engines, vocabularies
from tests.thorough import THOROUGH, among

if TYPE_CHECKING:
    from infd.constraint import Constraint
    from infd.grammar.protocol import Compiler, Matcher

pytestmark = pytest.mark.usefixtures("engine")
LIMITS = Limits()
KINDS = ["byte_level", "sentencepiece", "large"]
CONSTRAINTS = [
    JsonObject(),
    JsonSchema('{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yé"]}}}'),
    JsonSchema('{"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 3}', whitespace=False),
    Regex(r"[a-c]{2,5}(x|\d+)?\n?"),
    Regex(r"(é|😀|[^a-z]){1,3}"),
    Choice(("yes", "no", "yes and no", " maybe", "")),
    Lark('start: "(" start ")" | /[a-z]+/'),
    Lark('start: <think> /[a-z]+/ "."'),
]


@engines.each
def compiler(kind: str, seed: int = 0) -> Compiler:
    return engines.compiler(getattr(vocabularies, kind)(seed))


def state(compiled: Compiler, matcher: Matcher) -> tuple[bytes, bool, bool]:
    return vocabularies.mask(compiled, matcher).tobytes(), matcher.accepting, matcher.stopped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=repr)
@pytest.mark.histories
def test_a_mask_allows_exactly_the_tokens_that_the_matcher_accepts(kind: str, constraint: Constraint):
    compiled, draw = compiler(kind), random.Random(1)
    vocabulary = compiled.vocabulary
    columns, grammar = range(vocabulary.columns), compiled.compile(constraint, LIMITS)
    for _ in range(3):
        tried = columns if THOROUGH and kind != "large" else draw.sample(columns, among(300, 3000))
        matcher = grammar.matcher()
        for _ in range(8):
            mask = set(vocabularies.allowed(compiled, matcher))
            assert {each for each in tried if matcher.validate([each])} == mask & set(tried)
            assert matcher.accepting == bool(mask & vocabulary.end_ids)
            assert matcher.stopped == (mask <= vocabulary.end_ids)
            if matcher.stopped:
                break
            vocabularies.walk(compiled, matcher, draw, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=repr)
@pytest.mark.histories
def test_after_a_rollback_a_matcher_is_as_one_that_never_went_there(kind: str, constraint: Constraint):
    compiled, draw = compiler(kind), random.Random(2)
    grammar = compiled.compile(constraint, LIMITS)
    for _ in range(6 if THOROUGH else 3):
        tokens = vocabularies.walk(compiled, grammar.matcher(), draw, 15)
        kept = draw.randrange(len(tokens) + 1)
        moved, fresh = grammar.matcher(), grammar.matcher()
        for token in tokens:
            moved.advance([token])
        moved.rollback(len(tokens) - kept)
        fresh.advance(tokens[:kept])

        assert state(compiled, moved) == state(compiled, fresh)
        assert fresh.validate(tokens[kept:]) == len(tokens) - kept
        moved.advance(tokens[kept:])
        fresh.advance(tokens[kept:])
        assert state(compiled, moved) == state(compiled, fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_does_not_follow_the_original(kind: str):
    compiled, draw = compiler(kind), random.Random(3)
    matcher = compiled.compile(JsonObject(), LIMITS).matcher()
    vocabularies.walk(compiled, matcher, draw, 4)
    before = state(compiled, matcher)
    copied = matcher.copy()
    vocabularies.walk(compiled, copied, draw, 10)

    assert state(compiled, matcher) == before


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "xy", "[a-f]", "[^a-z]", "[0-9]", r"\.", " ", "-", "é", "/", r"\/", r"\n", '"', "_"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=12,
)


@pytest.mark.histories
@given(pattern=PATTERNS, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32))
@settings(max_examples=among(40, 100), deadline=None)
def test_what_a_regular_expression_lets_through_matches_it(pattern: str, kind: str, seed: int):
    compiled = compiler(kind)
    tokens = vocabularies.walk(compiled, compiled.compile(Regex(pattern), LIMITS).matcher(), random.Random(seed), 40)

    answer = vocabularies.text(compiled.vocabulary, tokens)
    assert answer is None or re.fullmatch(pattern, answer)


@pytest.mark.histories
@given(data=st.data(), pattern=PATTERNS, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32))
@settings(max_examples=among(40, 100), deadline=None)
def test_all_that_matches_a_regular_expression_can_be_written(data: st.DataObject, pattern: str, kind: str, seed: int):
    compiled = compiler(kind)
    answer = data.draw(st.from_regex(pattern, fullmatch=True))
    begin = " " if compiled.vocabulary.drop_space else ""
    tokens = vocabularies.split(compiled.vocabulary, (begin + answer).encode(), random.Random(seed))
    matcher = compiled.compile(Regex(pattern), LIMITS).matcher()

    assert matcher.validate(tokens) == len(tokens)
    matcher.advance(tokens)
    assert matcher.accepting


@pytest.mark.histories
@given(options=st.lists(st.text(), min_size=1, max_size=8), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32))
@settings(max_examples=among(40, 100), deadline=None)
def test_a_choice_is_one_of_its_options(options: list[str], kind: str, seed: int):
    compiled = compiler(kind)
    tokens = vocabularies.walk(
        compiled, compiled.compile(Choice(tuple(options)), LIMITS).matcher(), random.Random(seed), 500
    )

    assert vocabularies.text(compiled.vocabulary, tokens) in options


def test_an_answer_that_continues_the_prompt_begins_with_no_other_space():
    compiled = compiler("sentencepiece")
    space = compiled.vocabulary.tokens.index(b" ")
    for constraint in (Regex("x+"), Choice(("x",)), JsonSchema('{"type": "integer"}')):
        first = compiled.compile(constraint, LIMITS).matcher()
        continuing = compiled.compile(Continuation(constraint), LIMITS).matcher()
        assert space in vocabularies.allowed(compiled, first)
        assert space not in vocabularies.allowed(compiled, continuing)


def test_an_answer_keeps_the_space_it_begins_with_though_the_decoder_drops_one():
    compiled, draw = compiler("sentencepiece"), random.Random(4)
    for constraint in (Choice((" x", " yes")), Regex(" (x|yes)"), Regex(" ?(x|yes)")):
        grammar = compiled.compile(constraint, LIMITS)
        for _ in range(20):
            answer = vocabularies.text(compiled.vocabulary, vocabularies.walk(compiled, grammar.matcher(), draw, 20))
            assert answer in (" x", " yes") or (constraint == Regex(" ?(x|yes)") and answer in ("x", "yes"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.histories
def test_a_json_object_parses(kind: str):
    compiled, draw = compiler(kind), random.Random(5)
    grammar, finished = compiled.compile(JsonObject(), LIMITS), 0
    walks = 12 if kind == "large" else 60 if THOROUGH else 24  # a mask of 150,000 tokens takes long to look through
    for _ in range(walks):
        answer = vocabularies.text(compiled.vocabulary, vocabularies.walk(compiled, grammar.matcher(), draw, 60))
        if answer is not None:
            finished += 1
            assert isinstance(json.loads(answer), dict)
    assert finished > walks // 12


def test_an_end_id_is_never_text():
    vocabulary = vocabularies.byte_level(1)
    letter = vocabulary.tokens.index(b"a")
    compiled = engines.compiler(
        type(vocabulary)(vocabulary.tokens, vocabulary.special, frozenset({letter}), vocabulary.columns, list)
    )
    matcher = compiled.compile(Regex("(a|b)+"), LIMITS).matcher()

    assert matcher.validate([letter]) == 0
    assert letter not in vocabularies.allowed(compiled, matcher)
    matcher.advance([vocabulary.tokens.index(b"b")])
    assert matcher.validate([letter]) == 1


def test_only_end_ids_follow_an_end_id():
    compiled = compiler("byte_level")
    end = min(compiled.vocabulary.end_ids)
    matcher = compiled.compile(Regex("a*"), LIMITS).matcher()
    matcher.advance([end])

    assert set(vocabularies.allowed(compiled, matcher)) == compiled.vocabulary.end_ids
    assert matcher.stopped
    assert matcher.accepting
    with pytest.raises(GrammarFailed):
        matcher.advance([compiled.vocabulary.tokens.index(b"a")])


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_no_digit_may_follow_is_complete_once_its_mask_is_filled(kind: str):
    compiled = compiler(kind)
    zero = compiled.vocabulary.tokens.index(b"0")
    # xgrammar's rules admit 0.0 as a multiple of 2.
    kind_of_number = "number" if engines.PRESENT.get() == "llguidance" else "integer"
    matcher = compiled.compile(JsonSchema(f'{{"type": "{kind_of_number}", "multipleOf": 2}}'), LIMITS).matcher()
    matcher.advance([zero])

    assert set(vocabularies.allowed(compiled, matcher)) == compiled.vocabulary.end_ids
    assert matcher.stopped
    assert matcher.copy().stopped
    matcher.rollback(1)
    assert not matcher.stopped


def test_a_failed_matcher_spoils_neither_its_neighbours_nor_its_grammar():
    compiled = compiler("byte_level")
    grammar = compiled.compile(Regex("ab*"), LIMITS)
    letters = {letter: compiled.vocabulary.tokens.index(letter.encode()) for letter in "abc"}
    good, bad = grammar.matcher(), grammar.matcher()
    with pytest.raises(GrammarFailed) as failed:
        bad.advance([letters["a"], letters["c"]])
    good.advance([letters["a"]])
    rows = np.zeros((3, compiled.vocabulary.words), dtype=np.int32)

    failures = compiled.fill([good, bad, grammar.matcher()], rows)

    assert failed.value.code == "grammar_failed"
    assert [type(each) for each in failures] == [type(None), GrammarFailed, type(None)]
    assert set(np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))) >= {letters["b"]}


def test_white_space_in_a_document_is_bounded():
    compiled = compiler("byte_level")
    byte = {each: compiled.vocabulary.tokens.index(bytes([each])) for each in range(256)}
    for begin in ("{", '{"a"', '{"a":', '{"a":1', '{"a":[', '{"a":[1,'):
        for white in ("\n" * 2, " " * 2, "\t", "\n" + " " * 41, "\n" + " " * 20 + "\n"):
            matcher = compiled.compile(JsonObject(), LIMITS).matcher()
            matcher.advance([byte[each] for each in begin.encode()])
            assert matcher.validate([byte[each] for each in white.encode()]) < len(white), (begin, white)
            assert matcher.validate([byte[each] for each in b"\n" + b" " * 40]) == 41, begin


def test_an_indented_document_can_be_written():
    compiled = compiler("byte_level")
    document = json.dumps({"a": [1, {"b": {}}], "c": "d"}, indent=4)
    matcher = compiled.compile(JsonObject(), LIMITS).matcher()
    tokens = vocabularies.split(compiled.vocabulary, document.encode(), random.Random(1))

    assert matcher.validate(tokens) == len(tokens)


def test_a_special_token_is_allowed_only_where_a_grammar_names_it():
    compiled = compiler("byte_level")
    think = compiled.vocabulary.tokens.index(b"<think>")

    assert think not in vocabularies.allowed(compiled, compiled.compile(Regex("(.|\n)*"), LIMITS).matcher())
    named = compiled.compile(Lark('start: <think> "a"'), LIMITS).matcher()
    assert vocabularies.allowed(compiled, named) == [think]


def test_a_clients_options_for_the_library_are_stripped():
    compiled = compiler("byte_level")
    schema = '{"uniqueItems": true, "x-guidance": {"lenient": true}}'
    for constraint in (JsonSchema(schema), Lark(f"start: %json {schema}")):
        with pytest.raises(GrammarFailed) as failed:
            compiled.compile(constraint, LIMITS)
        assert failed.value.code == "unsupported_grammar"


@pytest.mark.parametrize(
    ("constraint", "code"),
    [
        (Regex("("), "invalid_grammar"),
        (Regex("a(?=b)"), "unsupported_grammar"),
        (Lark("start: missing"), "invalid_grammar"),
        (Lark('{"grammars": []}'), "invalid_grammar"),
        (Lark('start: a\na[max_tokens=3]: "x"'), "unsupported_grammar"),
        (Lark('%llguidance {"allow_invalid_utf8": true}\nstart: "x"'), "unsupported_grammar"),
        (Lark("start: %json {"), "invalid_grammar"),
        (JsonSchema("{"), "invalid_grammar"),
        (JsonSchema('{"minimum": NaN}'), "invalid_grammar"),
        (JsonSchema("1"), "invalid_grammar"),
        (JsonSchema("false"), "unsupported_grammar"),
        (JsonSchema('{"type": "object", "minProperties": 2.5}'), "invalid_grammar"),
        (JsonSchema('{"$ref": "#"}'), "unsupported_grammar"),
        (JsonSchema('{"const": "\ud800"}'), "invalid_grammar"),
        (JsonSchema('{"const": "\\ud800"}'), "invalid_grammar"),
        (JsonSchema('{"$ref": "https://example.com/a"}'), "unsupported_grammar"),
        (Choice(()), "invalid_grammar"),
    ],
    ids=repr,
)
def test_constraints_that_cannot_be_compiled_are_refused_by_name(constraint: Constraint, code: str):
    with pytest.raises(GrammarFailed) as failed:
        compiler("byte_level").compile(constraint, LIMITS)
    assert failed.value.code == code
    assert len(str(failed.value)) < 500
