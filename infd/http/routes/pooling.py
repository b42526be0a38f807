"""The routes that reduce prompts to numbers: decode an API's request, send its answer; and GET /info."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from infd.http import send
from infd.http.admission import guarded
from infd.http.body import read
from infd.http.pooling.pool import pool
from infd.http.schema.pooling import INPUTS
from infd.http.schema.tei import Info
from infd.version import __version__

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.apis.api import PoolingApi
    from infd.http.routing import Handler, Request
    from infd.http.served_model import ServedModel


def pooling(api: PoolingApi[Any]) -> Handler:
    """Return the handler of a route that reduces prompts to numbers."""

    async def answer(request: Request) -> web.StreamResponse:
        service, exchange = request.service, request.exchange
        body, size = await read(request, api.decoder)
        if api.form is not None:
            exchange.errors = api.form(body)
        asked = api.pooling(body, size, service.model(), service.config)
        return send.encoded(await pool(asked, partial(api.body, body), exchange, service), exchange.held)

    return guarded(answer)


async def info(request: Request) -> web.StreamResponse:
    """Describe the model as text-embeddings-inference does."""
    service = request.service
    served, capacity, config = service.model(), service.engine.core.capacity, service.config
    facts = service.engine.executor.describe()
    description = Info(
        model_id=served.names[0],
        model_sha=served.fingerprint or None,
        model_dtype=str(facts.get("dtype", "")),
        model_type=_kind(served),
        max_concurrent_requests=config.scheduler.max_waiting,
        max_input_length=served.most_input_tokens,
        max_batch_tokens=capacity.step_tokens,
        max_batch_requests=capacity.rows,
        max_client_batch_size=min(INPUTS, config.scheduler.max_waiting),
        tokenization_workers=1,
        version=__version__,
    )
    return send.json(msgspec.json.encode(description))


def _kind(served: ServedModel) -> dict[str, Any]:
    labels = served.pooling.labels
    if "embed" in served.pools:
        return {"embedding": {"pooling": served.pooling.pooling}}
    if not served.pools:
        return {"generator": {}}
    by_name = {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}
    return {"reranker" if served.pooling.pairs else "classifier": by_name}
