"""Numbers for each token: /pooling by token, and the sparse vectors of /embed_sparse."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING

from infd.pooling import Dense
from tests.http.model import tokenizer
from tests.http.pooling.asking import ids, refused, settings, state

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint


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


async def test_a_model_that_judges_steps_returns_the_labels_of_the_tokens_that_end_them(endpoint: Endpoint):
    settings(endpoint, step_token=9, labels=("good",))
    prompts = [[5, 9, 6, 7, 9], [9], [5, 6]]

    status, body = await endpoint.post("/pooling", {"input": prompts, "task": "token_classify"})

    labels = [state(prompt, "token_classify") for prompt in prompts]
    assert status == 200, body
    assert [each["data"] for each in body["data"]] == [[[labels[0][1]], [labels[0][4]]], [[labels[1][0]]], []]
    assert (await endpoint.post("/pooling", {"input": [5, 6], "task": "token_embed"}))[1]["data"][0]["data"] != []
    status, body = await endpoint.post("/embed_sparse", {"inputs": [5, 9]})
    assert (status, "labels, not weights" in body["error"]) == (400, True)


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


async def test_numbers_of_a_layer_for_tokens_are_counted_by_its_outputs(endpoint: Endpoint):
    settings(endpoint, dimensions=8, token_dense=Dense(name="x", inputs=8, outputs=3, bias=True, activation="none"))
    for task, most in (("token_embed", 3), ("embed", 8)):
        assert (await endpoint.post("/pooling", {"input": "a", "task": task, "dimensions": most}))[0] == 200
        error = await refused(endpoint, "/pooling", {"input": "a", "task": task, "dimensions": most + 1})
        assert f"at most {most}," in error["message"]


async def test_weights_of_texts_after_a_prompt_that_is_left_out(endpoint: Endpoint):
    settings(endpoint, default_prompt="query", include_prompt=False)
    _, body = await endpoint.post("/embed_sparse", {"inputs": "ab"})
    text = ids("ab")
    expected = state("find ab", "token_classify", skip=len(ids("find ")))
    assert body == [[{"index": index, "value": value} for index, value in zip(text, expected, strict=True)]]
