"""Which constraint a request's fields ask for, under every name; and the answer in which one choice fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infd.config import Config
from infd.constraint import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, StructuralTag, ToolSchema
from infd.errors import InvalidRequest, NothingAllowed, Unsupported
from infd.http.apis.chat import CHAT
from infd.http.constraints import ConstrainedCalls, constrained
from infd.http.generation import Conversation
from infd.http.json_body import decode
from tests.engine.fake_grammars import Counted, CountedGrammar, FakeGrammars
from tests.http.endpoint import serving
from tests.http.model import tokenizer

SCHEMA = {"type": "object", "properties": {"b": {"type": "number", "const": 1.0}, "a": {}}}
TEXT = json.dumps(SCHEMA)
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}
GBNF = 'root ::= "a"'
LARK = 'start: "a"'


def asked(**fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return constrained(decode(json.dumps(body).encode(), CHAT.decoder, 128))


@pytest.mark.parametrize(
    ("fields", "constraint", "param"),
    [
        ({"response_format": {"type": "json_object"}}, JsonObject(), "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JsonSchema(TEXT), "response_format.schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            JsonSchema(TEXT),
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, StructuralTag(json.dumps(TAG)), "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(TEXT), "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT}}, JsonSchema(TEXT), "structured_outputs.json"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            JsonSchema(TEXT, whitespace=False),
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a+"}}, Regex("a+"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Choice(("a", "b")), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": LARK}}, Lark(LARK), "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": GBNF}}, Ebnf(GBNF), "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, JsonObject(), "structured_outputs.json_object"),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            JsonObject(whitespace=False),
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_additional_properties": False, "backend": "auto"}},
            JsonObject(),
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            StructuralTag(json.dumps(TAG)),
            "structured_outputs.structural_tag",
        ),
        ({"guided_json": SCHEMA}, JsonSchema(TEXT), "guided_json"),
        ({"guided_json": TEXT}, JsonSchema(TEXT), "guided_json"),
        ({"guided_regex": "a+"}, Regex("a+"), "guided_regex"),
        ({"guided_choice": ["a"]}, Choice(("a",)), "guided_choice"),
        ({"guided_grammar": GBNF}, Ebnf(GBNF), "guided_grammar"),
        ({"json_schema": SCHEMA}, JsonSchema(TEXT), "json_schema"),
        ({"json_schema": TEXT}, JsonSchema(TEXT), "json_schema"),
        ({"structural_tag": json.dumps(TAG)}, StructuralTag(json.dumps(TAG)), "structural_tag"),
        ({"regex": "a+"}, Regex("a+"), "regex"),
        ({"grammar": GBNF}, Ebnf(GBNF), "grammar"),
        ({"ebnf": GBNF}, Ebnf(GBNF), "ebnf"),
    ],
    ids=str,
)
def test_every_name_of_a_constraint_is_read(fields: dict[str, Any], constraint: Any, param: str):
    found = asked(**fields)
    if isinstance(constraint, StructuralTag):
        assert json.loads(found.constraint.description) == json.loads(constraint.description)
    else:
        assert found.constraint == constraint
    assert found.param == param


def test_a_schema_keeps_its_text():
    text = b'{"enum": [1.0, 1e400, 12345678901234567890123], "a":1, "a":2}'
    body = b'{"messages": [{"role": "user", "content": "hi"}], "guided_json": %b}' % text
    assert constrained(decode(body, CHAT.decoder, 128)).constraint.schema == text.decode()


@pytest.mark.parametrize(
    "field",
    [
        b'"guided_json": {"a": "\xff"}',
        b'"guided_json": "\xff"',
        b'"response_format": {"type": "structural_tag", "format": {"a": "\xff"}}',
    ],
)
def test_a_schema_that_is_not_utf8_is_the_clients_error(field: bytes):
    body = b'{"messages": [{"role": "user", "content": "hi"}], %b}' % field
    with pytest.raises(InvalidRequest):
        constrained(CHAT.decoder.decode(body))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text", "json_schema": None, "schema": None}},
        {"response_format": None, "structured_outputs": None, "guided_json": None, "json_schema": None},
    ],
)
def test_without_a_constraint_any_text_may_follow(fields: dict[str, Any]):
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"structured_outputs": {}}, InvalidRequest, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, InvalidRequest, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, InvalidRequest, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, InvalidRequest, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, InvalidRequest, "response_format.schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            InvalidRequest,
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "text", "triggers": ["<f>"]}}, InvalidRequest, "response_format.triggers"),
        ({"response_format": {"type": "yaml"}}, InvalidRequest, "response_format.type"),
        ({"guided_choice": []}, InvalidRequest, "guided_choice"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}},
            Unsupported,
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"regex": "a", "backend": "outlines"}}, Unsupported, "structured_outputs.backend"),
    ],
    ids=str,
)
def test_a_constraint_that_is_not_exactly_one_is_refused(fields: dict[str, Any], error: type[Exception], param: str):
    with pytest.raises(error) as caught:
        asked(**fields)
    assert caught.value.param == param


TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "strict": True}},
]
F, G = (f"tools[{number}].function.parameters" for number in (0, 1))
ANY, NONE = '{"type": "object"}', '{"type": "object", "properties": {}, "additionalProperties": false}'
EXACT_F, ANY_F, EXACT_G = ToolSchema("f", TEXT, F), ToolSchema("f", ANY, F), ToolSchema("g", NONE, G)
NAMED = {"type": "function", "function": {"name": "f"}}
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}


def asked_calls(tools: list[Any], **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    request = decode(json.dumps(body).encode(), CHAT.decoder, 128)
    generation = CHAT.generation(request, 0, Config())
    assert isinstance(generation.input, Conversation)
    return generation.input.constrained_calls


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({"tool_choice": "required"}, ConstrainedCalls((EXACT_F, EXACT_G), True, True, "tool_choice")),
        (
            {"tool_choice": "required", "parallel_tool_calls": False, **JSON},
            ConstrainedCalls((EXACT_F, EXACT_G), True, False, "tool_choice"),
        ),
        ({"tool_choice": NAMED}, ConstrainedCalls((EXACT_F,), True, False, "tool_choice")),
        ({}, ConstrainedCalls((ANY_F, EXACT_G), False, True, "tools[1].function.strict")),
        ({"tool_choice": "auto", **JSON}, ConstrainedCalls((ANY_F, EXACT_G), False, True, "tools[1].function.strict")),
        ({"tool_choice": "none"}, None),
    ],
    ids=str,
)
def test_tool_choice_and_strict_tools_constrain_calls(fields: dict[str, Any], calls: ConstrainedCalls | None):
    assert asked_calls(TOOLS, **fields) == calls


def test_calls_of_tools_that_are_not_strict_are_free():
    assert asked_calls(TOOLS[:1]) is None
    assert asked_calls(TOOLS[:1], **JSON) == ConstrainedCalls((ANY_F,), False, True, "response_format")
    assert asked_calls(TOOLS[:1], regex="a") == ConstrainedCalls((ANY_F,), False, True, "regex")


@pytest.mark.parametrize("answer", [{"guided_regex": "a"}, {"structured_outputs": {"choice": ["a"]}}])
def test_required_calls_beside_another_constraint_are_refused(answer: Any):
    with pytest.raises(InvalidRequest, match="tool_choice and"):
        asked_calls(TOOLS, tool_choice="required", **answer)


class PatternGrammars(FakeGrammars):
    """Reads a Counted from the numbers in a Regex: divisor, length and, at most, fails_at."""

    async def compile(self, constraint: Any) -> CountedGrammar:
        return await super().compile(Counted(*map(int, constraint.pattern.split())))


class FirstFails(PatternGrammars):
    """Only the first matcher fails."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = True

    async def compile(self, constraint: Any) -> CountedGrammar:
        grammar, matcher = await super().compile(constraint), CountedGrammar.matcher
        grammar.matcher = lambda: self._matcher(matcher(grammar))
        return grammar

    def _matcher(self, matcher: Any) -> Any:
        if not self.failing:
            matcher.constraint = Counted(matcher.constraint.divisor, matcher.constraint.length)
        self.failing = False
        return matcher


class FirstAllowsNothing(FirstFails):
    """After three tokens of the first choice no token is allowed."""

    def _matcher(self, matcher: Any) -> Any:
        if self.failing:
            row = matcher.row

            def row_until_third() -> Any:
                if len(matcher.tokens) == 3:
                    raise NothingAllowed
                return row()

            matcher.row = row_until_third
        return super()._matcher(matcher)


@pytest.mark.parametrize(
    ("grammars", "regex", "code"),
    [(FirstFails, "2 6 3", "grammar_failed"), (FirstAllowsNothing, "2 6", "nothing_allowed")],
)
async def test_a_failed_choice_says_so_beside_a_sound_one(grammars: type[FirstFails], regex: str, code: str):
    failing, fields = grammars(), {"guided_regex": regex, "n": 2, "temperature": 1, "seed": 0, "return_token_ids": True}
    async with serving(grammars=failing) as endpoint:
        body = await endpoint.complete(**fields)
        failing.failing = True
        held = await endpoint.complete(**fields, stop=body["choices"][0]["text"] + "!")
    assert held["choices"] == body["choices"], "text that may begin a stop string is returned at the failure"
    failed, sound = body["choices"]
    assert failed["finish_reason"] == "error"
    assert failed["error"]["code"] == code
    assert failed["text"] == tokenizer().decode(failed["token_ids"])
    assert len(failed["token_ids"]) == 3, "what was generated until then is returned"
    assert sound["finish_reason"] == "stop"
    assert "error" not in sound
    assert len(sound["token_ids"]) == 6


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_failed_choice_of_a_stream_ends_with_its_error_and_the_others_go_on(path: str):
    prompt = {"prompt": [5, 6, 7]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with serving(grammars=FirstFails()) as endpoint:
        events = await endpoint.events(path, {**prompt, "guided_regex": "2 6 3", "n": 2, "seed": 0, "temperature": 1})
    last = {choice["index"]: choice for event in events for choice in event["choices"] if choice["finish_reason"]}
    assert last[0]["finish_reason"] == "error"
    assert last[0]["error"]["code"] == "grammar_failed"
    assert last[1]["finish_reason"] == "stop"
    assert "error" not in last[1]


async def test_where_all_choices_fail_the_request_fails():
    async with serving(grammars=PatternGrammars()) as endpoint:
        status, body = await endpoint.post(
            "/v1/completions", {"prompt": [5], "guided_regex": "2 6 3", "n": 2, "temperature": 1}
        )
    assert (status, body["error"]["code"]) == (400, "grammar_failed")


async def test_a_constraint_that_cannot_be_compiled_is_refused_with_its_field():
    async with serving(grammars=PatternGrammars()) as endpoint:
        status, body = await endpoint.post("/v1/completions", {"prompt": [5], "structured_outputs": {"regex": "0 1"}})
    assert (status, body["error"]["param"]) == (400, "structured_outputs.regex")
