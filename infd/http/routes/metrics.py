"""The route GET /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from infd.telemetry.exposition import expose

if TYPE_CHECKING:
    from infd.http.routing import Request


async def scrape(request: Request) -> web.StreamResponse:
    """Return all metrics in Prometheus' text format."""
    service = request.service
    return web.Response(
        body=await service.offload(expose, service.metrics.snapshot(), compat=service.config.metrics.compat == "vllm"),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )
