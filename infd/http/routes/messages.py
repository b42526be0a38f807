"""Anthropic's POST /v1/messages/count_tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.http import send
from infd.http.apis.messages import check, conversation
from infd.http.body import read
from infd.http.prompt import render
from infd.http.schema.anthropic import CountTokensRequest, TokenCount

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.routing import Request

_DECODER: Final = msgspec.json.Decoder(CountTokensRequest)


async def count_tokens(request: Request) -> web.StreamResponse:
    """Return the number of tokens of a conversation's prompt, which may be longer than the context."""
    service = request.service
    body, size = await read(request, _DECODER)
    check(body)
    served = service.model()
    served.name(body.model)
    prompt = await render(
        conversation(body, size),
        served,
        service.offload,
        add_special_tokens=body.add_special_tokens,
        must_fit=False,
    )
    return send.json(msgspec.json.encode(TokenCount(input_tokens=len(prompt.ids))))
