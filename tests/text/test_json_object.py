"""Any text becomes one JSON object; a JSON object stays as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infd.text.json_object import JsonObject, json_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)
NOISE = st.text(st.sampled_from('{}[]",:\\u0d8Da1-.eE+tfn \n\té\U0001f389'), max_size=40)


def fed(text: str, size: int) -> str:
    """Feed a text in parts, and check that every prefix can be completed."""
    whole, emitted = JsonObject(), ""
    for start in range(0, len(text), size):
        emitted += whole.feed(text[start : start + size])
    return emitted + whole.finish()


@given(value=OBJECTS, ascii=st.booleans(), size=st.integers(1, 9), indent=st.sampled_from([None, 1]))
def test_an_object_stays_the_same(value: dict[str, Any], ascii: bool, size: int, indent: int | None):
    if ascii and any(0xD800 <= ord(c) <= 0xDFFF or ord(c) > 0xFFFF for key in value for c in key):
        ascii = False  # an escaped pair in a key ends the object
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)

    if not ascii or "\\ud" not in text:
        assert json.loads(fed(text, size)) == value
    assert isinstance(json.loads(fed(text, size)), dict)


@given(value=OBJECTS, noise=NOISE, cut=st.integers(0, 200), size=st.integers(1, 9))
def test_any_text_becomes_an_object_however_it_arrives(value: dict[str, Any], noise: str, cut: int, size: int):
    text = json.dumps(value, ensure_ascii=False)[:cut] + noise

    assert fed(text, size) == json_object(text)
    assert isinstance(json.loads(json_object(text)), dict)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "{}"),
        ("[1]", "{}"),
        ('{"a": 1', '{"a": 1}'),
        ('{"a": tru', '{"a": null}'),
        ('{"a": "x\ny', '{"a": "x\\ny"}'),
        ('{"a": [1, 2,', '{"a": [1,2]}'),
        ('{"a": 1} more', '{"a": 1}'),
        ('{"a": 1, b: 2}', '{"a": 1}'),
        ('{"a": "\\ud83c\\udf89"}', '{"a": "\\ud83c\\udf89"}'),
        ('{"a": "\\ud83c"}', '{"a": ""}'),
        ('{"a": 1e999}', '{"a": null}'),
        ('{"a": ' + "9" * 400, '{"a": null}'),
    ],
)
def test_malformed_parts_of_an_object_are_dropped(text: str, expected: str):
    assert json_object(text) == expected


def test_strings_are_emitted_as_they_arrive():
    parts = JsonObject()

    assert [parts.feed(part) for part in ('{"ci', 'ty":', ' "Par', "is", '"', "}")] == [
        "{",
        "",
        '"city": "Par',
        "is",
        '"',
        "}",
    ]
