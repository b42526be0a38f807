"""Labels, scores of pairs and ordered documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from infd.http.pooling.scoring import MEASURES
from infd.text.chat import ChatTemplate
from tests.http.model import template, tokenizer
from tests.http.pooling.asking import ids, refused, settings, state

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint


async def test_labels_are_named(endpoint: Endpoint):
    status, body = await endpoint.post("/classify", {"input": ["a", "b c"]})

    assert status == 200
    assert body["data"] == [
        {"index": number, "label": "likely", "probs": state(text, "classify"), "num_classes": 1}
        for number, text in enumerate(("a", "b c"))
    ]


async def test_a_cross_encoder_reads_pairs(endpoint: Endpoint):
    ab, ac = state(ids("a") + ids("b"), "classify"), state(ids("a") + ids("c c"), "classify")
    for fields in (
        {"text_1": "a", "text_2": ["b", "c c"]},
        {"queries": ["a"], "documents": [{"text": "b"}, {"content": [{"type": "text", "text": "c c"}]}]},
        {"queries": ["a", "a"], "items": ["b", "c c"]},
        {"data_1": "a", "data_2": ["b", "c c"]},
    ):
        status, body = await endpoint.post("/score", fields)
        assert status == 200, body
        assert body["data"] == [
            {"index": 0, "object": "score", "score": ab[0]},
            {"index": 1, "object": "score", "score": ac[0]},
        ]
        assert body["usage"]["total_tokens"] == len(ids("a")) * 2 + len(ids("b")) + len(ids("c c"))


def pair_prompt(query: str, document: str, *, opened: bool = True) -> list[int]:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    rendered = template().render(messages, add_generation_prompt=opened)
    return tokenizer().encode(rendered, add_special_tokens=False)


async def test_a_reranker_that_reads_logits_of_tokens_is_asked_through_its_template(endpoint: Endpoint):
    settings(endpoint, label_tokens=(5, 6), pairs=True)
    expected = [state(pair_prompt("a", text), "classify")[0] for text in ("b", "c c")]
    status, body = await endpoint.post("/score", {"text_1": "a", "text_2": ["b", "c c"]})
    assert status == 200, body
    assert [each["score"] for each in body["data"]] == expected
    status, body = await endpoint.post("/rerank", {"query": "a", "documents": ["b"], "add_generation_prompt": False})
    assert body["results"][0]["relevance_score"] == state(pair_prompt("a", "b", opened=False), "classify")[0]
    thinks = {"chat_template_kwargs": {"enable_thinking": False}}
    status, body = await endpoint.post("/score", {"text_1": "a", "text_2": "b", "instruction": "find", **thinks})
    silent = tokenizer().encode("<think></think>", add_special_tokens=False)
    assert body["data"][0]["score"] == state([*pair_prompt("a", "b"), *silent], "classify")[0]


async def test_what_a_template_of_pairs_cannot_do_is_refused(endpoint: Endpoint):
    settings(endpoint, label_tokens=(5, 6), pairs=True)
    for field in ("truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc"):
        error = await refused(endpoint, "/score", {"text_1": "a", "text_2": "b", field: 3})
        assert error["param"] == field
    assert "/rerank or /score" in str(await refused(endpoint, "/predict", {"inputs": ["a", "b"]}))


async def test_a_template_without_the_roles_of_pairs_is_named(endpoint: Endpoint):
    settings(endpoint, label_tokens=(5, 6), pairs=True)
    served = endpoint.server.served
    assert served is not None
    only_users = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    endpoint.server.served = msgspec.structs.replace(served, template=ChatTemplate({"default": only_users}))
    error = await refused(endpoint, "/score", {"text_1": "a", "text_2": "b"})
    assert "--chat-template" in error["message"]


async def test_a_missing_template_of_pairs_is_named(endpoint: Endpoint):
    settings(endpoint, label_tokens=(5, 6), pairs=True)
    served = endpoint.server.served
    assert served is not None
    endpoint.server.served = msgspec.structs.replace(served, template=ChatTemplate({}))
    error = await refused(endpoint, "/score", {"text_1": "a", "text_2": "b"})
    assert "has no chat template" in error["message"]
    assert "--chat-template" in error["message"]
    assert "`input`" not in error["message"]


async def test_other_models_compare_embeddings(endpoint: Endpoint):
    pairs = {"text_1": "ab", "text_2": ["cd ef", "ab"]}
    (query,), (other,) = state("ab"), state("cd ef")
    for similarity, expected in (
        ("cosine", [1.0, 1.0]),  # of one number
        ("dot", [query * other, query * query]),
        ("euclidean", [-abs(query - other), 0.0]),
        ("manhattan", [-abs(query - other), 0.0]),
    ):
        settings(endpoint, pairs=False, similarity=similarity)
        status, body = await endpoint.post("/v1/score", pairs)
        assert status == 200
        assert [each["score"] for each in body["data"]] == pytest.approx(expected)
        assert body["usage"]["prompt_tokens"] == 2 * len(ids("ab")) + len(ids("cd ef")), "the query is computed once"


def test_embeddings_are_compared_as_torch_compares_them():
    a, b = np.random.default_rng(1).normal(size=(2, 50))
    first, second = torch.from_numpy(a), torch.from_numpy(b)

    assert MEASURES["cosine"](a, b) == pytest.approx(torch.cosine_similarity(first, second, dim=0).item())
    assert MEASURES["dot"](a, b) == pytest.approx(torch.dot(first, second).item())
    assert MEASURES["euclidean"](a, b) == pytest.approx(-torch.dist(first, second).item())
    assert MEASURES["manhattan"](a, b) == pytest.approx(-torch.dist(first, second, p=1).item())
    assert MEASURES["cosine"](a, 0 * b) == 0.0


async def test_documents_are_ordered_in_the_form_of_the_api_that_names_them(endpoint: Endpoint):
    documents = ["b", "c c", "dd dd dd"]
    scored = [state(ids("a") + ids(text), "classify")[0] for text in documents]
    order = sorted(range(3), key=lambda index: -scored[index])

    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        fields = {"query": "a", "documents": documents, "top_n": 2}
        status, body = await endpoint.post(path, fields)
        assert status == 200
        assert body["results"] == [
            {"index": index, "relevance_score": scored[index], "document": {"text": documents[index]}}
            for index in order[:2]
        ]
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 0
        assert body["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        _, body = await endpoint.post(path, {**fields, "return_documents": False})
        assert "document" not in body["results"][0]
        _, body = await endpoint.post(path, {"query": "a", "texts": documents})
        assert body == [{"index": index, "score": scored[index]} for index in order]
        _, body = await endpoint.post(path, {"query": "a", "texts": documents, "top_n": 2})
        assert [each["index"] for each in body] == order[:2]
        _, body = await endpoint.post(path, {"query": "a", "texts": documents, "return_text": True, "top_n": 0})
        assert [each["text"] for each in body] == [documents[index] for index in order]
