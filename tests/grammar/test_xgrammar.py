"""xgrammar: what infd writes for it, around its faults. The other tests of this folder run with it too."""

from __future__ import annotations

import json
import math
import random
import re
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from infd.constraint import Calls, JsonSchema, Lark, Regex, ToolSchema
from infd.errors import ConfigError, GrammarFailed, ServerStopped, TooSlow
from infd.grammar import gbnf, numerals, regexes, xgrammar_writing
from infd.grammar.automata import automaton, automaton_of
from infd.grammar.binding import Unavailable
from infd.grammar.protocol import Limits
from infd.grammar.rules import (
    ANY,
    ROOT,
    Alternatives,
    Characters,
    Expression,
    Reference,
    Repeated,
    Sequence,
    Text,
    begins,
    opposite,
    ranges_of,
    trimmed,
)
from infd.grammar.select import select
from infd.grammar.xgrammar import XgrammarCompiler
from infd.grammar.xgrammar_library import Library
from infd.grammar.xgrammar_trial import SLOWNESS, XgrammarTrial
from infd.text.tools.families_json import HERMES
from tests.grammar import vocabularies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infd.constraint import Constraint
    from infd.grammar.protocol import Vocabulary

pytestmark = pytest.mark.usefixtures("xgrammar")


@pytest.fixture(scope="module")
def xgrammar() -> None:
    try:
        Library()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def compilers() -> list[XgrammarCompiler]:
    return [XgrammarCompiler(make(0)) for make in (vocabularies.byte_level, vocabularies.sentencepiece)]


def random_expression(draw: random.Random, depth: int) -> Expression:
    if depth == 0 or draw.random() < 0.25:
        lower = ((97, 122),)
        classes = [Characters(((97, 102),)), Characters(opposite(lower)), Characters(((0xE000, 0xFFFF),))]
        return draw.choice([Text("a"), Text("b"), Text("xy"), Text("_"), Text("é"), *classes])
    parts = tuple(random_expression(draw, depth - 1) for _ in range(draw.randint(2, 3)))
    match draw.randrange(4):
        case 0:
            return Alternatives(parts)
        case 1:
            return Repeated(parts[0], *draw.choice([(0, None), (1, None), (0, 1), (2, 2), (1, 3), (0, 140)]))
    return Sequence(parts)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2, 3))])
def test_masks_of_random_rules_admit_exactly_the_tokens_that_the_matcher_accepts(
    compilers: list[XgrammarCompiler], seed: int
):
    draw = random.Random(seed)
    for _ in range(150):
        compiler, rules = draw.choice(compilers), {ROOT: random_expression(draw, 4)}
        matcher = compiler.compiled(gbnf.write(rules)).matcher()
        for _ in range(8):
            mask = set(vocabularies.allowed(compiler, matcher))
            vocabulary = compiler.vocabulary
            assert {each for each in range(vocabulary.columns) if matcher.validate([each])} == mask, gbnf.write(rules)
            going = sorted(mask - vocabulary.end_ids)
            if not going:
                break
            matcher.advance([draw.choice(going)])


BOUNDS_OF_LENGTH = [(0, 64), (0, 65), (0, 96), (1, 97), (3, 131), (0, 2200), (140, 140), (64, None), (65, None)]


@pytest.mark.parametrize(("least", "most"), BOUNDS_OF_LENGTH)
def test_characters_are_counted_exactly(compilers: list[XgrammarCompiler], least: int, most: int | None):
    compiler = compilers[0]
    letter, quote = (compiler.vocabulary.tokens.index(each) for each in (b"a", b'"'))
    schema = {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})
    matcher = compiler.compile(JsonSchema(json.dumps(schema)), Limits()).matcher()
    matcher.advance([quote])
    for count in range(2 + (most or least + 70)):
        more = most is None or count < most
        assert matcher.validate([quote]) == (count >= least)
        assert matcher.validate([letter]) == more
        if not more:
            return
        matcher.advance([letter])


def test_a_class_beyond_ascii_is_a_rule_where_it_follows_one():
    beyond, ascii = Characters(((0xE000, 0xFFFF),)), Characters(((48, 57),))
    other = Reference("other")
    written = gbnf.write({ROOT: Sequence((beyond, other, ascii, beyond)), "other": Text("a\x00b")})
    assert written.splitlines() == [
        r"root ::= ([\ue000-\uffff] r1 [0-9] c0)",
        r'r1 ::= "a\u0000b"',
        r"c0 ::= [\ue000-\ue000] | [\ue001-\uffff]",
    ]


@pytest.mark.parametrize("gaps", [0, 1, 40])
@pytest.mark.parametrize("make", [vocabularies.byte_level, vocabularies.sentencepiece])
def test_a_vocabulary_without_end_ids_ends_no_answer(make: Callable[[int], Vocabulary], gaps: int):
    full = make(0)
    tokens = [*full.tokens, *[b"x"] * (-len(full.tokens) % 32)]  # a mask's last word has no bit to spare
    vocabulary = replace(full, tokens=tokens, end_ids=frozenset(), columns=len(tokens) + gaps, drop_space=False)
    compiler = XgrammarCompiler(vocabulary)
    matcher = compiler.compile(Regex("ab?"), Limits()).matcher()
    letter = tokens.index(b"a")
    assert letter in vocabularies.allowed(compiler, matcher)
    matcher.advance([letter])

    assert matcher.accepting
    assert not matcher.stopped
    assert {tokens[each] for each in vocabularies.allowed(compiler, matcher)} == {b"b"}
    matcher.advance([tokens.index(b"b")])
    assert matcher.stopped
    assert vocabularies.allowed(compiler, matcher) == []


def test_grammars_in_lark_are_left_to_llguidance(compilers: list[XgrammarCompiler]):
    for constraint in (Lark('start: "a"'), JsonSchema("{}", lenient=True), JsonSchema("{}", coerce_one_of=True)):
        with pytest.raises(GrammarFailed, match="kept by llguidance only") as refusal:
            compilers[0].compile(constraint, Limits())
        assert refusal.value.code == "unsupported_grammar"


def test_the_library_is_named_with_the_reason_against_the_other():
    vocabulary = vocabularies.byte_level(0)
    for engine in ("auto", "xgrammar"):
        selection = select(engine, vocabulary, None)
        assert selection.name.split()[0] == ("xgrammar" if engine == "xgrammar" else "llguidance")
        assert len(selection.rejected) == 1


# 3^12 alternatives
ALTERNATIVES = [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "null"}}} for j in range(3)]} for i in range(12)]


@pytest.fixture(scope="module")
def tried() -> Iterator[XgrammarCompiler]:
    trial = XgrammarTrial()
    yield XgrammarCompiler(vocabularies.large(), trial)
    trial.close()


@pytest.mark.parametrize(
    "constraint",
    [
        pytest.param(JsonSchema(json.dumps({"allOf": ALTERNATIVES})), id="written"),
        pytest.param(Regex("[a-z ]{1,1500}"), id="compiled"),
    ],
)
def test_a_constraint_that_takes_too_long_ends_in_its_worker_and_the_next_is_compiled(
    tried: XgrammarCompiler, constraint: Constraint
):
    seconds = 0.1 * SLOWNESS
    with pytest.raises(TooSlow, match=rf"more than {seconds:g} s") as refusal:
        tried.compile(constraint, Limits(seconds=0.1))
    assert refusal.value.code == "grammar_too_large"
    assert tried.compile(Regex("a+"), Limits()).matcher()


def test_a_worker_writes_the_rules_that_this_process_writes(tried: XgrammarCompiler):
    trial, calls = (
        XgrammarTrial(),
        Calls(HERMES.grammar, (ToolSchema("f", '{"type": "object"}', "tools[0]"),), required=True),
    )
    trial.set_vocabulary([bytes([byte]) for byte in range(255)], [0])
    try:
        for constraint in (JsonSchema('{"enum": ["a", 1]}'), Regex("[0-9]{2}"), calls):
            for drop_space in (False, True):
                written = xgrammar_writing.write(constraint, Limits(), {"<tool_call>": 7}, drop_space=drop_space)
                assert trial(constraint, Limits(), {"<tool_call>": 7}, drop_space=drop_space) == written
        with pytest.raises(GrammarFailed, match="kept by llguidance only"):
            trial(Lark('start: "a"'), Limits(), {}, drop_space=False)
    finally:
        trial.close()
    with pytest.raises(ServerStopped):
        trial(Regex("a"), Limits(), {}, drop_space=False)


def test_values_of_an_enum_are_compared_as_json_schema_does(compilers: list[XgrammarCompiler]):
    values = [1, 1.0, True, 0, False, "1", None, [1], [True], {"a": 1, "b": [0]}, {"a": True, "b": [0]}, {"a": 1}, 0.5]
    for kept in values:
        items = [{"type": "array", "items": {"enum": each}} for each in (values, [kept, "of its own"])]
        grammar = compilers[0].compile(JsonSchema(json.dumps({"allOf": items}), whitespace=False), Limits())
        bytes_of = {compilers[0].vocabulary.tokens[each]: each for each in range(len(compilers[0].vocabulary.tokens))}
        for value in values:
            written = json.dumps([value], separators=(",", ":")).encode()
            tokens = [bytes_of[bytes([byte])] for byte in written.replace(b"1.0", b"1")]
            accepted = grammar.matcher().validate(tokens) == len(tokens)
            assert accepted == Draft202012Validator({"const": kept}).is_valid(value), (kept, value)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install infd\[xgrammar\]"):
        select("xgrammar", vocabularies.byte_level(0), None)


BOUNDS = st.one_of(st.integers(-1200, 1200), st.decimals(-120, 120, places=2).map(float))
NUMBERS = st.one_of(st.integers(-1300, 1300), st.decimals(-130, 130, places=3))


@given(
    bounds=st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), BOUNDS, min_size=1, max_size=2
    ),
    number=NUMBERS,
)
@settings(max_examples=300, deadline=None)
def test_numerals_are_between_their_bounds(bounds: dict[str, float], number: int | Decimal):
    text = format(Decimal(number), "f")
    limits = {name: Decimal(repr(bound)) for name, bound in bounds.items()}
    kept = (
        limits.get("minimum", -math.inf) <= number <= limits.get("maximum", math.inf)
        and limits.get("exclusiveMinimum", -math.inf) < number < limits.get("exclusiveMaximum", math.inf)
    )  # fmt: skip
    found = numerals.numerals([bounds], integer=False)

    assert found is not None
    if not (text.startswith("-") and number == 0):
        assert found.accepts(text) == kept
    whole = numerals.numerals([bounds], integer=True)
    assert whole is not None
    if isinstance(number, int):
        assert whole.accepts(text) == kept
    assert not whole.accepts(text + ".0")


@given(step=st.sampled_from(["1", "3", "7", "0.5", "0.01", "2.5", "100"]), number=st.integers(-3000, 3000))
@settings(max_examples=200, deadline=None)
def test_numerals_are_multiples(step: str, number: int):
    found = numerals.numerals([{"multipleOf": float(step) if "." in step else int(step)}], integer=False)

    assert found is not None
    for value in (Decimal(number), Decimal(number) / 100):
        text = format(value, "f")
        assert found.accepts(text) == (value % Decimal(step) == 0), text


PIECES = ["a", "b", "[a-c]", "[^b]", ".", r"\d", "^", "$", "(ab|a)", "(?:b)", "a{2}", "b{1,2}", "c*", "(a|^b)", "[ab]+"]


@given(pattern=st.lists(st.sampled_from(PIECES), max_size=5).map("".join), text=st.text("abc1\n", max_size=6))
@settings(max_examples=500, deadline=None)
def test_automata_of_regular_expressions_accept_what_re_matches(pattern: str, text: str):
    ours = automaton(regexes.parse(pattern))
    assert ours.accepts(text) == bool(re.fullmatch(pattern.replace("$", r"\Z"), text))


@given(words=st.lists(st.text("abé", max_size=4), max_size=8), text=st.text("abé", max_size=4))
@settings(max_examples=200, deadline=None)
def test_automata_of_words_accept_these_words(words: list[str], text: str):
    found = automaton_of(words)
    assert all(map(found.accepts, words))
    assert found.accepts(text) == (text in words)
    assert automaton_of([text]).without(found).empty == (text in words)


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ("(", "invalid_grammar"),
        ("a)", "invalid_grammar"),
        ("[b-a]", "invalid_grammar"),
        ("*", "invalid_grammar"),
        ("a{3,2}", "invalid_grammar"),
        (r"\x{d800}", "invalid_grammar"),
        (r"\bword", "unsupported_grammar"),
        ("(?!a)b", "unsupported_grammar"),
        (r"(a)\1", "unsupported_grammar"),
        (r"\p{Greek}", "unsupported_grammar"),
        (".*a.{200}", "grammar_too_large"),
        ("(a{1000}){1000}", "grammar_too_large"),
    ],
)
def test_a_regular_expression_that_is_not_kept_is_refused(pattern: str, code: str):
    with pytest.raises(GrammarFailed) as refusal:
        automaton(regexes.parse(pattern))
    assert refusal.value.code == code


@pytest.mark.parametrize(
    ("pattern", "kept", "others"),
    [
        (r"(?i)ab[x-z]", ["abx", "AbY"], ["abw"]),
        (r"[\w--_]+", ["é1"], ["_", "-"]),
        (r"[a-z&&[^aeiou]]", ["b"], ["a"]),
        (r"[[:digit:]\-]+", ["1-2"], ["a"]),
        (r"(?x) a b # comment", ["ab"], ["a b"]),
        (r"\x41\u0042\u{43}", ["ABC"], []),
        (r"\p{Lu}\P{Lu}", ["Éa"], ["ÉE"]),
        (r"(?s:.)\n.", ["\n\na"], ["\n\n\n"]),
        (r"(?P<name>a)(?<other>b)", ["ab"], []),
    ],
)
def test_the_crates_syntax_is_read(pattern: str, kept: list[str], others: list[str]):
    found = automaton(regexes.parse(pattern))
    assert all(map(found.accepts, kept))
    assert not any(map(found.accepts, others))


def test_rules_that_derive_no_text_are_trimmed():
    endless = {ROOT: Alternatives((Text("a"), Reference("loop"))), "loop": Sequence((Text("b"), Reference("loop")))}
    assert trimmed(endless) == {ROOT: Alternatives((Text("a"),))}
    assert trimmed({ROOT: Characters(())}) is None


def test_sets_of_characters_leave_surrogates_out():
    assert ANY == ((0, 0xD7FF), (0xE000, 0x10FFFF))
    assert opposite(ranges_of([(0, 0xFFFF)])) == ((0x10000, 0x10FFFF),)


def test_whether_a_text_begins_with_a_character_is_seen_through_empty_rules():
    rules = {ROOT: Sequence((Reference("none"), Text(" a"))), "none": Repeated(Text("b"), 0, 1)}
    assert begins(rules, ord(" "))
    assert not begins(rules, ord("a"))
