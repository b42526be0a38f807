from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infd.errors import InvalidRequest, shorten
from infd.http.json_body import decode, exceeds_depth
from infd.http.schema.chat import ChatRequest
from infd.http.schema.completions import CompletionRequest

CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a[]{}"\\é\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='[]{}"\\'), inner),
    max_leaves=30,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(JSON)
def test_depth_is_counted_as_a_parser_would(value: Any):
    data = json.dumps(value, ensure_ascii=False).encode()

    limits = range(depth(value) + 2)

    assert [exceeds_depth(data, limit) for limit in limits] == [depth(value) > limit for limit in limits]


@pytest.mark.parametrize("data", [b'"' + b"[" * 1000, b'"\\', b"]" * 500 + b"[" * 3, b'["' + b"\\" * 999 + b'"'])
def test_a_broken_body_is_counted_without_trouble(data: bytes):
    assert not exceeds_depth(data, 100)


def test_a_body_nested_too_deep_is_refused_before_it_is_parsed():
    with pytest.raises(InvalidRequest, match="128 levels"):
        decode(b'{"messages":' + b"[" * 100_000, CHAT, 128)


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER] * 16385}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}] * 4097}]}, "messages[0].content"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER, USER, {"role": "user", "content": 3}]}, "messages[2].content"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "martian", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER], "temperature": 2.1}, "temperature"),
        ({"messages": [USER], "temperature": "warm"}, "temperature"),
        ({"messages": [USER], "top_p": 0}, "top_p"),
        ({"messages": [USER], "min_p": -0.1}, "min_p"),
        ({"messages": [USER], "n": 0}, "n"),
        ({"messages": [USER], "n": 1.5}, "n"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "presence_penalty": 3}, "presence_penalty"),
        ({"messages": [USER], "repetition_penalty": 0}, "repetition_penalty"),
        ({"messages": [USER], "logit_bias": {"5": 101}}, "logit_bias"),
        ({"messages": [USER], "logit_bias": {"-5": 1}}, "logit_bias.-5"),
        ({"messages": [USER], "logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"messages": [USER], "logit_bias": {"": 1, "5": 1}}, "logit_bias."),
        ({"messages": [USER], "logit_bias": {"5": 1, "9" * 5000: 1}}, f"logit_bias.{shorten('9' * 5000)}"),
        ({"messages": [USER], "stop": ["a", ""]}, "stop[1]"),
        ({"messages": [USER], "stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"messages": [USER], "request_id": "a\n"}, "request_id"),
        ({"messages": [USER], "request_id": "a\r\nSet-Cookie: b"}, "request_id"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": [USER], "chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ({"messages": [USER], "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(body: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps(body).encode(), CHAT, 128)

    assert caught.value.param == param


def test_a_wrong_key_before_malformed_json_is_malformed_json():
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        decode(b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"five": 1}, "n"}', CHAT, 128)

    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [USER, {"role": "martian"}]}, "messages[1].role: .*'martian'; there are assistant, .*user"),
        (
            {"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "some"}},
            "chat_template_kwargs.reasoning_effort: .*'some'; there are .*high, low, max",
        ),
    ],
)
def test_an_enumerated_field_lists_its_values(body: dict[str, Any], says: str):
    with pytest.raises(InvalidRequest, match=says.replace("[1]", r"\[1\]")):
        decode(json.dumps(body).encode(), CHAT, 128)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (5, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([1, -2], "prompt[1]"),
        ([[1], [2, -3]], "prompt[1][1]"),
        ([1.5], "prompt[0]"),
    ],
)
def test_a_wrong_prompt_is_named_by_its_path(prompt: Any, param: str):
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps({"prompt": prompt}).encode(), COMPLETION, 128)

    assert caught.value.param == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"messages": [{"role": "user", "content": "hi"}],}',
        b'{"messages": [{"role": "user", "content": "hi"}]} trailing',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    ],
)
def test_a_body_that_is_not_json_is_refused(data: bytes):
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        decode(data, CHAT, 128)


def test_an_infinite_number_is_refused():
    with pytest.raises(InvalidRequest):
        decode(b'{"messages": [{"role": "user", "content": "hi"}], "top_p": 1e999}', CHAT, 128)


def test_unknown_fields_are_accepted():
    assert decode(json.dumps({"messages": [USER], "fancy": {"a": [1]}}).encode(), CHAT, 128).messages[0].content == "hi"
