"""Forced calls of every syntax are what its parser reads, whether marks are tokens or spelled."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.constraint import AfterThought, Calls, CallSyntax, Headed, Regex, Thought, ToolSchema
from infd.errors import GrammarFailed
from infd.grammar.protocol import Limits, Vocabulary
from infd.text import answers, reasoning, tools
from infd.text.markup import Reading
from infd.text.tools.offered import Offered
from tests.grammar import engines
from tests.grammar.vocabularies import walk
from tests.thorough import THOROUGH

if TYPE_CHECKING:
    from infd.constraint import Constraint
    from infd.grammar.protocol import Compiler, Grammar

pytestmark = pytest.mark.usefixtures("engine")
SCHEMAS: dict[str, dict[str, Any]] = {
    "get": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b c": {"enum": ["x", "7"]}, "d": {"type": "boolean"}},
        "required": ["a", "b c"],
        "additionalProperties": False,
    },
    "get.all-2": {"type": "object", "properties": {}, "additionalProperties": False},
}
IDENTIFIERS = json.loads(json.dumps(SCHEMAS).replace("b c", "b_c"))  # for syntaxes whose keys are identifiers
FORCED = list(tools.SYNTAXES)  # every syntax has a grammar


@engines.each
def compiler(marks: tuple[str, ...]) -> Compiler:
    pieces = [*(bytes([byte]) for byte in range(256)), *map(str.encode, marks), b"<end>"]
    special = frozenset(range(256, len(pieces)))
    return engines.compiler(
        Vocabulary(pieces, special, frozenset({len(pieces) - 1}), len(pieces), lambda text: [], False)
    )


def schemas(name: str) -> dict[str, dict[str, Any]]:
    """Return the schemas of tools that calls of a syntax can name."""
    grammar = tools.SYNTAXES[name].grammar
    assert grammar is not None
    return IDENTIFIERS if grammar.quoted else SCHEMAS


@engines.each
def forced(marks: tuple[str, ...], name: str) -> Grammar:
    grammar = tools.SYNTAXES[name].grammar
    assert grammar is not None
    stated = tuple(ToolSchema(tool, json.dumps(schema), tool) for tool, schema in schemas(name).items())
    return compiler(marks).compile(Calls(grammar, stated, required=True), Limits())


def drawn(marks: tuple[str, ...], name: str, draw: random.Random) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content and the calls of a random answer, empty if the answer does not end within 900 tokens."""
    compiled = compiler(marks)
    offered = schemas(name)
    tokens = walk(compiled, forced(marks, name).matcher(), draw, 900, ends=0.2)
    if tokens[-1] not in compiled.vocabulary.end_ids:
        return "", []
    text = b"".join(compiled.vocabulary.tokens[token] for token in tokens[:-1]).decode()
    parsed = Offered({tool: json.dumps(schema).encode() for tool, schema in offered.items()})
    reading = Reading(calls=tools.SYNTAXES[name].start(parsed))
    content = reading.feed(text) + reading.finish()
    aside = reading.take()
    assert aside is not None, text
    return content, [(call.name or "", json.loads(call.arguments)) for call in aside.calls]


@pytest.mark.parametrize("tokens", ["none", "marks", "parts of marks"])
@pytest.mark.parametrize("name", FORCED)
@pytest.mark.histories
def test_forced_calls_are_read_as_calls_of_offered_tools(name: str, tokens: str):
    grammar = tools.SYNTAXES[name].grammar
    assert grammar is not None
    marks = {"none": (), "marks": tools.SYNTAXES[name].marks, "parts of marks": grammar.marks}[tokens]
    marks = tuple(dict.fromkeys(marks))
    draw, finished = random.Random(1), 0
    for _ in range(4):
        if finished == 2 and not THOROUGH:
            break
        content, calls = drawn(marks, name, draw)
        finished += bool(calls)
        assert not content.strip()
        for called, arguments in calls:
            schema = schemas(name)[called]
            assert set(arguments) <= set(schema["properties"])
            assert set(arguments) >= set(schema.get("required", ()))
    assert finished


VALUES = CallSyntax(
    call="<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
    trigger="<tool_call>",
    marks=("<tool_call>", "</tool_call>", "</parameter>"),
    parameter="<parameter=$key>\n$value\n</parameter>\n",
    excluded=("</function>",),
)
STATED = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"enum": ["x", "7"]},
        "c": {"$ref": "#/$defs/free"},
        "d": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/flag"}}, {"type": "null"}]},
    },
    "required": ["a", "c"],
    "$defs": {"free": {"type": "string"}, "flag": {"type": "boolean"}},
}


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def accepted(marks: tuple[str, ...], schema: Any, *parameters: str, syntax: CallSyntax = VALUES) -> bool:
    tool = ToolSchema("get", json.dumps(schema), "tools[0]")
    matcher = compiler(marks).compile(Calls(syntax, (tool,), required=True), Limits()).matcher()
    text = f"<tool_call>\n<function=get>\n{''.join(parameters)}</function>\n</tool_call>"
    parts = re.split(f"({'|'.join(marks)})", text) if marks else [text]
    tokens = [token for part in parts for token in ([256 + marks.index(part)] if part in marks else part.encode())]
    if matcher.validate(tokens) < len(tokens):
        return False
    matcher.advance(tokens)
    return matcher.accepting


ALL_MARKS = [(), ("<tool_call>", "</tool_call>", "</parameter>")]


@pytest.mark.parametrize("marks", ALL_MARKS)
def test_arguments_that_are_written_one_by_one_are_forced_by_their_own_schemas(marks: tuple[str, ...]):
    def accepts(*parameters: str) -> bool:
        return accepted(marks, STATED, *parameters)

    a, c = parameter("a", "7"), parameter("c", 'two\nlines "é" </tool>')
    assert accepts(a, c)
    assert accepts(a, parameter("b", "7"), c, parameter("d", "[true, false]"))
    assert accepts(a, c, parameter("d", "null"))
    assert accepts(a, parameter("c", ""))
    for refused in (
        (a,),
        (c, a),
        (parameter("a", "seven"), c),
        (parameter("a", '"7"'), c),
        (a, parameter("b", "8"), c),
        (a, parameter("b", '"7"'), c),
        (a, c, parameter("d", "[1]")),
        (a, c, parameter("e", "1")),
        (),
    ):
        assert not accepts(*refused), refused


@pytest.mark.parametrize("marks", ALL_MARKS)
@pytest.mark.parametrize(
    ("stated", "accepts", "refuses"),
    [
        ({"type": "string"}, ["", "a</function>"[:5], "\n\n", "7"], ["a</function>b"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\n", "\n\n\n"], ["a", "abcd", "a\n\n\n"]),
        ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["", "abd", "x"]),
        ({"type": "string", "pattern": "^a|b"}, [], []),
        ({"type": "string", "pattern": "b|c"}, ["abx", "c"], ["", "a"]),
        ({"type": "string", "pattern": "^a[|$]"}, ["a|", "a$b"], ["ba|", "a"]),
        ({"type": "string", "format": "date", "minLength": 3}, ["2026-08-22"], ["2026-13-22", "today", ""]),
        ({"type": "string", "enum": ["a", "b\nc"]}, ["a", "b\nc"], ["", "b"]),
        ({"enum": ["a", 7, None]}, ["a", "7", "null"], ["8", '"a"']),
        ({"type": ["string", "null"]}, ["a", "null"], []),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ["ab", "null"], ["abc"]),
        ({"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}]}, ["x", "null"], ["y"]),
        (
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            ["a [x]", "[1, 2]", "7"],
            ['["a"]', "[x", " [1.5]"],
        ),
        ({"type": ["string", "integer"], "minimum": 5}, ["x 3", "7"], ["3", "-9", " 3"]),
        ({"type": ["string", "boolean", "null", "integer"], "minimum": 5}, ["x 3", "7", "true", "null"], ["3", "-9"]),
        ({"type": "integer", "minimum": 5}, ["7"], ["3", "x", "7.5"]),
        ({"type": "boolean"}, ["true"], ["True", "x", ""]),
        ({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}, ['{"s": "a"}'], ["{}", "a"]),
        ({}, ["anything", ""], []),
    ],
)
def test_a_value_without_quotes_keeps_to_its_schema(
    marks: tuple[str, ...], stated: dict[str, Any], accepts: list[str], refuses: list[str]
):
    schema = {"type": "object", "properties": {"a": stated}, "required": ["a"]}
    offered = Offered({"get": json.dumps(schema).encode()})
    if stated.get("pattern") == "^a|b":
        with pytest.raises(GrammarFailed, match="anchors within the pattern of a string: not supported where"):
            accepted(marks, schema, parameter("a", "a"))
    for value in accepts:
        assert accepted(marks, schema, parameter("a", value)), value
        reading = Reading(calls=tools.SYNTAXES["qwen3_coder"].start(offered))
        reading.feed(f"<tool_call>\n<function=get>\n{parameter('a', value)}</function>\n</tool_call>")
        aside = reading.take()
        assert aside is not None
        assert msgspec.json.decode(aside.calls[0].arguments)["a"] in (value, json_of(value))
    for value in refuses:
        assert not accepted(marks, schema, parameter("a", value)), value


def json_of(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


@pytest.mark.parametrize("marks", ALL_MARKS)
def test_a_tool_whose_schema_names_no_arguments_may_have_any(marks: tuple[str, ...]):
    for schema in ({"type": "object"}, {}):
        assert accepted(marks, schema)
        assert accepted(marks, schema, parameter("a", "7"), parameter("b-2", "x\ny"))
        assert not accepted(marks, schema, parameter("a b", "7"))
    assert not accepted(marks, {"type": "object", "additionalProperties": False}, parameter("a", "7"))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "several arguments"),
        ({"properties": {"a>": {}}}, "the name 'a>'"),
        ({"additionalProperties": {"type": "integer"}}, "arguments without names"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "a string with </parameter> in it"),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"pattern": "b"}]}}}, "of strings beside other"),
    ],
)
def test_what_text_without_quotes_cannot_keep_is_refused_by_name(schema: dict[str, Any], message: str):
    with pytest.raises(GrammarFailed, match=message) as failed:
        accepted((), {"type": "object", **schema})
    assert failed.value.code == "unsupported_grammar"
    assert failed.value.param == "tools[0]"


PYTHON = tools.SYNTAXES["pythonic"].grammar
CALLED = Calls(PYTHON, (ToolSchema("get", json.dumps({**STATED, "additionalProperties": False}), "tools[0]"),), True)


def allows(constraint: Constraint, text: str, marks: tuple[str, ...] = ()) -> bool:
    matcher = compiler(marks).compile(constraint, Limits()).matcher()
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    tokens = [token for part in parts for token in ([256 + marks.index(part)] if part in marks else part.encode())]
    if matcher.validate(tokens) < len(tokens):
        return False
    matcher.advance(tokens)
    return matcher.accepting


@pytest.mark.parametrize(
    ("written", "allowed"),
    [
        ('[get(a=1, c="x")]', True),
        ('[get(a=1, b="7", c="(])\\n\\"", d=[true, false])]', True),
        ('[get(a=1, c=""), get(a=-2, c="y", d=null)]', True),
        ("[get(a=1)]", False),
        ('[get(a=1c="x")]', False),
        ('[get(c="x", a=1)]', False),
        ('[get(, a=1, c="x")]', False),
        ('[get(a=1, c="x",)]', False),
        ("[get(a=1, c='x')]", False),
        ('[get(a=1.5, c="x")]', False),
        ('[get(a=1, c="x"), ]', False),
        ('get(a=1, c="x")', False),
    ],
)
def test_calls_of_python_have_commas_between_the_arguments_present(written: str, allowed: bool):
    assert allows(CALLED, written) == allowed


def test_arguments_that_may_all_be_absent_are_separated_wherever_they_begin():
    kinds = {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"type": "integer"}}
    schema = {"type": "object", "properties": kinds, "additionalProperties": False}
    calls = Calls(PYTHON, (ToolSchema("f", json.dumps(schema), "tools[0]"),), True, parallel=False)
    written = {"a": "True", "b": "None", "c": "7"}
    for present in range(8):
        chosen = [f"{key}={value}" for place, (key, value) in enumerate(written.items()) if present >> place & 1]
        assert allows(calls, f"[f({', '.join(chosen)})]")
    for refused in ("f(b=None, a=True)", "f(a=true)", "f(a=False c=1)", "f(a=False,)", "f(a=1)"):
        assert not allows(calls, f"[{refused}]")
    anything = Calls(PYTHON, (ToolSchema("f", "{}", "tools[0]"),), True)
    assert allows(anything, "[f(), f(a=1), f(a=true, b_2={}, c=[1])]")
    assert not allows(anything, "[f(a-b=1)]")


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", True),
        ("Paris [1] is", True),
        ("\n1, [2] and [get(a=1)]", True),
        ("[1, 2]", False),
        ('[get(a=1, c="x")]', True),
        ('[get(a=1, c="x")] Done.', False),
        ("[get(b", False),
        (" [ other()]", False),
        ("a<|python_start|>", False),
    ],
)
@pytest.mark.parametrize("marks", [(), ("<|python_start|>", "<|python_end|>")])
def test_an_answer_that_does_not_begin_as_a_call_may_be_any_text(text: str, allowed: bool, marks: tuple[str, ...]):
    strict = Calls(CALLED.syntax, CALLED.tools, required=False)
    assert allows(strict, text, marks) == allowed


@pytest.mark.parametrize("name", ["deepseek_v32", "kimi_k3"])
def test_a_string_ends_before_the_token_in_its_closing_mark(name: str):
    syntax = tools.SYNTAXES[name].grammar
    assert syntax is not None
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    tool = ToolSchema("f", json.dumps(schema), "tools[0]")
    written = syntax.begin + syntax.call.replace("$name", "f").replace("$number", "0") + syntax.end

    def text(value: str) -> str:
        return written.replace("$arguments", syntax.parameter.replace("$key", "a").replace("$value", value))

    for value, allowed in (("x </a> </", True), ("", True), ("ten letters", False)):
        assert allows(Calls(syntax, (tool,), required=True), text(value), syntax.marks) == allowed
    strict = Calls(syntax, (tool,), required=False)
    assert allows(strict, f"a </b> {text('x')}", syntax.marks)
    assert not allows(strict, f"a {text('ten letters')}", syntax.marks)
    thought = Thought("<|open|>think<|sep|>", "<|close|>think<|sep|>", marks=("<|open|>", "<|close|>", "<|sep|>"))
    answer = AfterThought(thought, Regex("[0-9]"))
    assert allows(answer, "<|open|>think<|sep|>Hm.<|close|>think<|sep|>\n7", thought.marks)
    assert not allows(answer, "<|open|>think<|sep|>Hm.<|close|>think<|sep|>x", thought.marks)


HARMONY = answers.SYNTAXES["harmony"]
ASKED = "<|start|>user<|message|>hi<|end|><|start|>assistant"
THINKS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("spelled", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_harmony_forces_a_call_in_its_own_channel_and_an_answer_in_another(required: bool, spelled: bool, thinks: bool):
    thought, header = HARMONY.thought(ASKED, ""), HARMONY.header(ASKED, "")
    assert thought is not None
    assert header is not None
    assert HARMONY.grammar is not None
    stated = (ToolSchema("get", json.dumps({**STATED, "additionalProperties": False}), "tools[0]"),)
    otherwise = None if required else Headed(header, Regex("[0-9]+"))
    calls = AfterThought(thought, Calls(HARMONY.grammar, stated, required, otherwise=otherwise))
    marks = () if spelled else HARMONY.marks
    begun = THINKS if thinks else ""
    assert allows(calls, begun + CALL + '{"a": 1, "c": "<|call|>"}', ()) or not spelled
    assert allows(calls, begun + CALL + '{"a": 1, "c": "x"}', marks)
    assert not allows(calls, begun + CALL + '{"a": 1}', marks)
    assert not allows(calls, begun + CALL.replace("get", "set") + '{"a": 1, "c": "x"}', marks)
    assert allows(calls, f"{begun}{FINAL}42", marks) == (not required)
    assert not allows(calls, f"{begun}{FINAL}x", marks)
    assert not allows(calls, f"{begun}42", marks)
    assert not allows(calls, f'{begun}{CALL}{{"a": 1, "c": "x"}}<|call|><|start|>assistant{CALL}{{}}', marks)
    answer = AfterThought(thought, Headed(header, None))
    assert allows(answer, f"{begun}{FINAL}Any text.", marks)
    assert not allows(answer, f"{begun}{FINAL}Any{CALL}", marks)


def test_a_forced_answer_of_harmony_is_read_as_it_was_forced():
    reading = Reading(HARMONY.start(ASKED, "", Offered({"get": b"{}"})))
    content = reading.feed(THINKS + CALL + '{"a": 1, "c": "x"}') + reading.finish()
    aside = reading.take()
    assert aside is not None
    assert (content, aside.thought) == ("", "Hm.")
    assert [(call.name, call.arguments) for call in aside.calls] == [("get", '{"a": 1, "c": "x"}')]
    assert HARMONY.header(f"{ASKED}{FINAL}", "") is None
    assert HARMONY.header(ASKED, "Fo") is None


K3 = reasoning.SYNTAXES["kimi_k3"]
K3_CLOSED = "Hm.<|close|>think<|sep|>"
K3_FINAL, K3_ENDS = "<|open|>response<|sep|>", ("<|close|>response<|sep|>", "<|close|>message<|sep|>")
K3_CALL = (
    '<|open|>tools<|sep|><|open|>call tool="get" index="0"<|sep|><|open|>argument key="a"<|sep|>1'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)


@pytest.mark.parametrize("spelled", [True, False])
def test_a_constrained_answer_of_kimi_k3_begins_with_the_model_s_own_header(spelled: bool):
    thought, header = K3.thought("<|open|>think<|sep|>", ""), K3.header("<|open|>think<|sep|>", "")
    assert thought is not None
    assert header is not None
    marks = () if spelled else header.marks
    answer = AfterThought(thought, Headed(header, Regex("[0-9]+")))
    for ends in ("", "".join(K3_ENDS)):
        assert allows(answer, f"{K3_CLOSED}{K3_FINAL}42{ends}", marks)
        assert not allows(answer, f"{K3_CLOSED}{K3_FINAL}x{ends}", marks)
    assert not allows(answer, f"{K3_CLOSED}42", marks)
    assert K3.header(K3_FINAL, "") is None
    assert K3.header("<|open|>think<|sep|>", "Fo") is None
    assert reasoning.SYNTAXES["qwen3"].header("<think>", "") is None


@pytest.mark.parametrize("spelled", [True, False])
@pytest.mark.parametrize("prompt", ["<think>\n\n</think>\n", "<|extra_0|>"])
def test_a_constrained_answer_of_hunyuan_a13b_is_between_its_marks(spelled: bool, prompt: str):
    family = reasoning.SYNTAXES["hunyuan_a13b"]
    thought, header = family.thought(prompt, ""), family.header(prompt, "")
    assert header is not None
    marks = () if spelled else header.marks
    answer: Constraint = Headed(header, Regex("[0-9]+"))
    begin = ""
    if thought is not None:
        answer, begin = AfterThought(thought, Headed(header, Regex("[0-9]+"))), "<think>\nHm.\n</think>\n"
    for ends in ("", "\n</answer>"):
        assert allows(answer, f"{begin}<answer>\n42{ends}", marks)
        assert not allows(answer, f"{begin}<answer>\nx{ends}", marks)
    assert not allows(answer, f"{begin}42", marks)
    reading = Reading(family.start(prompt, ""))
    assert reading.feed(f"{begin}<answer>\n42\n</answer>") + reading.finish() == "42"


@pytest.mark.parametrize("spelled", [True, False])
def test_strict_calls_of_kimi_k3_leave_it_its_header_and_an_answer_before_them(spelled: bool):
    thought, header = K3.thought("<|open|>think<|sep|>", ""), K3.header("<|open|>think<|sep|>", "")
    syntax = tools.SYNTAXES["kimi_k3"].grammar
    assert thought is not None
    assert header is not None
    assert syntax is not None
    marks = () if spelled else header.marks
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = ToolSchema("get", json.dumps({**schema, "additionalProperties": False}), "tools[0]")
    calls = AfterThought(thought, Calls(syntax, (tool,), required=False, otherwise=Headed(header, None)))
    content = f"{K3_CLOSED}{K3_FINAL}I look <it> up."
    for text in (
        content,
        content + "".join(K3_ENDS),
        K3_CLOSED + K3_CALL,
        content + K3_ENDS[0] + K3_CALL,
    ):
        assert allows(calls, text, marks), text
    for text in (
        f"{K3_CLOSED}I look it up.",
        K3_CLOSED + K3_CALL.replace("1", "x"),
        content + K3_ENDS[0] + K3_CALL.replace("1", "x"),
        content + K3_CALL,
    ):
        assert not allows(calls, text, marks), text
