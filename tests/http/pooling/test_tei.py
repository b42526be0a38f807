"""The forms of text-embeddings-inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.http.pooling.asking import ids, settings, state

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint


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


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize(
    ("texts", "named"),
    [([], "texts"), (["x " * 400], "truncate"), (["a"] * 2049, "at most 2048")],
)
async def test_a_request_to_rerank_texts_is_refused_in_text_embeddings_inferences_form(
    endpoint: Endpoint, path: str, texts: list[str], named: str
):
    status, body = await endpoint.post(path, {"query": "a", "texts": texts})

    assert (status, body.keys(), body["error_type"]) == (400, {"error", "error_type"}, "Validation")
    assert named in body["error"]


async def test_a_body_that_cannot_be_decoded_is_refused_in_the_form_of_the_path(endpoint: Endpoint):
    for body in (b'{"query": "a", "texts": ["b"', {"query": "a", "texts": [1]}):
        status, answer = await endpoint.post("/rerank", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
