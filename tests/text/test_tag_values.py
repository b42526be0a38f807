"""Values that a model writes without quotes: calls that published templates write are read back with their types."""

from __future__ import annotations

import json
import random
import string
from functools import cache
from typing import Any

import pytest

from infd.text import tools
from infd.text.chat import ChatTemplate
from infd.text.markup import Reading
from infd.text.tools import typed
from infd.text.tools.offered import Offered
from tests.text.syntaxes.tag_values import FAMILIES
from tests.text.templates import published
from tests.text.transcripts import read
from tests.thorough import among

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
WRITTEN = [(name, template) for name, each in FAMILIES.items() for template in each.templates if not each.lossy]
TEXTS = [
    "",
    " ",
    "\n",
    "a\n",
    "\n\na",
    "007",
    "7",
    "1e5",
    "true",
    "null",
    "None",
    "[1]",
    '{"a": 1}',
    '"q"',
    "é🙂\\n",
    "<b>",
]
TEXTS += [
    "</function>",
    "<parameter=x>",
    "x</tool_call>",
    "\t\\",
    "'",
    "a, b: c",
    "</invoke>",
    "｜DSML｜",
    "< /",
    "\r\n\x01",
]


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": published()[name]}, VARIABLES)


def value(draw: random.Random, kind: str, depth: int = 2) -> Any:
    match kind:
        case "null":
            return None
        case "boolean":
            return draw.random() < 0.5
        case "integer":
            return draw.choice([0, -1, 7, 10**20, draw.randrange(10**6)])
        case "number":
            return draw.choice([0.5, -1e-7, 1e22, 3.0, draw.random()])
        case "string":
            return "".join(draw.choices(TEXTS, k=draw.randrange(4)))
        case "array":
            return [value(draw, draw.choice(KINDS), depth - 1) for _ in range(draw.randrange(3))] if depth else []
    names = draw.sample(["a", "b c", "é", "<x>", ""], k=draw.randrange(3)) if depth else []
    return {name: value(draw, draw.choice(KINDS), depth - 1) for name in names}


KINDS = sorted(typed.ANY)


def schema(draw: random.Random, kind: str) -> dict[str, Any]:
    return draw.choice(
        [
            {"type": kind},
            {"anyOf": [{"type": kind}]},
            {"type": [kind]},
            {"$ref": f"#/$defs/{kind}"},
            *([{"type": kind, "nullable": True}] if kind != "string" else []),
        ]
    )


@pytest.mark.parametrize(("name", "source"), WRITTEN)
@pytest.mark.histories
def test_random_calls_that_a_template_writes_are_read_back_equal(name: str, source: str):
    draw = random.Random(source)
    for _ in range(among(40, 80, 200)):
        calls, schemas, asked = [], {}, []
        for number in range(draw.randrange(1, 4)):
            keys = draw.sample([*string.ascii_lowercase, "a_key", "key-2", "Ключ"], k=draw.randrange(5))
            kinds = {key: draw.choice(KINDS) for key in keys}
            parameters = {
                "type": "object",
                "$defs": {kind: {"type": kind} for kind in KINDS},
                "properties": {key: {"description": "", **schema(draw, kind)} for key, kind in kinds.items()},
                "required": [],
            }
            function = f"tool_{number}"
            schemas[function] = json.dumps(parameters).encode()
            calls.append((function, {key: value(draw, kind) for key, kind in kinds.items()}))
            plain = {"name": function, "description": "", "parameters": {"properties": {}, "required": []}}
            asked.append({"type": "function", "function": plain})
        written = [{"id": "call_1", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
        messages = [{"role": "user", "content": "\ufdd1"}, {"role": "assistant", "content": "", "tool_calls": written}]
        turn = template(source).render(messages, tools=asked, add_generation_prompt=False).rpartition("\ufdd1")[2]
        cut = draw.randrange(len(turn))
        found = read(Reading(calls=tools.SYNTAXES[name].start(Offered(schemas))), [turn[:cut], turn[cut:]])
        assert [(called, json.loads(arguments)) for called, arguments in found.calls] == calls, turn


def stated(draw: random.Random, depth: int = 3) -> tuple[dict[str, Any], Any]:
    """Return a schema that states all types, and a value without nulls, which the template leaves out."""
    kind = draw.choice(sorted(typed.ANY - {"null"}) if depth else ["string", "integer"])
    match kind:
        case "array":
            items, _ = stated(draw, depth - 1)
            return {"type": "array", "items": items}, [of(draw, items) for _ in range(draw.randrange(3))]
        case "object":
            members = {key: stated(draw, depth - 1)[0] for key in draw.sample(["a", "item", "b c", "é"], k=3)}
            schema = {"type": "object", "properties": members}
            return schema, of(draw, schema)
    return {"type": kind}, value(draw, kind)


def of(draw: random.Random, schema: dict[str, Any]) -> Any:
    """Return a value of a schema of `stated`."""
    match schema["type"]:
        case "array":
            return [of(draw, schema["items"]) for _ in range(draw.randrange(3))]
        case "object":
            members = schema["properties"]
            return {key: of(draw, members[key]) for key in draw.sample(list(members), k=draw.randrange(4))}
    return value(draw, schema["type"])


def test_two_hundred_random_calls_with_nested_elements_are_read_back_equal():
    draw = random.Random(3)
    for _ in range(200):
        arguments, members = {}, {}
        for key in draw.sample(["a", "o", "item", "key-2", "Ключ"], k=draw.randrange(5)):
            members[key], arguments[key] = stated(draw)
        called = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": called}]
        turn = template("llama.cpp/MiniMax-M3").render(messages, add_generation_prompt=False).rpartition("ai\n")[2]
        offered = Offered({"f": json.dumps({"type": "object", "properties": members}).encode()})
        cut = draw.randrange(len(turn))
        found = read(Reading(calls=tools.SYNTAXES["minimax_m3"].start(offered)), [turn[:cut], turn[cut:]])
        assert [json.loads(each) for _, each in found.calls] == [arguments], turn


def test_the_beginning_of_a_long_text_is_emitted_before_its_end():
    reading = Reading(
        calls=tools.SYNTAXES["qwen3_coder"].start(
            Offered({"f": b'{"properties": {"u": {"type": ["string", "null"]}}}'})
        )
    )
    reading.feed("<tool_call>\n<function=f>\n<parameter=t>\none")
    first = reading.take()
    assert first is not None
    assert first.calls[0].arguments == '{"t": "one'
    reading.feed("\ntwo\n</parameter>\n<parameter=u>\nnu")
    second = reading.take()
    assert second is not None
    assert second.calls[0].arguments == r'\ntwo", "u": '
    reading.feed("ll, or")
    third = reading.take()
    assert third is not None
    assert third.calls[0].arguments == '"null, or'


@pytest.mark.parametrize(
    ("stated", "types"),
    [
        ({}, "string"),
        ({"type": "integer"}, "integer"),
        ({"type": "number"}, "integer number"),
        ({"type": ["null", "boolean"]}, "boolean null"),
        ({"type": "integer", "nullable": True}, "integer null"),
        ({"anyOf": [{"type": "array"}, {"$ref": "#/$defs/text"}]}, "array string"),
        ({"oneOf": [{"const": 1}, {"enum": ["a", None]}]}, "integer null number string"),
        ({"allOf": [{"type": ["array", "string"]}, {"type": ["array", "null"]}]}, "array"),
        ({"properties": {}}, "object"),
        ({"items": {"type": "string"}}, "array"),
        ({"$ref": "#/$defs/loop"}, "string"),
        ({"$ref": "https://example.com"}, "string"),
        ({"type": 7, "anyOf": "x", "enum": {}, "allOf": [1]}, "string"),
        (True, "string"),
    ],
)
def test_the_schema_states_the_types_of_a_value(stated: Any, types: str):
    definitions = {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    assert typed.types_of({"$defs": definitions, "properties": {"a": stated}}, "a") == frozenset(types.split())


def test_a_schema_of_alternatives_that_refer_to_each_other_has_any_type():
    again = {"anyOf": [{"$ref": "#/properties/a"}] * 16}
    found = typed.types_of({"properties": {"a": again}}, "a")  # 16 ** 8 visits without a limit
    assert found == typed.STRING
    assert typed.member({"properties": {"a": again}}, "b", {"properties": {"a": again}}) is None
    assert typed.element(again, {"properties": {"a": again}}) is None


def test_a_parameter_that_the_schema_does_not_name_has_the_type_of_additional_ones():
    assert typed.types_of({"additionalProperties": {"type": "integer"}}, "a") == {"integer"}
    assert typed.types_of({"additionalProperties": True}, "a") == {"string"}


@pytest.mark.parametrize(
    "text", ["[" * 10_000, "{" * 10_000, "(" * 5_000, "[1" + ",1" * 10_000, "[10**10**10]", "{1, 2}", "[open]"]
)
def test_text_that_is_no_document_stays_a_string(text: str):
    assert json.loads(typed.to_json(text, typed.ANY)) == text
