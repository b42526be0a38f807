"""What a model serves: its card, and the routes that it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from infd.http.app import POOLING_APIS
from infd.pooling import PoolingSettings
from tests.http.model import MODEL, PROMPTS
from tests.http.pooling.asking import BODIES, TASKS, TEI, USER

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint


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


async def test_a_model_without_the_task_names_the_tasks_that_it_serves(endpoint: Endpoint):
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


def test_every_route_is_tried():
    assert BODIES.keys() == POOLING_APIS.keys()
    assert PROMPTS["query"]
