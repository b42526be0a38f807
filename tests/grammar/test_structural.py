"""Structural tags: free text in which triggers open constrained blocks."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from infd.constraint import StructuralTag
from infd.errors import GrammarFailed
from infd.grammar.protocol import Limits
from tests.grammar import engines, vocabularies

if TYPE_CHECKING:
    from infd.grammar.protocol import Compiler

pytestmark = pytest.mark.usefixtures("engine")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRUCTURES = {
    "structures": [
        {"begin": "<f=weather>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=count>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def tag(begin: str, content: dict[str, Any], end: str = ">") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


NUMBER = {"type": "regex", "pattern": "[0-9]+"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [tag("<a:", NUMBER), tag("<b", NUMBER, "")]}


@engines.each
def compiler() -> Compiler:
    return engines.compiler(vocabularies.byte_level(7))


def accepted(description: dict[str, Any], text: str) -> bool:
    matcher = compiler().compile(StructuralTag(json.dumps(description)), Limits()).matcher()
    tokens = vocabularies.split(compiler().vocabulary, text.encode(), random.Random(3))
    if matcher.validate(tokens) < len(tokens):
        return False
    matcher.advance(tokens)
    return matcher.accepting


@pytest.mark.parametrize(
    ("description", "text", "expected"),
    [
        (STRUCTURES, "", True),
        (STRUCTURES, "no call, 1 < 2, <g>", True),
        (STRUCTURES, 'a <f=weather>{"city": "Oslo"}</f> b <f=count>3</f>', True),
        (STRUCTURES, 'a <f=weather>{"city": 1}</f>', False),
        (STRUCTURES, "a <f=other>", False),
        (STRUCTURES, "a <f=", False),
        (STRUCTURES, "a <f=count>3", False),
        (STRUCTURES, "<f<f=count>3</f>", True),
        ({"format": TRIGGERED}, "x<a:1><b2 and <a:3>.", True),
        ({"format": TRIGGERED}, "x<a1>", False),
        ({"format": TRIGGERED | {"at_least_one": True}}, "x", False),
        ({"format": TRIGGERED | {"at_least_one": True}}, "x<a:1>", True),
        ({"format": TRIGGERED | {"at_least_one": True, "stop_after_first": True}}, "x<a:1>", True),
        ({"format": TRIGGERED | {"at_least_one": True, "stop_after_first": True}}, "x<a:1>y", False),
        (
            {"format": {"type": "sequence", "elements": [NUMBER, {"type": "const_string", "value": "é\n"}]}},
            "12é\n",
            True,
        ),
        ({"format": {"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "no"}]}}, "no", True),
        ({"format": {"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "no"}]}}, "12no", False),
        ({"format": tag("[", {"type": "json_schema", "json_schema": CITY}, "]")}, '[{"city":"x"}]', True),
    ],
    ids=str,
)
def test_text_is_free_until_a_trigger_and_then_one_of_its_tags(description: dict[str, Any], text: str, expected: bool):
    assert accepted(description, text) is expected


@pytest.mark.parametrize(
    ("description", "message", "code"),
    [
        ([], "is an object", "invalid_grammar"),
        ({}, "format is an object", "invalid_grammar"),
        ({"format": {"type": "any_text"}}, "any_text", "unsupported_grammar"),
        (
            {"format": tag("<", {"type": "grammar", "grammar": ""})},
            "format.content: the type grammar",
            "unsupported_grammar",
        ),
        ({"structures": [], "triggers": ["<"]}, "no tag begins", "invalid_grammar"),
        (STRUCTURES | {"triggers": []}, "triggers is a list", "invalid_grammar"),
        (STRUCTURES | {"triggers": ["<f=w"]}, "begins with no trigger", "invalid_grammar"),
        (
            {"format": tag("<", {"type": "json_schema", "json_schema": {"not": {}}})},
            "the schema at #",
            "unsupported_grammar",
        ),
    ],
    ids=str,
)
def test_a_malformed_or_unknown_tag_is_refused_by_name(description: Any, message: str, code: str):
    with pytest.raises(GrammarFailed, match=message) as failed:
        compiler().compile(StructuralTag(json.dumps(description)), Limits())
    assert failed.value.code == code
