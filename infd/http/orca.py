"""The server's load in a response header, for load balancers that ask for it (Open Request Cost Aggregation).

A request with the header `endpoint-load-metrics-format: JSON` or `TEXT` gets the header `endpoint-load-metrics`, with
vLLM's names. Source: ORCA load reports in Envoy's documentation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from aiohttp import web

    from infd.engine.engine import Engine

REQUEST: Final = "endpoint-load-metrics-format"
RESPONSE: Final = "endpoint-load-metrics"


def set_header(form: str, engine: Engine, response: web.StreamResponse) -> None:
    """Add the load in the format `JSON` or `TEXT`; another format adds nothing."""
    now = engine.status()
    named = {
        "kv_cache_usage_perc": round(now.pages_referenced / now.pages, 4) if now.pages else 0.0,
        "num_requests_waiting": now.waiting,
        "num_requests_running": now.running,
    }
    match form.upper():
        case "JSON":
            response.headers[RESPONSE] = "JSON " + msgspec.json.encode({"named_metrics": named}).decode()
        case "TEXT":
            pairs = (f"named_metrics.{key}={value}" for key, value in named.items())
            response.headers[RESPONSE] = "TEXT " + ", ".join(pairs)
