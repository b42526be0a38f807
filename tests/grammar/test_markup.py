"""Thoughts before a constraint, and tool calls: which tokens each part allows, whatever tokens spell the marks."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

import pytest

from infd.constraint import AfterThought, Calls, CallSyntax, Constraint, Regex, Thought, ToolSchema
from infd.errors import GrammarFailed
from infd.grammar.protocol import Limits, Vocabulary
from infd.text.markup import Reading
from infd.text.reasoning.base import BlockParser
from infd.text.tools.families_json import HERMES
from infd.text.tools.offered import Offered
from tests.grammar import engines
from tests.grammar.vocabularies import allowed, walk

if TYPE_CHECKING:
    from infd.grammar.protocol import Compiler

pytestmark = pytest.mark.usefixtures("engine")
LIMITS = Limits()
GRAMMAR = HERMES.grammar
assert GRAMMAR is not None
(OPEN,), (CLOSE,) = HERMES.opens, HERMES.closes
MARKS = (b"<think>", b"</think>", b"<tool_call>", b"</tool_call>")
PIECES = [*(bytes([byte]) for byte in range(256)), *MARKS, b">{", b">\n", b'{"', b">1", b"k>"]
ENDED = Thought("<think>", "</think>", inside=True)
OPTIONAL = Thought("<think>", "</think>")
DIGITS = Regex("[0-9]{3}")
GET = ToolSchema("get", '{"properties": {"a": {"type": "integer"}}, "required": ["a"]}', "tools[0]")
GET_ALL = ToolSchema("get_all", '{"type": "object", "additionalProperties": false}', "tools[1]")
TOOLS = {"get": json.loads(GET.parameters), "get_all": json.loads(GET_ALL.parameters)}
KINDS = ["added", "special", "spelled"]


@engines.each
def compiler(kind: str, *, drop_space: bool = False) -> Compiler:
    """Return the compiler of a vocabulary with marks as added tokens, as special tokens, or without tokens of marks."""
    pieces = [b"" if kind == "spelled" and piece in MARKS else piece for piece in PIECES]
    pieces += [b"<end>", b"<other>"]
    end, other = len(pieces) - 2, len(pieces) - 1
    special = {end, other} | ({pieces.index(mark) for mark in MARKS} if kind == "special" else set())
    return engines.compiler(
        Vocabulary(pieces, frozenset(special), frozenset({end}), len(pieces), lambda text: [], drop_space)
    )


def ids(kind: str, text: str) -> list[int]:
    """Return the tokens of a text: one for each mark, if the vocabulary has it, and one for each other byte."""
    parts = re.split("(" + "|".join(mark.decode() for mark in MARKS) + ")", text)
    tokens: list[int] = []
    for part in parts:
        piece = part.encode()
        tokens += [PIECES.index(piece)] if kind != "spelled" and piece in MARKS else list(piece)
    return tokens


def accepts(kind: str, constraint: Constraint, text: str) -> bool:
    """Whether the whole text is an answer."""
    matcher, tokens = compiler(kind).compile(constraint, LIMITS).matcher(), ids(kind, text)
    if matcher.validate(tokens) < len(tokens):
        return False
    matcher.advance(tokens)
    return matcher.accepting


@pytest.mark.parametrize("kind", KINDS)
def test_the_constraint_begins_after_the_thought_that_the_prompt_has_opened(kind: str):
    constraint = AfterThought(ENDED, DIGITS)
    for text in ("</think>123", "a\n\n</think>\n\n123", "12 {\né <b></think>\n123"):
        assert accepts(kind, constraint, text), text
    for text in ("123", "a</think>", "a</think>12", "a</think>1234", "a</think>\n\n\n123", "a</think> 123"):
        assert not accepts(kind, constraint, text), text


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_may_think_first_or_answer_at_once(kind: str):
    constraint = AfterThought(OPTIONAL, DIGITS)
    for text in ("123", "<think>a</think>123", "<think>\na\n</think>\n\n123"):
        assert accepts(kind, constraint, text), text
    for text in ("a</think>123", "<think>a123", "\n123", "<think>a</think><think>b</think>123"):
        assert not accepts(kind, constraint, text), text


@pytest.mark.parametrize("kind", ["added", "special"])
def test_a_mark_with_a_token_of_its_own_is_spelled_by_that_token_alone(kind: str):
    compiled = compiler(kind)
    matcher = compiled.compile(AfterThought(ENDED, DIGITS), LIMITS).matcher()
    matcher.advance(list(b"x</think"))
    free = allowed(compiled, matcher)
    for piece in (b">", b">{", b">\n", b">1"):
        assert PIECES.index(piece) not in free
    assert PIECES.index(b"</think>") in free

    call = compiled.compile(Calls(GRAMMAR, (GET,), required=True), LIMITS).matcher()
    assert allowed(compiled, call) == [PIECES.index(b"<tool_call>")]


def test_a_token_may_hold_the_end_of_a_spelled_mark_and_the_begin_of_the_answer():
    compiled = compiler("spelled")
    matcher = compiled.compile(AfterThought(ENDED, DIGITS), LIMITS).matcher()
    matcher.advance(list(b"x</thin"))
    free = allowed(compiled, matcher)
    assert PIECES.index(b"k>") in free
    matcher.advance(list(b"k"))
    free = allowed(compiled, matcher)
    assert PIECES.index(b">1") in free
    assert PIECES.index(b">{") not in free
    matcher.advance([PIECES.index(b">1"), *b"23"])
    assert matcher.stopped


def test_a_thought_takes_back_its_end():
    matcher = compiler("added").compile(AfterThought(ENDED, DIGITS), LIMITS).matcher()
    matcher.advance(ids("added", "a</think>\n12"))
    matcher.rollback(4)
    assert matcher.validate(ids("added", "b</think>123")) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_thought_does_not_end_the_answer(kind: str):
    compiled = compiler(kind)
    matcher = compiled.compile(AfterThought(ENDED, Regex("a*")), LIMITS).matcher()
    (end,) = compiled.vocabulary.end_ids
    matcher.advance(ids(kind, "hm"))
    assert end not in allowed(compiled, matcher)
    matcher.advance(ids(kind, "</think>"))
    assert end in allowed(compiled, matcher)


def call(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_calls_alone_in_the_models_syntax(kind: str, parallel: bool):
    constraint = Calls(GRAMMAR, (GET, GET_ALL), required=True, parallel=parallel)
    one, other = call("get", '{"a": 1}'), call("get_all", "{}")
    assert accepts(kind, constraint, one)
    assert accepts(kind, constraint, other)
    assert accepts(kind, constraint, f"{one}\n{other}\n{one}") == parallel
    refused = [
        *("", "Yes.", f"Yes.\n{one}", f"{one}Yes.", call("set", "{}"), call("get", "{}"), call("get", '{"a": "b"}')),
        *(call("get_all", '{"a": 1}'), call("get", "[]"), one.removesuffix(CLOSE), f"[{one}]", f"{one}{one}"),
    ]
    for text in refused:
        assert not accepts(kind, constraint, text), text


@pytest.mark.parametrize("kind", KINDS)
def test_where_calls_are_not_required_text_is_free_and_calls_keep_to_their_schemas(kind: str):
    constraint = Calls(GRAMMAR, (GET, GET_ALL), required=False)
    one = call("get", '{"a": 1}')
    for text in ("", "Yes <b>.", one, f"Let me see.\n{one}", f"{one}\n{one} and\n{one}.", f"a{one}{one}"):
        assert accepts(kind, constraint, text), text
    for text in (call("get", '{"a": "b"}'), f"Yes{call('set', '{}')}", f"{one}{OPEN}", OPEN):
        assert not accepts(kind, constraint, text), text


@pytest.mark.parametrize("kind", KINDS)
def test_without_parallel_calls_free_text_holds_one_call(kind: str):
    constraint = Calls(GRAMMAR, (GET,), required=False, parallel=False)
    one = call("get", '{"a": 1}')
    assert accepts(kind, constraint, f"a {one} b")
    assert not accepts(kind, constraint, f"{one}\n{one}")


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_calls_or_the_other_constraint(kind: str):
    constraint = Calls(GRAMMAR, (GET,), required=False, otherwise=DIGITS)
    one = call("get", '{"a": 1}')
    for text in ("123", one, f"{one}\n{one}"):
        assert accepts(kind, constraint, text), text
    for text in ("", f"123{one}", f"{one}123", "Yes."):
        assert not accepts(kind, constraint, text), text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_space", [True, False])
@pytest.mark.parametrize("thought", [None, ENDED, OPTIONAL])
@pytest.mark.parametrize("otherwise", [None, DIGITS])
def test_parsers_read_the_constrained_calls_in_any_finished_answer(
    kind: str, drop_space: bool, thought: Thought | None, otherwise: Constraint | None
):
    compiled, draw, finished = compiler(kind, drop_space=drop_space), random.Random(1), 0
    for required in (True, False):
        calls = Calls(GRAMMAR, (GET, GET_ALL), required=required, otherwise=otherwise)
        grammar = compiled.compile(calls if thought is None else AfterThought(thought, calls), LIMITS)
        for _ in range(3):
            tokens = walk(compiled, grammar.matcher(), draw, 600, ends=0.1)
            if tokens[-1] not in compiled.vocabulary.end_ids:
                continue
            finished += 1
            text = b"".join(compiled.vocabulary.tokens[token] for token in tokens[:-1]).decode()
            thoughts = None if thought is None else BlockParser(thought)
            reading = Reading(thoughts, HERMES.start(Offered({})))
            content = reading.feed(text) + reading.finish()
            aside = reading.take()
            called = [] if aside is None else aside.calls
            for each in called:
                assert each.name in TOOLS
                assert set(json.loads(each.arguments)) >= set(TOOLS[each.name].get("required", ()))
            assert called or not required
            assert not required or not content.strip()
            if otherwise is not None and not called:
                assert re.fullmatch("[0-9]{3}", content.removeprefix(" "))
    assert finished or (kind == "spelled" and thought is not None), "random bytes rarely spell a mark"


def test_a_syntax_may_have_a_section_around_its_calls_and_names_outside_of_json():
    syntax = CallSyntax(
        begin="<tool_call>[",
        call="$name:$arguments",
        between=", ",
        end="]</tool_call>",
        trigger=OPEN,
        marks=HERMES.marks,
    )
    for kind in KINDS:
        for required in (True, False):
            constraint = Calls(syntax, (GET, GET_ALL), required=required)
            assert accepts(kind, constraint, '<tool_call>[get:{"a": 1}]</tool_call>')
            assert accepts(kind, constraint, '<tool_call>[get_all:{}, get:{"a": 1}]</tool_call>')
            assert not accepts(kind, constraint, "<tool_call>[]</tool_call>")


@pytest.mark.parametrize(
    ("parameters", "code"),
    [
        ("{", "invalid_grammar"),
        ('{"type": "array"}', "invalid_grammar"),
        ('{"type": ["string", "null"]}', "invalid_grammar"),
        ('{"properties": {"a": {"$ref": "https://example.com/a"}}, "required": ["a"]}', "unsupported_grammar"),
        ('{"properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}', "invalid_grammar"),
        ('{"required": ["a"], "properties": {"a": ' * 70 + "{}" + "}}" * 70, "grammar_too_large"),
    ],
    ids=["text", "array", "types", "reference", "pattern", "depth"],
)
def test_the_tool_at_fault_is_named(parameters: str, code: str):
    tools = (GET, ToolSchema("bad", parameters, "tools[7].function.parameters"), GET_ALL)
    for constraint in (
        Calls(GRAMMAR, tools, required=True),
        AfterThought(ENDED, Calls(GRAMMAR, tools, required=False)),
    ):
        with pytest.raises(GrammarFailed) as failed:
            compiler("added").compile(constraint, LIMITS)
        assert failed.value.param == "tools[7].function.parameters"
        assert failed.value.code == code


def test_the_sizes_of_all_tools_add_up():
    properties = {f"p{number}": {"type": "integer"} for number in range(300)}
    schema = json.dumps({"properties": properties, "required": list(properties)})
    tools = tuple(ToolSchema(f"f{number}", schema, f"tools[{number}]") for number in range(4))
    compiler("added").compile(Calls(GRAMMAR, tools[:3], required=True), LIMITS)
    with pytest.raises(GrammarFailed) as failed:
        compiler("added").compile(Calls(GRAMMAR, tools, required=True), LIMITS)
    assert failed.value.code == "grammar_too_large"
