"""GET /metrics."""

from __future__ import annotations

from aiohttp import web

from infd.http.service import SERVICE


async def scrape(request: web.Request) -> web.StreamResponse:
    """Everything that is counted, for Prometheus."""
    return web.Response(
        body=request.app[SERVICE].metrics.render(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )
