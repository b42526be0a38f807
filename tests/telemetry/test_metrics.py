"""The exposition that Prometheus scrapes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from infd.engine.lifecycle.state import State
from infd.telemetry.exposition import STATES, expose
from infd.telemetry.metrics import Gauges, Histogram, Metrics


def samples(metrics: Metrics, *, compat: bool = True) -> dict[str, float]:
    """Every sample by `name{label="value",...}`, labels in order of their names."""
    found = {}
    for family in text_string_to_metric_families(expose(metrics, compat=compat).decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_a_histogram_counts_values_at_or_below_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    histogram.observe(2.0, count=10)

    assert histogram.cumulative() == [("1.0", 2), ("2.0", 13), ("+Inf", 14)]
    assert histogram.sum == 26.0


def test_counts_appear_under_both_names() -> None:
    metrics = Metrics("tiny")
    metrics.prompt_tokens = 7
    metrics.ttft.observe(0.02)
    metrics.iteration_tokens.observe(100)
    found = samples(metrics)

    assert found['infd_prompt_tokens_total{model_name="tiny"}'] == 7
    assert found['vllm:prompt_tokens_total{engine="0",model_name="tiny"}'] == 7
    assert found['infd_time_to_first_token_seconds_bucket{le="0.01",model_name="tiny"}'] == 0
    assert found['infd_time_to_first_token_seconds_bucket{le="0.02",model_name="tiny"}'] == 1
    assert found['vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"}'] == 1
    assert found['vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"}'] == 100


def test_without_compat_only_names_of_our_own_appear() -> None:
    names = {name for name in samples(Metrics("tiny"), compat=False) if not name.startswith("process_")}

    assert names
    assert all(name.startswith("infd_") for name in names)


def test_prompt_tokens_are_counted_by_source() -> None:
    metrics = Metrics("tiny")
    metrics.prompt_tokens, metrics.prompt_tokens_cached = 10, 4
    found = samples(metrics)

    def of(source: str) -> float:
        return found[f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="tiny",source="{source}"}}']

    assert (of("local_compute"), of("local_cache_hit"), of("external_kv_transfer")) == (6, 4, 0)


def test_a_snapshot_stays_as_it_was() -> None:
    metrics = Metrics("tiny")
    metrics.gauges = lambda: Gauges(running=metrics.prompt_tokens)
    metrics.answered("/v1/models", "GET", 200, 0.1)
    before = samples(metrics.snapshot())
    frozen = metrics.snapshot()

    metrics.prompt_tokens += 1
    metrics.ttft.observe(0.1)
    metrics.terminal["stop"] += 1
    metrics.answered("/v1/models", "GET", 200, 0.1)

    assert unlike_process(samples(frozen)) == unlike_process(before)
    assert samples(metrics)['infd_requests_running{model_name="tiny"}'] == 1


def unlike_process(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not name.startswith("process_")}


def test_http_requests_are_counted_by_route_method_and_class_of_status() -> None:
    metrics = Metrics("tiny")
    for status in (200, 204, 503):
        metrics.answered("/v1/models/{id}", "GET", status, 0.2)
    found = samples(metrics)

    assert found['infd_http_requests_total{handler="/v1/models/{id}",method="GET",status="2xx"}'] == 2
    assert found['http_requests_total{handler="/v1/models/{id}",method="GET",status="5xx"}'] == 1
    assert found['http_request_duration_seconds_count{handler="/v1/models/{id}",method="GET"}'] == 3


def test_gauges_are_asked_at_each_scrape() -> None:
    metrics = Metrics("tiny")
    metrics.gauges = lambda: Gauges(state="ready", running=2, waiting=1, pages=10, pages_referenced=4, pages_cached=5)
    found = samples(metrics)

    assert found['infd_state{state="ready"}'] == 1
    assert found['infd_state{state="starting"}'] == 0
    assert found['infd_requests_running{model_name="tiny"}'] == 2
    assert found['infd_cache_pages{model_name="tiny",use="free"}'] == 1
    assert found['vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'] == 0.4
    assert found['vllm:num_requests_waiting{engine="0",model_name="tiny"}'] == 1


def test_every_state_has_a_series() -> None:
    assert set(STATES) == {state.value for state in State}


def test_reasons_become_labels_and_a_disconnect_counts_as_abort_for_vllm() -> None:
    metrics = Metrics("tiny")
    metrics.terminal["abort"] = 1
    metrics.terminal["disconnect"] = 1
    metrics.terminal["slow_reader"] = 1
    metrics.rejected["queue_full"] = 3
    found = samples(metrics)

    assert found['infd_requests_terminal_total{model_name="tiny",reason="disconnect"}'] == 1
    assert found['infd_requests_terminal_total{model_name="tiny",reason="slow_reader"}'] == 1
    assert found['vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'] == 3
    assert found['infd_rejected_total{model_name="tiny",reason="queue_full"}'] == 3
    assert metrics.terminal["abort"] == 1


def test_work_on_grammars_is_counted() -> None:
    metrics = Metrics("tiny")
    metrics.grammar_compiles, metrics.grammar_compile_s, metrics.grammar_hits = 3, 0.5, 7
    metrics.grammar_cache_bytes = 1000
    metrics.grammar_masks.observe(0.003)
    metrics.rejected["unsupported_grammar"] = 2
    found = samples(metrics)

    assert found['infd_grammar_compiles_total{model_name="tiny"}'] == 3
    assert found['infd_grammar_compile_seconds_total{model_name="tiny"}'] == 0.5
    assert found['infd_grammar_cache_hits_total{model_name="tiny"}'] == 7
    assert found["infd_grammar_cache_bytes{}"] == 1000
    assert found['infd_grammar_mask_seconds_sum{model_name="tiny"}'] == 0.003
    assert found['infd_rejected_total{model_name="tiny",reason="unsupported_grammar"}'] == 2


def test_a_model_name_with_quotes_does_not_break_the_page() -> None:
    metrics = Metrics('a"b\\c\nd')

    families = text_string_to_metric_families(expose(metrics).decode())
    names = {sample.labels.get("model_name") for family in families for sample in family.samples}
    assert 'a"b\\c\nd' in names
