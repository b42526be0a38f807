"""The route GET /metrics."""

from __future__ import annotations

from aiohttp import web

from infd.http.service import SERVICE
from infd.telemetry.exposition import expose


async def scrape(request: web.Request) -> web.StreamResponse:
    """Return all metrics in Prometheus' text format."""
    service = request.app[SERVICE]
    return web.Response(
        body=await service.offload(expose, service.metrics.snapshot(), compat=service.config.metrics.compat == "vllm"),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )
