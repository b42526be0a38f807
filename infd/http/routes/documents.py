"""GET /openapi.json and /docs. Both are made at the first request, on a thread, and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from infd.http import send

if TYPE_CHECKING:
    from infd.http.routing import Request


async def openapi(request: Request) -> web.StreamResponse:
    """Return the OpenAPI document."""
    return send.json(await request.service.offload(_openapi))


async def docs(request: Request) -> web.StreamResponse:
    """Return the OpenAPI document as a page."""
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    body = await request.service.offload(_docs)
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)


def _openapi() -> bytes:
    from infd.http.openapi.document import encoded  # loaded at the first request, not at start

    return encoded()


def _docs() -> bytes:
    from infd.http.openapi.page import page

    return page()
