"""Wrong requests are refused with the name of the field, and queue nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.text.chat import ChatTemplate
from tests.http.pooling.asking import BODIES, USER, refused

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "a", "messages": [USER]}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[USER], []]}, "input[1]"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[5, USER]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [5000]}, "input"),
        ({"input": [[5], [5000]]}, "input[1]"),
        ({"input": [-1]}, "input[...]"),
        ({"input": "x " * 400}, "input"),
        ({"input": ["a", "x " * 400]}, "input[1]"),
        ({"input": [5] * 257}, "input"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 2**40}, "dimensions"),
        ({"input": "a", "prompt_name": "nonsense"}, "prompt_name"),
        ({"input": "a", "input_type": "nonsense"}, "input_type"),
        ({"input": "a", "input_type": "query", "prompt_name": "query"}, "input_type"),
        ({"input": [5], "prompt_name": "query"}, "prompt_name"),
        ({"messages": [USER], "input_type": "query"}, "input_type"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "up"}, "truncation_side"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype"),
        ({"input": "a", "cache_salt": "s" * 129}, "cache_salt"),
        ({"input": "a", "normalize": True, "use_activation": False}, None),
        ({"input": "a", "padding": "max_length"}, "padding"),
        ({"input": "\ud800"}, None),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
async def test_wrong_requests_are_refused_by_name_and_queue_nothing(
    endpoint: Endpoint, fields: dict[str, Any], param: str | None
):
    error = await refused(endpoint, "/v1/embeddings", fields)

    if param is not None and param != "input[...]":
        assert error["param"] == param, error
    assert error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "texts": ["b"]}, "documents"),
        ("/v2/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [{}]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "x " * 400]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("/v1/rerank", {"query": {"content": [{"type": "image_url"}]}, "documents": ["b"]}, "query.content[0].type"),
        ("/score", {"text_1": "a"}, "queries"),
        ("/score", {"text_1": "a", "documents": "b"}, "queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "find"}, "instruction"),
        ("/score", {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        ("/classify", {"input": "a", "task": "embed", "messages": [USER]}, "input"),
        ("/pooling", {"input": "a", "task": "plugin"}, "task"),
        ("/pooling", {"input": "a", "task": "classify", "dimensions": 1}, "dimensions"),
        ("/pooling", {"input": "a", "data": {"x": 1}}, "data"),
    ],
)
async def test_wrong_requests_for_scores_and_labels_are_refused(
    endpoint: Endpoint, path: str, fields: dict[str, Any], param: str
):
    assert (await refused(endpoint, path, fields))["param"] == param


async def test_two_ends_of_a_conversation_exclude_each_other(endpoint: Endpoint):
    both = {"continue_final_message": True, "add_generation_prompt": True}
    for path in ("/v1/embeddings", "/classify", "/pooling"):
        error = await refused(endpoint, path, {"messages": [USER], **both})
        assert error["param"] == "continue_final_message"
    for path in ("/score", "/rerank"):
        error = await refused(endpoint, path, {**BODIES[path], **both})
        assert error["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("generates", "path", "named", "unnamed"),
    [
        (False, "/v1/embeddings", "`input`", "/v1/completions"),
        (True, "/v1/chat/completions", "/v1/completions", "`input`"),
    ],
)
async def test_a_conversation_without_a_chat_template_is_refused_with_what_the_model_can_do(
    endpoint: Endpoint, generates: bool, path: str, named: str, unnamed: str
):
    served = endpoint.server.served
    assert served is not None
    pools = () if generates else served.pools
    endpoint.server.served = msgspec.structs.replace(
        served, template=ChatTemplate({}), generates=generates, pools=pools
    )
    error = await refused(endpoint, path, {"messages": [USER]})

    assert error["param"] == "messages"
    assert named in error["message"]
    assert unnamed not in error["message"]
