"""From inputs to token ids: prompts by name, instructions, cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tests.http.pooling.asking import embed, ids, refused, settings, state

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint


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


async def test_a_text_that_is_certainly_too_long_is_not_encoded(endpoint: Endpoint):
    served = endpoint.server.served
    assert served is not None
    endpoint.server.served = msgspec.structs.replace(served, generates=False)  # its bodies are larger

    error = await refused(endpoint, "/v1/embeddings", {"input": ["a", "x" * (2**20 + 1)], "truncate_prompt_tokens": 5})

    assert error["param"] == "input[1]"
    assert error["code"] == "context_length_exceeded"
