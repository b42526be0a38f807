"""GET /v1/models and /v1/models/{id}, in OpenAI's format; in Anthropic's if anthropic-version is sent."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import InvalidRequest
from infd.http import send
from infd.http.formats.messages import ANTHROPIC_VERSION
from infd.http.query import number
from infd.http.schema.anthropic import ModelInfo, ModelPage
from infd.http.schema.models import ModelCard, ModelList

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from infd.http.routing import Request
    from infd.http.served_model import ServedModel

PAGE_MODELS: Final = 20  # Anthropic's default; LARGEST_PAGE is Anthropic's limit
LARGEST_PAGE: Final = 1000


async def list_models(request: Request) -> web.StreamResponse:
    """Return an entry for each name of the served model, then for each loaded adapter."""
    served = request.service.model()
    limit = number(request.query, "limit", PAGE_MODELS, least=1, most=LARGEST_PAGE)
    if ANTHROPIC_VERSION in request.headers:
        return send.json(msgspec.json.encode(_page(served, request.query, limit)))
    return send.json(
        msgspec.json.encode(ModelList(data=[_card(served, name) for name in (*served.names, *served.adapters)]))
    )


async def show_model(request: Request) -> web.StreamResponse:
    """Return the entry of one model or adapter. Ids may contain slashes."""
    served = request.service.model()
    name = served.name(request.variables["id"])
    card = _info(served, name) if ANTHROPIC_VERSION in request.headers else _card(served, name)
    return send.json(msgspec.json.encode(card))


def _page(served: ServedModel, query: Mapping[str, str], limit: int) -> ModelPage:
    """Return a page of the models in Anthropic's format. Raises InvalidRequest."""
    names = [*served.names, *served.adapters]
    start, end = 0, len(names)
    for field in ("after_id", "before_id"):
        if (name := query.get(field)) is None:
            continue
        if name not in names:
            raise InvalidRequest(f"{field} names no model", param=field)
        if field == "after_id":
            start = names.index(name) + 1
        else:
            end = names.index(name)
            start = max(start, end - limit)
    page = names[start:end][:limit]
    data = [_info(served, name) for name in page]
    return ModelPage(
        data=data,
        has_more=start + len(page) < end,
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
    )


def _info(served: ServedModel, name: str) -> ModelInfo:
    created = datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    longest = served.max_model_len
    return ModelInfo(id=name, display_name=name, created_at=created, max_input_tokens=longest, max_tokens=longest)


def _card(served: ServedModel, name: str) -> ModelCard:
    base = served.names[0]
    adapter = None if name in served.names else served.adapters[name]
    return ModelCard(
        id=name,
        created=served.created,
        root=base if adapter is None else adapter,
        parent=None if adapter is None else base,
        max_model_len=served.max_model_len,
        tasks=[*served.tasks],
    )
