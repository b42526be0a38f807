"""The grammars of llguidance that are written for each kind of constraint, and which of them are compiled on trial."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from infd.constraint import (
    AfterThought,
    Calls,
    Choice,
    Continuation,
    Ebnf,
    Headed,
    Header,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
    Thought,
    ToolSchema,
)
from infd.errors import GrammarFailed
from infd.grammar import bounds
from infd.grammar.protocol import Limits
from infd.grammar.writing import WHITESPACE, Draft, write
from infd.text import tools
from infd.text.tools.families_json import HERMES

if TYPE_CHECKING:
    from infd.constraint import Constraint

MARKS = {"<think>": 5, "</think>": 6, "<final>": 7, "<tool_call>": 8, "</tool_call>": 9}
THOUGHT = Thought("<think>", "</think>", inside=True)
HEADER = Header("<final>", ("<final>",))
MULTIPLE = '{"type": "object", "properties": {"a": {"multipleOf": 7}}, "required": ["a"]}'
TOOLS = ToolSchema("one", MULTIPLE, "tools[0]"), ToolSchema("two", '{"type": "object"}', "tools[1]")
PLAIN_TAG = json.dumps({"format": {"type": "json_schema", "json_schema": {"enum": [1]}}})
assert HERMES.grammar is not None


def drafted(constraint: Constraint, **limits: Any) -> Draft:
    return write(constraint, replace(Limits(), **limits), MARKS)


def calls(otherwise: Constraint | None = None, tools: tuple[ToolSchema, ...] = TOOLS) -> Calls:
    assert HERMES.grammar is not None
    return Calls(HERMES.grammar, tools, required=False, otherwise=otherwise)


def schema(schema: Any, **options: Any) -> dict[str, Any]:
    (grammar,) = drafted(JsonSchema(json.dumps(schema), **options)).grammars
    written: dict[str, Any] = grammar["json_schema"]
    return written


def options(constraint: Constraint) -> dict[str, Any]:
    (grammar,) = drafted(constraint).grammars
    found: dict[str, Any] = grammar["json_schema"]["x-guidance"]
    return found


def test_a_continuation_is_written_as_its_answer():
    for answer in (JsonObject(), calls(Regex("[0-9]+"))):
        assert drafted(Continuation(answer)) == drafted(answer)
    assert drafted(Continuation(JsonObject())).grammars


def test_grammars_behind_rules_keep_their_name_and_the_grammars_to_which_they_refer():
    first, *others = drafted(AfterThought(THOUGHT, calls(Regex("[0-9]+")))).grammars
    assert "@after" in first["lark_grammar"]
    assert [each.get("name") for each in others] == ["after", "otherwise"]
    assert "@otherwise" in others[0]["lark_grammar"]
    assert drafted(Headed(HEADER, Regex("a"))).grammars[1]["name"] == "headed"
    (alone,) = drafted(Headed(HEADER, None)).grammars
    assert "@" not in alone["lark_grammar"]


def test_the_arguments_of_each_tool_remain_behind_rules_and_when_encoded():
    draft = drafted(AfterThought(THOUGHT, calls()))
    assert [param for param, _ in draft.arguments] == ["tools[0]", "tools[1]"]
    assert draft.arguments[0][1]["json_schema"]["properties"] == {"a": {"multipleOf": 7}}
    written = draft.written()
    assert [(param, json.loads(text)) for param, text in written.arguments] == draft.arguments
    assert [json.loads(text) for text in written.grammars] == draft.grammars


def test_marks_that_are_tokens_are_written_as_tokens_at_every_depth():
    nested = AfterThought(THOUGHT, calls(Headed(HEADER, Regex("a"))))
    text = json.dumps(drafted(nested).grammars)
    assert all(f"<[{token}]>" in text for token in (6, 7, 8, 9))
    assert "<[7]>" in json.dumps(drafted(AfterThought(THOUGHT, Headed(HEADER, None))).grammars)
    inner = AfterThought(Thought("<think>", "</think>"), Regex("a"))
    assert "<[5]>" in json.dumps(drafted(inner).grammars)


@pytest.mark.parametrize(
    "constraint",
    [
        JsonSchema('{"items": {"allOf": [{"pattern": "a"}, {"minLength": 3}]}}'),
        JsonSchema('{"pattern": "a+"}'),
        JsonSchema('{"items": {"type": "string", "pattern": "a+"}}'),
        JsonSchema('{"prefixItems": [{}, {"patternProperties": {"^a": {"type": "null"}}}]}'),
        JsonSchema('{"multipleOf": 7}'),
        JsonSchema('{"allOf": [{"type": "string"}, {"maxLength": 3}]}', lenient=True),
        Regex("a"),
        Choice(("a", "b")),
        Lark('start: "a"'),
        Ebnf('root ::= "a"'),
        StructuralTag(PLAIN_TAG),
    ],
)
def test_constraints_that_may_take_long_to_compile_are_tried_behind_rules_too(constraint: Any):
    costly = drafted(constraint).costly
    assert costly == drafted(constraint).grammars
    for around in (AfterThought(THOUGHT, constraint), Headed(HEADER, constraint), calls(constraint, TOOLS[1:])):
        assert drafted(around).costly == costly


@pytest.mark.parametrize("constraint", [JsonObject(), JsonSchema('{"prefixItems": [{"enum": [1]}]}')])
def test_constraints_that_compile_in_linear_time_are_not_tried(constraint: Any):
    for around in (constraint, AfterThought(THOUGHT, constraint), calls(constraint, TOOLS[1:])):
        assert drafted(around).costly == []


def test_costly_arguments_are_tried_together():
    (tried,) = drafted(calls()).costly
    assert tried["lark_grammar"].count("%json") == 2
    assert "multipleOf" in tried["lark_grammar"]


def test_arguments_with_a_syntax_of_their_own_are_written_one_by_one():
    syntax = tools.SYNTAXES["qwen3_coder"].grammar
    assert syntax is not None
    text = drafted(Calls(syntax, TOOLS[:1], required=True)).grammars[0]["lark_grammar"]
    assert "<parameter=" in text
    assert '"properties"' not in text


def test_tokens_named_in_lark_are_replaced_where_another_vocabulary_tries_them():
    draft = drafted(Lark('start: <think> <[77]> "a"'))
    assert "<[77]>" in draft.grammars[0]["lark_grammar"]
    assert draft.costly[0]["lark_grammar"].count("<[0]>") == 2


def test_infd_s_options_replace_those_of_the_client():
    chosen = {"lenient": True, "coerce_one_of": True, "whitespace_pattern": ".*"}
    plain = {"whitespace_flexible": True, "lenient": False, "coerce_one_of": False, "whitespace_pattern": WHITESPACE}
    assert options(JsonSchema(json.dumps({"x-guidance": chosen}))) == plain
    assert options(JsonSchema(json.dumps({"x-guidance": chosen}), lenient=True)) == {**plain, "lenient": True}
    assert options(JsonObject()) == plain


def test_options_of_a_schema_are_written():
    for lenient, coerce in ((True, False), (False, True), (True, True)):
        found = options(JsonSchema("{}", False, lenient, coerce))
        assert found == {"whitespace_flexible": False, "lenient": lenient, "coerce_one_of": coerce}
    assert options(JsonSchema("{}", False))["whitespace_flexible"] is False
    assert options(JsonObject(False)) == {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}


def test_a_schema_is_rewritten_unless_the_client_asks_for_less():
    unique = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}
    assert "uniqueItems" not in json.dumps(schema(unique))
    assert schema(unique, lenient=True)["uniqueItems"] is True
    assert schema(unique, coerce_one_of=True)["uniqueItems"] is True
    assert drafted(JsonObject()).grammars[0]["json_schema"]["type"] == ["object"]
    with pytest.raises(GrammarFailed, match="a schema is an object"):
        schema([], lenient=True)


def test_schemas_in_grammars_are_rewritten_and_have_infd_s_options():
    unique = '{"type": "array", "uniqueItems": true, "items": {"enum": [1, 2]}}'
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": json.loads(unique)}})
    for constraint in (Lark(f"start: %json {unique}"), StructuralTag(tag)):
        text = drafted(constraint).grammars[0]["lark_grammar"]
        assert "uniqueItems" not in text
        assert "x-guidance" in text


def test_escapes_of_a_regular_expression_are_spelled_for_llguidance():
    (grammar,) = drafted(Regex(r"(?:a)\Z")).grammars
    assert grammar["lark_grammar"] == r"start: /(?:a)\z/"


@pytest.mark.parametrize(
    ("constraint", "limits"),
    [
        (Regex("a" * 101), {"text_bytes": 100}),
        (Regex("(" * 9 + ")" * 9), {"depth": 8}),
        (Choice(tuple("abcd")), {"enumerated": 3}),
        (Choice(("a" * 60, "b" * 60)), {"text_bytes": 100}),
        (JsonSchema('{"properties": {"a": {}, "b": {}}}'), {"properties": 1}),
        (JsonSchema('{"enum": [1, 2, 3, 4]}'), {"enumerated": 3}),
        (JsonSchema('{"enum": [1, 2, 3, 4]}', lenient=True), {"enumerated": 3}),
        (Continuation(Choice(tuple("abcd"))), {"enumerated": 3}),
        (AfterThought(THOUGHT, Choice(tuple("abcd"))), {"enumerated": 3}),
        (calls(Choice(tuple("abcd"))), {"enumerated": 3}),
        (Lark("start: %json " + '{"enum": [1, 2, 3, 4]}'), {"enumerated": 3}),
    ],
)
def test_a_constraint_beyond_a_limit_is_refused(constraint: Constraint, limits: dict[str, int]):
    assert drafted(constraint).grammars
    with pytest.raises(GrammarFailed) as refusal:
        drafted(constraint, **limits)
    assert refusal.value.code == "grammar_too_large"


CONDITIONAL = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "if": {"properties": {"a": {"const": 1}}},
    "then": {"required": ["b"]},
    "else": {"required": ["c"]},
}
DEPENDENT = {
    "type": "object",
    "properties": {f"p{number}": {} for number in range(8)},
    "dependentRequired": {f"p{number}": [f"p{number + 1}"] for number in range(6)},
}


def test_a_rewritten_schema_may_nest_deeper_than_the_client_s():
    text, least = json.dumps(CONDITIONAL), _least(CONDITIONAL, "depth")
    (grammar,) = drafted(JsonSchema(text), depth=least).grammars
    assert _least(grammar["json_schema"], "depth") > least
    with pytest.raises(GrammarFailed, match="levels of nesting"):
        drafted(JsonSchema(text), depth=least - 1)


def test_a_rewritten_schema_has_no_more_properties_than_the_limit():
    text, own = json.dumps(DEPENDENT), _least(DEPENDENT, "properties")
    (grammar,) = drafted(JsonSchema(text)).grammars
    rewritten = _least(grammar["json_schema"], "properties")
    assert rewritten > own
    assert drafted(JsonSchema(text), properties=rewritten).grammars
    for limit in (own, rewritten - 1):
        with pytest.raises(GrammarFailed, match="properties") as refusal:
            drafted(JsonSchema(text), properties=limit)
        assert refusal.value.code == "grammar_too_large"


def _least(schema: Any, limit: str) -> int:
    """Return the lowest limit of this name that a schema keeps."""
    for number in range(200):
        try:
            bounds.check_schema(schema, replace(Limits(), **{limit: number}))
        except GrammarFailed:
            continue
        return number
    raise AssertionError(limit)


def test_a_choice_of_nothing_is_malformed():
    with pytest.raises(GrammarFailed, match="no option") as refusal:
        drafted(Choice(()))
    assert refusal.value.code == "invalid_grammar"
