"""Forced calls of every syntax are what its parser reads, whether marks are tokens or spelled."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.errors import GrammarFailed
from infd.grammar.protocol import Limits, Vocabulary
from infd.request import Calls, CallSyntax, ToolSchema
from infd.text import tools
from infd.text.markup import Reading
from infd.text.tools.offered import Offered
from tests.grammar import engines
from tests.grammar.vocabularies import walk

if TYPE_CHECKING:
    from infd.grammar.protocol import Compiler

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
TOOLS = tuple(ToolSchema(name, json.dumps(schema), name) for name, schema in SCHEMAS.items())
OFFERED = Offered({tool.name: tool.parameters.encode() for tool in TOOLS})
FORCED = [name for name, syntax in tools.SYNTAXES.items() if syntax.grammar is not None]


@engines.each
def compiler(marks: tuple[str, ...]) -> Compiler:
    pieces = [*(bytes([byte]) for byte in range(256)), *map(str.encode, marks), b"<end>"]
    special = frozenset(range(256, len(pieces)))
    return engines.compiler(
        Vocabulary(pieces, special, frozenset({len(pieces) - 1}), len(pieces), lambda text: [], False)
    )


def drawn(marks: tuple[str, ...], name: str, draw: random.Random) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content and the calls of a random answer, empty if the answer does not end within 900 tokens."""
    grammar = tools.SYNTAXES[name].grammar
    assert grammar is not None
    compiled = compiler(marks)
    matcher = compiled.compile(Calls(grammar, TOOLS, required=True), Limits()).matcher()
    tokens = walk(compiled, matcher, draw, 900, ends=0.2)
    if tokens[-1] not in compiled.vocabulary.end_ids:
        return "", []
    text = b"".join(compiled.vocabulary.tokens[token] for token in tokens[:-1]).decode()
    reading = Reading(calls=tools.SYNTAXES[name].start(OFFERED))
    content = reading.feed(text) + reading.finish()
    aside = reading.take()
    assert aside is not None, text
    return content, [(call.name or "", json.loads(call.arguments)) for call in aside.calls]


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("name", FORCED)
def test_forced_calls_are_read_as_calls_of_offered_tools(name: str, spelled: bool):
    marks = () if spelled else tuple(dict.fromkeys(tools.SYNTAXES[name].marks))
    draw, finished = random.Random(1), 0
    for _ in range(4):
        content, calls = drawn(marks, name, draw)
        finished += bool(calls)
        assert not content.strip()
        for called, arguments in calls:
            assert set(arguments) <= set(SCHEMAS[called]["properties"])
            assert set(arguments) >= set(SCHEMAS[called].get("required", ()))
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
