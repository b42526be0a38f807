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

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
WRITTEN = [(name, template) for name, family in FAMILIES.items() for template in family.templates]
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
def test_two_hundred_random_calls_that_a_template_writes_are_read_back_equal(name: str, source: str):
    draw = random.Random(source)
    for _ in range(200):
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


def test_a_parameter_that_the_schema_does_not_name_has_the_type_of_additional_ones():
    assert typed.types_of({"additionalProperties": {"type": "integer"}}, "a") == {"integer"}
    assert typed.types_of({"additionalProperties": True}, "a") == {"string"}


@pytest.mark.parametrize(
    "text", ["[" * 10_000, "{" * 10_000, "(" * 5_000, "[1" + ",1" * 10_000, "[10**10**10]", "{1, 2}", "[open]"]
)
def test_text_that_is_no_document_stays_a_string(text: str):
    assert json.loads(typed.to_json(text, typed.ANY)) == text
