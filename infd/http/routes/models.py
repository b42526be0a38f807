"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from infd.http import send
from infd.http.schema.models import ModelCard, ModelList
from infd.http.service import SERVICE

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.served_model import ServedModel


async def list_models(request: web.Request) -> web.StreamResponse:
    """Return an entry for each name of the served model, then for each loaded adapter."""
    served = request.app[SERVICE].model()
    return send.json(
        msgspec.json.encode(ModelList(data=[_card(served, name) for name in (*served.names, *served.adapters)]))
    )


async def show_model(request: web.Request) -> web.StreamResponse:
    """Return the entry of one model or adapter. Ids may contain slashes."""
    served = request.app[SERVICE].model()
    return send.json(msgspec.json.encode(_card(served, served.name(request.match_info["id"]))))


def _card(served: ServedModel, name: str) -> ModelCard:
    base = served.names[0]
    adapter = None if name in served.names else served.adapters[name]
    return ModelCard(
        id=name,
        created=served.created,
        root=base if adapter is None else adapter,
        parent=None if adapter is None else base,
        max_model_len=served.max_model_len,
    )
