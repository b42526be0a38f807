"""The metrics after requests: every name that vLLM's published dashboards query.

The names come from vLLM's examples/observability: prometheus_grafana/grafana.json and dashboards/grafana/*.json.
Names of features that infd lacks (KV transfer, media, weight updates, speculation, FLOP estimates) are excluded;
their panels stay empty.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infd.http.routes import metrics

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint

HISTOGRAMS = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
)
# value by (name, labels without model_name and engine)
OTHERS = (
    ("generation_tokens_total", {}),
    ("kv_cache_usage_perc", {}),
    ("num_preemptions_total", {}),
    ("num_requests_running", {}),
    ("num_requests_waiting", {}),
    ("prefix_cache_hits_total", {}),
    ("prefix_cache_queries_total", {}),
    ("prompt_tokens_cached_total", {}),
    ("prompt_tokens_total", {}),
    ("engine_sleep_state", {"sleep_state": "awake"}),
    ("engine_sleep_state", {"sleep_state": "discard_all"}),
    ("num_requests_waiting_by_reason", {"reason": "capacity"}),
    ("num_requests_waiting_by_reason", {"reason": "deferred"}),
    ("prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
    ("prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
    ("prompt_tokens_by_source_total", {"source": "local_compute"}),
    ("prompt_tokens_cached_by_source_total", {"source": "device"}),
    ("request_success_total", {"finished_reason": "abort"}),
    ("request_success_total", {"finished_reason": "error"}),
    ("request_success_total", {"finished_reason": "length"}),
    ("request_success_total", {"finished_reason": "stop"}),
)
PROCESS = (
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
)

Sample = tuple[str, frozenset[tuple[str, str]]]


async def scrape(endpoint: Endpoint) -> dict[Sample, float]:
    async with endpoint.session.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
async def scraped(endpoint: Endpoint) -> dict[Sample, float]:
    endpoint.server.service.metrics.model_name = "m"
    endpoint.server.service.metrics.cache_config = {"block_size": "4", "num_gpu_blocks": "512"}
    prompt = list(range(5, 25))
    await endpoint.complete(prompt=prompt, max_tokens=4)
    await endpoint.complete(prompt=prompt, max_tokens=6, n=2, temperature=1)
    await endpoint.idle()
    return await scrape(endpoint)


def series(name: str, **labels: str) -> Sample:
    return "vllm:" + name, frozenset({"model_name": "m", "engine": "0", **labels}.items())


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_a_dashboard_finds_each_histogram_with_samples(scraped: dict[Sample, float], name: str):
    assert scraped[series(f"{name}_count")] > 0
    assert series(f"{name}_sum") in scraped
    assert scraped[series(f"{name}_bucket", le="+Inf")] == scraped[series(f"{name}_count")]


@pytest.mark.parametrize(("name", "labels"), OTHERS)
def test_a_dashboard_finds_each_counter_and_gauge(scraped: dict[Sample, float], name: str, labels: dict[str, str]):
    assert series(name, **labels) in scraped


@pytest.mark.parametrize("name", PROCESS)
def test_a_dashboard_finds_the_process(scraped: dict[Sample, float], name: str):
    assert (name, frozenset()) in scraped


def test_a_dashboard_finds_requests_by_route_and_status(scraped: dict[Sample, float]):
    asked = {"handler": "/v1/completions", "method": "POST"}

    assert scraped["http_requests_total", frozenset({**asked, "status": "2xx"}.items())] == 2
    assert scraped["http_request_duration_seconds_count", frozenset(asked.items())] == 2


def test_the_facts_of_the_cache_have_an_engine(scraped: dict[Sample, float]):
    (labels,) = (dict(labels) for name, labels in scraped if name == "vllm:cache_config_info")

    assert labels == {"block_size": "4", "num_gpu_blocks": "512", "engine": "0"}


def test_adapters_appear_under_the_labels_that_gateways_read(scraped: dict[Sample, float]):
    (labels,) = (dict(labels) for name, labels in scraped if name == "vllm:lora_requests_info")

    assert labels == {"max_lora": "16", "running_lora_adapters": "", "waiting_lora_adapters": ""}


def test_without_speculation_nothing_is_drafted(scraped: dict[Sample, float]):
    drafted = {name: value for (name, _), value in scraped.items() if "spec_decode" in name}

    assert drafted
    assert not any(drafted.values())


def test_values_are_those_of_the_requests(scraped: dict[Sample, float]):
    assert scraped[series("request_success_total", finished_reason="length")] == 3
    assert scraped[series("generation_tokens_total")] == 4 + 6 + 6
    assert scraped[series("prompt_tokens_total")] == 40
    assert scraped[series("prompt_tokens_by_source_total", source="local_cache_hit")] > 0
    assert scraped[series("request_params_n_sum")] == 1 + 2
    assert scraped[series("request_max_num_generation_tokens_sum")] == 4 + 6
    assert scraped[series("request_params_max_tokens_sum")] == 4 + 6 + 6
    assert scraped[series("engine_sleep_state", sleep_state="awake")] == 1


async def test_an_iteration_counts_generated_tokens_and_prompts_with_their_first_as_vllm_does(endpoint: Endpoint):
    # vLLM 0.33, v1/metrics/loggers.py: prompt_token_stats.computed + num_generation_tokens, where there is an output.
    metrics = endpoint.server.service.metrics
    prompt = [300 + i % 90 for i in range(150)]  # three steps

    await endpoint.complete(prompt=prompt, max_tokens=5)
    first = metrics.iteration_tokens.cumulative()[-1][1], metrics.iteration_tokens.sum
    await endpoint.complete(prompt=prompt, max_tokens=5, n=2, temperature=1)

    assert first == (5, 150 + 5)
    assert metrics.iteration_tokens.sum - first[1] == 2 * (150 - 148 + 5), "each choice found 148 tokens in the cache"
    assert metrics.step_tokens.sum == (150 + 4) + 2 * (150 - 148 + 4), "a choice's last token is not computed"


async def test_odd_methods_and_paths_make_no_labels_of_their_own(endpoint: Endpoint):
    for method in ("PROPFIND", "MKCOL", "LOCK", "PURGE", "REPORT"):
        async with endpoint.session.request(method, f"/pot/{method}") as response:
            assert response.status == 404
        async with endpoint.session.request(method, "/v1/models/a") as response:
            assert response.status == 405

    assert endpoint.server.service.metrics.http_requests == {("none", "OTHER", "4xx"): 10}


async def test_a_scrape_is_written_off_the_loop(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "expose", lambda counted, compat: threading.current_thread().name.encode())

    async with endpoint.session.get("/metrics") as response:
        assert (await response.text()).startswith("infd-offload")


async def test_scrapes_and_probes_are_not_among_the_requests(endpoint: Endpoint):
    for path in ("/metrics", "/livez", "/health"):
        async with endpoint.session.get(path) as response:
            assert response.status == 200

    assert endpoint.server.service.metrics.http_requests == {}
