"""The routes that reduce prompts to numbers, with a fake model whose numbers are known."""

from __future__ import annotations

import base64
import json
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from infd.config import Config, LimitsConfig, SchedulerConfig
from infd.http.app import POOLING_APIS
from infd.http.pooling.scoring import MEASURES
from infd.pooling import Dense, PoolingSettings
from infd.request import Pool
from infd.text.chat import ChatTemplate
from tests import fakes
from tests.http.endpoint import serving
from tests.http.model import MODEL, PROMPTS, chat_prompt, template, tokenizer
from tests.http.test_connections import connect, said

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.http.endpoint import Endpoint

USER = {"role": "user", "content": "hi"}
TASKS = ("embed", "classify", "token_embed", "token_classify")
# Each route, with a body that it answers.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a b"},
    "/embeddings": {"input": "a b"},
    "/pooling": {"input": "a b"},
    "/classify": {"input": "a b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"queries": ["a"], "items": ["b", "c"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/embed": {"inputs": "a"},
    "/embed_all": {"inputs": "a"},
    "/embed_sparse": {"inputs": "a"},
    "/predict": {"inputs": "a"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
}
OPENAI = [path for path, body in BODIES.items() if "inputs" not in body]
TEI = [path for path in BODIES if path not in OPENAI]


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def state(prompt: list[int] | str, task: Any = "embed", skip: int = 0) -> list[float]:
    """Return the numbers to which the fake model reduces a prompt."""
    known = ids(prompt) if isinstance(prompt, str) else prompt
    pooled = fakes.pooled(Pool(task, skip=skip), known, fakes.capacity())
    return list(struct.unpack(f"<{len(pooled.values) // 4}f", pooled.values))


def settings(endpoint: Endpoint, **changes: Any) -> None:
    """Change the pooling settings of the served model."""
    served = endpoint.server.served
    assert served is not None
    pooling = msgspec.structs.replace(served.pooling, **changes)
    endpoint.server.served = msgspec.structs.replace(served, pooling=pooling)


async def embed(endpoint: Endpoint, given: Any, **fields: Any) -> list[list[float]]:
    name = "messages" if "messages" in fields else "input"
    fields = fields if "messages" in fields else {**fields, name: given}
    status, body = await endpoint.post("/v1/embeddings", fields)
    assert status == 200, body
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    return [each["embedding"] for each in body["data"]]


async def refused(endpoint: Endpoint, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Post a body that is answered with 400, and queues nothing; return the error."""
    before = endpoint.engine.core.in_flight.accepted
    status, body = await endpoint.post(path, fields)
    assert status == 400, body
    assert endpoint.engine.core.in_flight.accepted == before
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture
async def small() -> AsyncIterator[Endpoint]:
    config = Config(limits=LimitsConfig(pooled_bytes=40), scheduler=SchedulerConfig(max_waiting=100))
    async with serving(config) as endpoint:
        yield endpoint


async def test_every_kind_of_input_is_embedded(endpoint: Endpoint):
    rendered = template().render([USER], add_generation_prompt=False)
    conversation = tokenizer().encode(rendered, add_special_tokens=False)

    assert await embed(endpoint, "a text") == [state("a text")]
    assert await embed(endpoint, ["one", "two"]) == [state("one"), state("two")]
    assert await embed(endpoint, [5, 6, 7]) == [state([5, 6, 7])]
    assert await embed(endpoint, [[5, 6], [7]]) == [state([5, 6]), state([7])]
    for given in ({"messages": [USER]}, {"messages": [[USER]]}):
        assert await embed(endpoint, None, **given) == [state(conversation)]
    assert await embed(endpoint, [USER]) == [state(conversation)]
    assert await embed(endpoint, [[USER], [USER, USER]]) == [
        state(conversation),
        state(tokenizer().encode(rendered * 2, add_special_tokens=False)),
    ]
    assert await embed(endpoint, None, messages=[USER], add_generation_prompt=True) == [state(chat_prompt("hi"))]


async def test_the_answer_has_openais_form(endpoint: Endpoint):
    status, body = await endpoint.post("/v1/embeddings", {"input": ["one", "two three"], "model": "alias", "user": "u"})

    tokens = len(ids("one")) + len(ids("two three"))
    assert status == 200
    assert body.pop("id").startswith("embd-")
    assert body.pop("created") > 0
    assert body == {
        "object": "list",
        "model": "alias",
        "data": [
            {"object": "embedding", "index": 0, "embedding": state("one")},
            {"object": "embedding", "index": 1, "embedding": state("two three")},
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


async def test_base64_has_the_bytes_of_the_numbers(endpoint: Endpoint):
    for fields, form in (
        ({}, "<f"),
        ({"endianness": "big"}, ">f"),
        ({"endianness": "native"}, "=f"),
        ({"embed_dtype": "float16"}, "<e"),
        ({"embed_dtype": "float16", "endianness": "big"}, ">e"),
    ):
        (found,) = await embed(endpoint, "a", encoding_format="base64", **fields)
        assert list(struct.unpack(form, base64.b64decode(found))) == state("a"), fields


async def test_tasks_by_token_have_a_list_for_each_token(endpoint: Endpoint):
    for task in ("token_embed", "token_classify"):
        status, body = await endpoint.post("/pooling", {"input": ["a b", "c"], "task": task})
        assert status == 200
        assert [each["data"] for each in body["data"]] == [[[n] for n in state(t, task)] for t in ("a b", "c")]
    _, body = await endpoint.post("/pooling", {"input": "a b", "task": "token_embed", "encoding_format": "base64"})
    encoded = base64.b64decode(body["data"][0]["data"])
    assert list(struct.unpack(f"<{len(encoded) // 4}f", encoded)) == state("a b", "token_embed")
    _, body = await endpoint.post("/pooling", {"input": "a b"})
    assert body["data"] == [{"object": "pooling", "index": 0, "data": state("a b")}], "the first task is embed"


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
        _, body = await endpoint.post(path, {"query": "a", "texts": documents, "return_text": True, "top_n": 0})
        assert [each["text"] for each in body] == [documents[index] for index in order]


async def test_text_embeddings_inferences_forms(endpoint: Endpoint):
    async def answer(path: str, inputs: Any, **fields: Any) -> Any:
        status, body = await endpoint.post(path, {"inputs": inputs, **fields})
        assert status == 200, body
        return body

    assert await answer("/embed", "a") == [state("a")]
    assert await answer("/embed", ["a", "b b"], normalize=False) == [state("a"), state("b b")]
    assert await answer("/embed", [[5, 6], [7]]) == [state([5, 6]), state([7])]
    assert await answer("/embed_all", ["a b"]) == [[[number] for number in state("a b", "token_embed")]]
    weights = dict(zip(ids("ab"), state("ab", "token_classify"), strict=True))
    assert await answer("/embed_sparse", "ab") == [
        [{"index": index, "value": value} for index, value in weights.items()]
    ]
    one, pair = state("a", "classify")[0], state(ids("a") + ids("b"), "classify")[0]
    assert await answer("/predict", "a") == [{"score": one, "label": "likely"}]
    assert await answer("/predict", ["a", "b"]) == [{"score": pair, "label": "likely"}]
    assert await answer("/predict", [["a"], ["a", "b"]]) == [
        [{"score": one, "label": "likely"}],
        [{"score": pair, "label": "likely"}],
    ]
    settings(endpoint, pairs=False, similarity="dot")
    assert await answer("/similarity", {"source_sentence": "a", "sentences": ["b", "a"]}) == [
        state("a")[0] * state("b")[0],
        state("a")[0] ** 2,
    ]


async def test_a_token_that_recurs_has_its_largest_weight_and_special_tokens_none(endpoint: Endpoint):
    special = tokenizer().id_of("<|im_end|>") or 0
    prompt = [5, 6, 5, special]

    _, body = await endpoint.post("/embed_sparse", {"inputs": prompt})

    first, second, third, _ = state(prompt, "token_classify")
    assert body == [[{"index": 5, "value": max(first, third)}, {"index": 6, "value": second}]]


async def test_tokens_that_begin_and_end_texts_have_no_weights_beside_layers_for_tokens(endpoint: Endpoint):
    layer = Dense(name="x", inputs=1, outputs=1, bias=True, activation="none")
    settings(endpoint, token_weight=layer, token_dense=layer, labels=())
    end = tokenizer().id_of("<|im_end|>") or 0
    prompt, texts = [5, 6, 5, end], [[5, 6, 5, end], [5, 6]]

    async def rows(task: str) -> list[list[list[float]]]:
        status, body = await endpoint.post("/pooling", {"input": texts, "task": task})
        assert status == 200, body
        return [each["data"] for each in body["data"]]

    assert await rows("token_classify") == [
        [[number] for number in state(each, "token_classify")[:3]] for each in (prompt, [5, 6])
    ]
    assert await rows("token_embed") == [[[number] for number in state(each, "token_embed")] for each in texts]
    _, body = await endpoint.post("/embed_sparse", {"inputs": prompt})
    first, second, third, _ = state(prompt, "token_classify")
    assert body == [[{"index": 5, "value": max(first, third)}, {"index": 6, "value": second}]]


async def test_weights_of_texts_after_a_prompt_that_is_left_out(endpoint: Endpoint):
    settings(endpoint, default_prompt="query", include_prompt=False)
    _, body = await endpoint.post("/embed_sparse", {"inputs": "ab"})
    text = ids("ab")
    expected = state("find ab", "token_classify", skip=len(ids("find ")))
    assert body == [[{"index": index, "value": value} for index, value in zip(text, expected, strict=True)]]


async def test_prompts_precede_texts_by_name(endpoint: Endpoint):
    for fields in ({"prompt_name": "query"}, {"input_type": "query"}, {"input_type": "search_query"}):
        assert await embed(endpoint, "a", **fields) == [state("find a")], fields
    assert await embed(endpoint, "a", input_type="passage") == [state("a")]
    settings(endpoint, default_prompt="query")
    assert await embed(endpoint, ["a"]) == [state("find a")]
    assert await embed(endpoint, "a", prompt_name="document") == [state("a")]
    assert await embed(endpoint, [5, 6]) == [state([5, 6])], "ids contain theirs"
    settings(endpoint, default_prompt="query", include_prompt=False)
    assert await embed(endpoint, "a") == [state("find a", skip=len(ids("find ")))]
    settings(endpoint, default_prompt=None, lower_case=True)
    assert await embed(endpoint, "A B") == [state("a b")]


async def test_the_mean_begins_after_the_mark_of_an_instruction(endpoint: Endpoint):
    settings(endpoint, text_mark="<e>\n")
    instructed = ids("do <e>\na b")

    assert await embed(endpoint, ["do <e>\na b", "<e>\na"]) == [
        state(instructed, skip=len(ids("do <e>\n"))),
        state("<e>\na", skip=len(ids("<e>\n"))),
    ]
    assert await embed(endpoint, instructed) == [state(instructed, skip=len(ids("do <e>\n")))]
    assert await embed(endpoint, "a") == [state("a")]
    assert await embed(endpoint, [1, *ids("a")]) == [state([1, *ids("a")], skip=1)]
    assert "at least one must remain" in (await refused(endpoint, "/v1/embeddings", {"input": "do <e>\n"}))["message"]


async def test_inputs_are_cut_at_either_end(endpoint: Endpoint):
    whole = ids("abcdefgh ijkl")
    for given in ("abcdefgh ijkl", whole):
        for fields, expected in (
            ({"truncate_prompt_tokens": 3}, whole[:3]),
            ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, whole[:3]),
            ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, whole[-3:]),
            ({"truncate_prompt_tokens": 999}, whole),
            ({"truncate_prompt_tokens": -1}, whole),
        ):
            assert await embed(endpoint, given, **fields) == [state(expected)], fields
    settings(endpoint, max_tokens=4)
    assert await embed(endpoint, "abcdefgh ijkl", truncate_prompt_tokens=-1) == [state(whole[:4])]
    _, body = await endpoint.post("/embed", {"inputs": whole, "truncate": True, "truncation_direction": "Left"})
    assert body == [state(whole[-4:])]
    _, body = await endpoint.post("/rerank", {"query": "ab", "texts": ["abcdefgh ijkl"], "truncate": True})
    assert body[0]["score"] == state([*ids("ab"), *whole][:4], "classify")[0]
    settings(endpoint, max_tokens=None)
    _, body = await endpoint.post("/score", {"text_1": whole_text(2), "text_2": "cc", "max_tokens_per_query": 1})
    assert body["data"][0]["score"] == state([*ids(whole_text(2))[:1], *ids("cc")], "classify")[0]


def whole_text(words: int) -> str:
    return " ".join(["xyz"] * words)


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
        ("/rerank", {"query": "a", "texts": []}, "texts"),
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


@pytest.mark.parametrize(
    ("path", "inputs", "named"),
    [
        ("/embed", "", "inputs is empty"),
        ("/embed", [], "inputs"),
        ("/embed", ["a", ""], "inputs[1] is empty"),
        ("/embed", ["a", 5], "not a mixture"),
        ("/embed", ["a"] * 2049, "at most 2048"),
        ("/embed", "x " * 400, "truncate: true"),
        ("/predict", ["a", "b", "c"], "one text or a pair"),
        ("/predict", ["a", ["b"]], "not a mixture"),
        ("/predict", [["a", "b", "c"]], "inputs"),
        ("/similarity", {"source_sentence": "a", "sentences": []}, "inputs.sentences"),
        ("/similarity", {"source_sentence": "", "sentences": ["a"]}, "inputs.source_sentence"),
        ("/similarity", {"source_sentence": "a", "sentences": ["a", ""]}, "inputs.sentences[1]"),
    ],
)
async def test_wrong_requests_are_refused_in_text_embeddings_inferences_form(
    endpoint: Endpoint, path: str, inputs: Any, named: str
):
    status, body = await endpoint.post(path, {"inputs": inputs})

    assert status == 400
    assert named in body["error"]
    assert body["error_type"] == "Validation"
    assert endpoint.engine.core.in_flight.accepted == 0


async def test_a_text_that_is_certainly_too_long_is_not_encoded(endpoint: Endpoint):
    served = endpoint.server.served
    assert served is not None
    endpoint.server.served = msgspec.structs.replace(served, generates=False)  # its bodies are larger

    error = await refused(endpoint, "/v1/embeddings", {"input": ["a", "x" * (2**20 + 1)], "truncate_prompt_tokens": 5})

    assert error["param"] == "input[1]"
    assert error["code"] == "context_length_exceeded"


async def test_two_ends_of_a_conversation_exclude_each_other(endpoint: Endpoint):
    both = {"continue_final_message": True, "add_generation_prompt": True}
    for path in ("/v1/embeddings", "/classify", "/pooling"):
        error = await refused(endpoint, path, {"messages": [USER], **both})
        assert error["param"] == "continue_final_message"
    for path in ("/score", "/rerank"):
        error = await refused(endpoint, path, {**BODIES[path], **both})
        assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_that_only_generates_says_which_model_would(endpoint: Endpoint, path: str):
    served = endpoint.server.served
    assert served is not None
    endpoint.server.served = msgspec.structs.replace(served, pools=(), pooling=PoolingSettings())

    status, body = await endpoint.post(path, BODIES[path])

    message = body["error"] if path in TEI else body["error"]["message"]
    assert status == 400
    assert MODEL in message
    assert "only generates text" in message
    assert endpoint.engine.core.in_flight.accepted == 0


async def test_a_model_without_the_task_says_what_it_serves(endpoint: Endpoint):
    served = endpoint.server.served
    assert served is not None
    needed = {
        "/classify": ("embed",),
        "/predict": ("embed",),
        "/v1/embeddings": ("classify",),
        "/embed": ("classify",),
        "/embed_all": ("embed",),
        "/embed_sparse": ("embed",),
        "/score": ("token_embed",),
        "/rerank": ("token_classify",),
        "/similarity": ("classify",),
    }
    for path, pools in needed.items():
        pooling = PoolingSettings(tasks=pools, dimensions=1, labels=("a", "b"))
        endpoint.server.served = msgspec.structs.replace(served, pools=pools, pooling=pooling)
        status, body = await endpoint.post(path, BODIES[path])
        assert status == 400, path
        assert f"it serves: generate, {pools[0]}" in json.dumps(body), (path, body)


async def test_a_model_that_only_pools_refuses_to_generate(endpoint: Endpoint):
    served = endpoint.server.served
    assert served is not None
    endpoint.server.served = msgspec.structs.replace(served, generates=False)
    for path, body in {
        "/v1/chat/completions": {"messages": [USER]},
        "/chat/completions": {"messages": [USER], "stream": True},
        "/v1/completions": {"prompt": "a"},
        "/v1/messages": {"messages": [USER], "max_tokens": 1},
        "/v1/responses": {"input": "a"},
        "/infill": {"input_prefix": "a", "input_suffix": "b"},
    }.items():
        status, answer = await endpoint.post(path, body)
        assert status == 400, (path, answer)
        assert "generates no text; it serves: embed, classify" in answer["error"]["message"]
    background = {"input": "a", "background": True}
    assert (await endpoint.post("/v1/responses", background))[0] == 400
    assert endpoint.engine.core.in_flight.accepted == 0


async def test_the_models_card_lists_its_tasks(endpoint: Endpoint):
    async with endpoint.session.get("/v1/models") as response:
        cards = (await response.json())["data"]

    assert cards[0]["tasks"] == ["generate", *TASKS, "score"]


async def test_an_answer_larger_than_the_limit_is_refused(small: Endpoint):
    assert len(await embed(small, ["a"] * 10)) == 10
    error = await refused(small, "/v1/embeddings", {"input": ["a"] * 11})
    assert "limits.pooled_bytes" in error["message"]
    assert error["param"] == "input"
    error = await refused(small, "/pooling", {"input": [5] * 11, "task": "token_embed"})
    assert "limits.pooled_bytes" in error["message"]
    error = await refused(small, "/v1/embeddings", {"input": ["a"] * 101})
    assert "scheduler.max_waiting" in error["message"]


async def test_a_large_answer_is_encoded_while_it_is_sent(endpoint: Endpoint):
    given = [[5 + number % 200, 6] for number in range(900)]

    async with endpoint.session.post("/v1/embeddings", json={"input": given}) as response:
        assert "Content-Length" not in response.headers
        body = await response.json()

    assert [each["embedding"] for each in body["data"]] == [state(prompt) for prompt in given]


async def test_a_large_answer_for_an_older_client_ends_with_its_connection(endpoint: Endpoint):
    given = [[5 + number % 200, 6] for number in range(900)]
    body = json.dumps({"input": given}).encode()
    sent = f"POST /v1/embeddings HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
    head, _, answer = (await said(await connect(endpoint, sent.encode() + body))).partition(b"\r\n\r\n")

    assert b"chunked" not in head
    assert len(json.loads(answer)["data"]) == len(given)


async def test_dimensions_are_those_for_which_the_model_was_trained(endpoint: Endpoint):
    settings(endpoint, dimensions=8, matryoshka=(2, 4))
    for wanted in (2, 4, 8):
        await embed(endpoint, "a", dimensions=wanted)
    error = await refused(endpoint, "/v1/embeddings", {"input": "a", "dimensions": 3})
    assert "one of 2, 4" in error["message"]


def test_every_route_is_tried():
    assert BODIES.keys() == POOLING_APIS.keys()
    assert PROMPTS["query"]
