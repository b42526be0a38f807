"""The fields of a request reach the model, whichever API names them."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tokenizers import processors

from infd.config import Config, QuotasConfig
from infd.http.auth import Keys
from infd.request import Pool, pick
from tests.fakes import FakeExecutor, capacity
from tests.http.endpoint import serving
from tests.http.model import make_tokenizer, template, tokenizer
from tests.http.pooling.asking import BODIES, USER, ids, settings, state
from tests.http.test_streaming import until

if TYPE_CHECKING:
    from infd.scheduler.plan import Join
    from tests.http.endpoint import Endpoint

LONG = " ".join(["xyz"] * 200)  # more tokens than the model reads


async def joins(endpoint: Endpoint, path: str, fields: dict[str, Any]) -> list[Join]:
    """Post a body that is answered with 200; return what the executor was told of its prompts."""
    before = len(endpoint.executor.issued)
    status, body = await endpoint.post(path, {**BODIES[path], **fields})
    assert status == 200, body
    return [join for step in endpoint.executor.issued[before:] for join in step.plan.joins]


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/embeddings", {}, Pool("embed")),
        ("/v1/embeddings", {"normalize": False, "dimensions": 3}, Pool("embed", 3, normalize=False, activation=False)),
        ("/v1/embeddings", {"use_activation": True}, Pool("embed", normalize=True, activation=True)),
        ("/pooling", {"task": "token_embed", "dimensions": 3}, Pool("token_embed", 3)),
        (
            "/pooling",
            {"task": "classify", "use_activation": False},
            Pool("classify", normalize=False, activation=False),
        ),
        ("/classify", {}, Pool("classify")),
        ("/classify", {"use_activation": False}, Pool("classify", activation=False)),
        ("/score", {}, Pool("classify")),
        ("/score", {"use_activation": False}, Pool("classify", activation=False)),
        ("/v2/rerank", {}, Pool("classify")),
        ("/v2/rerank", {"raw_scores": True}, Pool("classify", activation=False)),
        ("/rerank", {"use_activation": False}, Pool("classify", activation=False)),
        ("/embed", {}, Pool("embed", normalize=True)),
        ("/embed", {"normalize": False, "dimensions": 3}, Pool("embed", 3, normalize=False)),
        ("/embed_all", {}, Pool("token_embed", normalize=False)),
        ("/embed_sparse", {}, Pool("token_classify")),
        ("/predict", {}, Pool("classify")),
        ("/predict", {"raw_scores": True}, Pool("classify", activation=False)),
        ("/predict", {"inputs": ["a", "b"]}, Pool("classify")),
    ],
)
async def test_what_is_computed_is_what_is_asked_for(
    endpoint: Endpoint, path: str, fields: dict[str, Any], expected: Pool
):
    settings(endpoint, dimensions=8)
    (join,) = await joins(endpoint, path, fields)
    assert join.wants == (expected,)


BEGIN, END = ids("<|im_start|>")[0], ids("<|im_end|>")[0]


def framed() -> processors.PostProcessor:
    """Enclose texts and pairs in BEGIN and END."""
    special = [("<|im_start|>", BEGIN), ("<|im_end|>", END)]
    single, pair = "<|im_start|> $A <|im_end|>", "<|im_start|> $A $B:1 <|im_end|>:1"
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


async def test_special_tokens_are_left_out_on_request(endpoint: Endpoint):
    served = endpoint.server.service.model()
    endpoint.server.served = msgspec.structs.replace(served, tokenizer=make_tokenizer(framed()))

    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank"):
        pair = path in ("/score", "/rerank")
        bare = [*ids("a"), *ids("b")] if pair else ids("a b")
        for fields, tokens in (({}, [BEGIN, *bare, END]), ({"add_special_tokens": False}, bare)):
            (join,) = await joins(endpoint, path, fields)
            pool = pick(Pool, join.wants)
            assert pool is not None
            assert (join.tokens, pool.second) == (tokens, tokens.index(bare[-1]) if pair else None), path


async def test_a_prompt_that_is_left_out_includes_the_token_that_begins_texts(endpoint: Endpoint):
    served = endpoint.server.service.model()
    endpoint.server.served = msgspec.structs.replace(served, tokenizer=make_tokenizer(framed()))
    settings(endpoint, include_prompt=False)

    (join,) = await joins(endpoint, "/v1/embeddings", {"prompt_name": "query"})
    assert join.wants == (Pool("embed", skip=1 + len(ids("find "))),), "not the one that ends the prompt alone"


async def test_conversations_end_as_the_request_says_and_variables_reach_the_template(endpoint: Endpoint):
    answered = [USER, {"role": "assistant", "content": "I am"}]
    rendered = template().render(answered, add_generation_prompt=False)
    opened = rendered.removesuffix("<|im_end|>\n")
    silent = template().render([USER]) + "<think></think>"

    for path in ("/v1/embeddings", "/pooling", "/classify"):
        for fields, expected in (
            ({"messages": answered}, rendered),
            ({"messages": answered, "continue_final_message": True}, opened),
            (
                {
                    "messages": [USER],
                    "add_generation_prompt": True,
                    "chat_template_kwargs": {"enable_thinking": False},
                },
                silent,
            ),
        ):
            (join,) = await joins(endpoint, path, {"input": None, **fields})
            assert join.tokens == tokenizer().encode(expected, add_special_tokens=False), (path, fields)


async def test_texts_to_compare_are_cut_where_their_api_says(endpoint: Endpoint):
    whole, most = ids(LONG), endpoint.server.service.model().most_input_tokens
    for path, fields, kept in (
        ("/rerank", {"documents": [LONG], "truncate": True}, [*ids("a"), *whole][:most]),
        ("/rerank", {"documents": [LONG], "truncate_prompt_tokens": 5}, [*ids("a"), *whole][:5]),
        ("/rerank", {"documents": ["bcd"], "max_tokens_per_doc": 1}, [*ids("a"), *ids("bcd")[:1]]),
        ("/rerank", {"documents": [LONG], "truncate": True, "truncate_prompt_tokens": 7}, [*ids("a"), *whole][:7]),
    ):
        (join,) = await joins(endpoint, path, fields)
        assert join.tokens == kept, fields
    settings(endpoint, pairs=False, prompts={"find": "xyz "})
    sentences = {"source_sentence": LONG, "sentences": ["b"]}
    refusal = await endpoint.post("/similarity", {"inputs": sentences})
    assert (refusal[0], "truncate" in refusal[1]["error"]) == (400, True)
    for direction, kept in (("Left", whole[-most:]), ("Right", whole[:most])):
        parameters = {"truncate": True, "truncation_direction": direction}
        cut = {"documents": [LONG], "truncate": True, "truncation_direction": direction}
        for short, path, body in (
            ("b", "/similarity", {"inputs": sentences, "parameters": parameters}),
            ("a", "/rerank", cut),
        ):
            found = await joins(endpoint, path, body)
            assert sorted((join.tokens for join in found), key=len) == [ids(short), kept], (path, direction)
    found = await joins(endpoint, "/similarity", {"parameters": {"prompt_name": "find"}})
    assert [join.tokens for join in found] == [ids("xyz a"), ids("xyz b")]


async def test_a_prompt_for_embeddings_is_refused_where_pairs_are_read(endpoint: Endpoint):
    body = {**BODIES["/similarity"], "parameters": {"prompt_name": "query"}}
    status, answer = await endpoint.post("/similarity", body)
    assert (status, "this model reads pairs" in answer["error"]) == (400, True)


async def test_an_adapters_name_selects_it(endpoint: Endpoint):
    endpoint.executor.files["/tuned"] = 1024, 1
    await endpoint.engine.adapters.load("tuned", "/tuned")
    endpoint.server.served = msgspec.structs.replace(endpoint.server.service.model(), adapters={"tuned": "/tuned"})
    for path in ("/v1/embeddings", "/classify", "/score", "/v2/rerank", "/embed", "/similarity"):
        for name, adapted in (("tuned", True), ("alias", False)):
            assert {join.slot > 0 for join in await joins(endpoint, path, {"model": name})} == {adapted}, path
    _, body = await endpoint.post("/v1/embeddings", {"input": "a", "model": "tuned"})
    assert body["model"] == "tuned"
    assert body["data"][0]["embedding"] != state("a")
    status, body = await endpoint.post("/v1/embeddings", {"input": "a", "model": "none"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_prefixes_are_shared_within_a_salt_and_a_key():
    keys = Keys.parse("\n".join(f"{name}:{sha256(name.encode()).hexdigest()}" for name in ("ann", "bob")), "keys")
    executor = FakeExecutor(capacity(pages=512, rows=16, step_tokens=64, max_model_len=256, pools_last=True))
    async with serving(keys=keys, executor=executor) as endpoint:

        async def hits(key: str, **fields: Any) -> int:
            before = endpoint.engine.core.scheduler.prefix_hits
            body = {"input": [5] * 40, **fields}
            assert (await endpoint.post("/v1/embeddings", body, Authorization=f"Bearer {key}"))[0] == 200
            return endpoint.engine.core.scheduler.prefix_hits - before

        found = [await hits("ann") for _ in range(2)]
        assert found[0] == 0 < found[1]
        assert await hits("ann", cache_salt="a") == 0
        assert await hits("ann", cache_salt="b") == 0
        assert await hits("ann", cache_salt="a") == found[1]
        assert await hits("bob") == 0


async def test_a_priority_is_that_of_every_input():
    executor = FakeExecutor(capacity(pages=512, rows=1, max_model_len=256))
    executor.gate.clear()
    async with serving(executor=executor) as endpoint:
        first = asyncio.create_task(endpoint.complete(max_tokens=2))
        await until(lambda: endpoint.engine.status().running == 1)
        asked = [
            asyncio.create_task(endpoint.post(path, {**BODIES[path], "priority": priority}))
            for path, priority in (("/v1/embeddings", 7), ("/classify", -2), ("/rerank", 3))
        ]
        await until(lambda: endpoint.engine.status().waiting == 3)
        assert sorted(row.priority for row in endpoint.engine.requests()) == [-2, 0, 3, 7]
        executor.gate.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3
        await first


async def test_every_input_has_the_share_of_its_keys_tenant():
    keys = Keys.parse(f"ann:{sha256(b'ann').hexdigest()}:team", "keys")
    async with serving(Config(quotas=QuotasConfig(tenants={"team": "share=3"})), keys=keys) as endpoint:
        endpoint.executor.gate.clear()
        body = {"input": ["a", "b"]}
        asked = asyncio.create_task(endpoint.post("/v1/embeddings", body, Authorization="Bearer ann"))
        scheduler = endpoint.engine.core.scheduler
        await until(lambda: len(scheduler.running) == 2)
        assert [(seq.request.tenant, seq.request.share) for seq in scheduler.running] == [("team", 3.0)] * 2
        endpoint.executor.gate.set()
        assert (await asked)[0] == 200


async def test_an_operator_ends_a_request_that_waits_for_its_numbers(endpoint: Endpoint):
    endpoint.executor.gate.clear()
    for path in ("/v1/embeddings", "/rerank", "/embed"):
        asked = asyncio.create_task(endpoint.post(path, BODIES[path]))
        await until(lambda: bool(endpoint.engine.requests()))
        assert endpoint.engine.abort(endpoint.engine.requests()[0].id)
        status, body = await asked
        assert (status, "an operator aborted this request" in json.dumps(body)) == (503, True), path
        await until(lambda: not endpoint.engine.requests())
    endpoint.executor.gate.set()
    assert (await endpoint.post("/v1/embeddings", {"input": "a"}))[0] == 200


async def test_the_description_of_the_model_has_its_limits_and_its_kind(endpoint: Endpoint):
    async def info() -> Any:
        async with endpoint.session.get("/info") as response:
            assert response.status == 200
            return json.loads(await response.read())

    found = await info()
    assert found["model_type"] == {"embedding": {"pooling": "mean"}}
    assert found["max_input_length"] == 256
    assert found["max_client_batch_size"] == 2048
    assert not found["auto_truncate"]
    served = endpoint.server.service.model()
    for pairs, kind in ((True, "reranker"), (False, "classifier")):
        pooling = msgspec.structs.replace(served.pooling, pairs=pairs, max_tokens=40)
        endpoint.server.served = msgspec.structs.replace(served, pools=("classify",), pooling=pooling)
        found = await info()
        assert found["model_type"] == {kind: {"id2label": {"0": "likely"}, "label2id": {"likely": 0}}}
        assert found["max_input_length"] == 40
