"""Forced calls of every syntax are what its parser reads, whether marks are tokens or spelled."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest

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


@pytest.mark.parametrize("marks", [(), ("<tool_call>", "</tool_call>", "</parameter>")])
def test_arguments_that_are_written_one_by_one_are_forced_by_their_own_schemas(marks: tuple[str, ...]):
    compiled = compiler(marks)
    tool = ToolSchema("get", json.dumps(STATED), "tools[0]")
    grammar = compiled.compile(Calls(VALUES, (tool,), required=True), Limits())

    def accepts(*parameters: str) -> bool:
        text = f"<tool_call>\n<function=get>\n{''.join(parameters)}</function>\n</tool_call>"
        matcher = grammar.matcher()
        parts = re.split(f"({'|'.join(marks)})", text) if marks else [text]
        tokens = [token for part in parts for token in ([256 + marks.index(part)] if part in marks else part.encode())]
        if matcher.validate(tokens) < len(tokens):
            return False
        matcher.advance(tokens)
        return matcher.accepting

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
