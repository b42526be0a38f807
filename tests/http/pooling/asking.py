"""Ask the routes that reduce prompts to numbers, of a fake model whose numbers are known."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec

from infd.request import Pool
from tests import fakes
from tests.http.model import tokenizer

if TYPE_CHECKING:
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
