"""The load that load balancers ask for."""

from __future__ import annotations

import json

from tests.http.endpoint import Endpoint, serving


async def load(endpoint: Endpoint, form: str) -> str | None:
    async with endpoint.session.get("/v1/models", headers={"endpoint-load-metrics-format": form}) as response:
        return response.headers.get("endpoint-load-metrics")


async def test_the_load_is_sent_in_the_requested_format():
    async with serving() as endpoint:
        told = await load(endpoint, "json")
        assert told is not None
        assert json.loads(told.removeprefix("JSON ")) == {
            "named_metrics": {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0, "num_requests_running": 0}
        }
        assert await load(endpoint, "TEXT") == (
            "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0,"
            " named_metrics.num_requests_running=0"
        )
        assert await load(endpoint, "BIN") is None


async def test_requests_that_do_not_ask_get_no_load_header():
    async with serving() as endpoint, endpoint.session.get("/v1/models") as response:
        assert "endpoint-load-metrics" not in response.headers
