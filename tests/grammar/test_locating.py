"""Refusals of llguidance name the part of the client's schema at fault, in a worker as in the process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from infd.constraint import Calls, CallSyntax, JsonSchema, ToolSchema
from infd.errors import GrammarFailed
from infd.grammar.llguidance import LlguidanceCompiler
from infd.grammar.protocol import Limits, Vocabulary
from infd.grammar.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = Limits()


@pytest.fixture(scope="module", params=["in a worker", "in the process"])
def compiler(request: pytest.FixtureRequest) -> Iterator[LlguidanceCompiler]:
    tokens = [*(bytes([b]) for b in range(256)), b""]
    vocabulary = Vocabulary(tokens, frozenset(), frozenset({256}), 257, lambda text: [*text.encode()])
    trial = Trial()
    yield LlguidanceCompiler(vocabulary, trial if request.param == "in a worker" else None)
    trial.close()


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"items": {"multipleOf": 1.2345678899999998}}}}, "#/properties/a/items"),
        (
            {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"items": {"multipleOf": 1.2345678899999998}}}},
            "#/$defs/a/items",
        ),
        ({"items": {"patternProperties": {"^a": False, "b$": True}, "additionalProperties": False}}, "#/items"),
    ],
    ids=json.dumps,
)
def test_a_refused_schema_names_the_path(compiler: LlguidanceCompiler, schema: Any, path: str):
    with pytest.raises(GrammarFailed) as refusal:
        compiler.compile(JsonSchema(json.dumps(schema)), LIMITS)
    assert str(refusal.value).startswith(f"the schema at {path}: ")
    assert "json-schema:" not in str(refusal.value)


def test_refused_arguments_of_a_tool_name_the_path_and_the_tool(compiler: LlguidanceCompiler):
    wrong = json.dumps({"properties": {"a": {"multipleOf": 1.2345678899999998}}})
    tools = ToolSchema("one", "{}", "tools[0]"), ToolSchema("two", wrong, "tools[1]")
    with pytest.raises(GrammarFailed, match=r"^the schema at #/properties/a: ") as refusal:
        compiler.compile(Calls(CallSyntax("<$name:$arguments>", "<", ()), tools, required=True), LIMITS)
    assert refusal.value.param == "tools[1]"
