"""Metrics in Prometheus' text format.

Each series has an `infd_` name; series that existing dashboards, autoscalers and
gateways query also have vLLM's name and labels (`[metrics] compat = "vllm"`).
vLLM's series for features that infd lacks are absent.
"""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from infd.telemetry.metrics import Histogram
from infd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from infd.telemetry.metrics import Gauges, Metrics

    Rows = Sequence[tuple[Mapping[str, str], float]]

STATES = ("starting", "ready", "draining", "paused", "sleeping", "failed")


def expose(metrics: Metrics, *, compat: bool = True) -> bytes:
    """Return all series in Prometheus' text format. Takes about 10 ms, so call it on a thread.

    compat  whether series are also exposed under `vllm:` names
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(metrics, compat=compat))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Series(Struct, frozen=True):
    """One counter or histogram.

    name       name of the series, without the prefix `infd_`
    attribute  attribute of Metrics that contains the value
    compat     name of vLLM's equivalent series, without the prefix `vllm:`; None: vLLM lacks the series
    """

    name: str
    attribute: str
    help: str
    compat: str | None = None


SERIES = (
    _Series("prompt_tokens", "prompt_tokens", "Prompt tokens of accepted requests.", "prompt_tokens"),
    _Series(
        "prompt_tokens_cached", "prompt_tokens_cached", "Prompt tokens found in the cache.", "prompt_tokens_cached"
    ),
    _Series("generation_tokens", "generation_tokens", "Tokens generated.", "generation_tokens"),
    _Series("preemptions", "preemptions", "Sequences preempted, and computed again.", "num_preemptions"),
    _Series("steps_undone", "steps_undone", "Failed steps, and steps in flight behind a failed step."),
    _Series("drafts", "drafts", "Steps of a choice that verified drafts.", "spec_decode_num_drafts"),
    _Series("draft_tokens", "drafted", "Drafts verified.", "spec_decode_num_draft_tokens"),
    _Series("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the cache.", "prefix_cache_queries"),
    _Series("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the cache.", "prefix_cache_hits"),
    _Series("time_to_first_token_seconds", "ttft", "From arrival to first token.", "time_to_first_token_seconds"),
    _Series("inter_token_latency_seconds", "inter_token", "Between tokens of a choice.", "inter_token_latency_seconds"),
    _Series("e2e_request_latency_seconds", "e2e", "From arrival to last token.", "e2e_request_latency_seconds"),
    _Series("request_queue_time_seconds", "queue", "From arrival to first step.", "request_queue_time_seconds"),
    _Series("request_prefill_time_seconds", "prefill", "First step to first token.", "request_prefill_time_seconds"),
    _Series("request_decode_time_seconds", "decode", "First token to last.", "request_decode_time_seconds"),
    _Series(
        "request_inference_time_seconds", "inference", "First step to last token.", "request_inference_time_seconds"
    ),
    _Series(
        "request_time_per_output_token_seconds",
        "per_token",
        "Mean time between the tokens of a choice.",
        "request_time_per_output_token_seconds",
    ),
    _Series("request_prompt_tokens", "request_prompt_tokens", "Tokens of a prompt.", "request_prompt_tokens"),
    _Series(
        "request_generation_tokens", "request_generation_tokens", "Tokens of an answer.", "request_generation_tokens"
    ),
    _Series(
        "request_longest_tokens",
        "request_longest_tokens",
        "Tokens of a request's longest answer.",
        "request_max_num_generation_tokens",
    ),
    _Series(
        "request_computed_tokens",
        "request_computed_tokens",
        "Tokens of a prompt that were not in the cache.",
        "request_prefill_kv_computed_tokens",
    ),
    _Series("request_max_tokens", "request_max_tokens", "max_tokens of a request.", "request_params_max_tokens"),
    _Series("request_preemptions", "request_preemptions", "Preemptions of a choice.", "request_num_preemptions"),
    _Series("request_choices", "request_choices", "n of a request.", "request_params_n"),
    _Series("step_tokens", "step_tokens", "Tokens computed in a step."),
    _Series(
        "iteration_tokens",
        "iteration_tokens",
        "Tokens generated in a step, plus the computed prompt tokens of choices that generate their first token.",
        "iteration_tokens_total",
    ),
    _Series("step_duration_seconds", "step", "Duration of a step."),
    _Series("grammar_compiles", "grammar_compiles", "Constraints compiled or refused; infd_rejected has the reasons."),
    _Series("grammar_compile_seconds", "grammar_compile_s", "Time in which constraints were compiled."),
    _Series("grammar_cache_hits", "grammar_hits", "Constraints of requests that were found compiled."),
    _Series("grammar_mask_seconds", "grammar_masks", "Time to fill the mask of a step with constrained choices."),
    _Series("event_loop_lag_seconds", "loop_lag", "Delay of the event loop while steps run."),
)


# What the API keys have used, by the name of the series without the prefix `infd_key_`.
USAGE = {
    "requests": "Inference requests of an API key, except those refused because of load or state.",
    "limited": "Requests of an API key that were refused because a rate was used up.",
    "refused": "Requests of an API key that were refused because of load, such as its cap in flight, or state.",
    "answered": "Requests of an API key that were queued and have ended.",
    "prompt_tokens": "Prompt tokens of an API key.",
    "cached_tokens": "Prompt tokens of an API key that were found in the cache.",
    "generated_tokens": "Tokens generated for an API key.",
}


class _Scrape:
    """The collector of one scrape."""

    def __init__(self, metrics: Metrics, *, compat: bool) -> None:
        self._metrics = metrics
        self._compat = compat

    def collect(self) -> Iterator[Metric]:
        gauges = self._metrics.gauges()
        yield from self._native(gauges)
        if self._compat:
            yield from self._as_vllm(gauges)

    def _native(self, gauges: Gauges) -> Iterator[Metric]:
        metrics = self._metrics
        model = {"model_name": metrics.model_name}
        pages = {
            "referenced": gauges.pages_referenced,
            "cached": gauges.pages_cached,
            "free": gauges.pages - gauges.pages_referenced - gauges.pages_cached,
        }
        yield _gauge("infd_build_info", "The running version.", [({"version": __version__}, 1)])
        yield _gauge(
            "infd_state", "1 for the state of the daemon.", _by("state", {s: s == gauges.state for s in STATES})
        )
        yield _gauge("infd_requests_running", "Sequences that run.", [(model, gauges.running)])
        yield _gauge("infd_requests_waiting", "Sequences that wait.", [(model, gauges.waiting)])
        yield _gauge("infd_requests_held", "Requests held until a paused engine resumes.", [(model, gauges.held)])
        yield _gauge("infd_cache_pages", "Pages of the cache by use.", _by("use", pages, model))
        yield _gauge(
            "infd_last_step_timestamp_seconds",
            "When the last step ended, in Unix time; 0 before the first.",
            [(model, gauges.last_step_timestamp)],
        )
        yield _counter("infd_requests_terminal", "How accepted requests ended.", _by("reason", metrics.terminal, model))
        yield _counter("infd_rejected", "Requests refused, by error code.", _by("reason", metrics.rejected, model))
        yield _gauge("infd_adapters_bytes", "Host memory of adapters.", [({}, gauges.adapters_bytes)])
        yield _counter(
            "infd_adapter_requests", "Sequences that have ended.", _by("adapter", metrics.adapter_requests, model)
        )
        yield _gauge("infd_grammar_cache_bytes", "Memory of compiled constraints.", [({}, metrics.grammar_cache_bytes)])
        yield _gauge("infd_connections", "Connections to the endpoint.", [({}, metrics.connections)])
        yield _counter("infd_connections_dropped", "Connections ended by the server.", _by("reason", metrics.dropped))
        loads = metrics.expert_loads.layers()
        yield _gauge(
            "infd_expert_load_ratio",
            "Load of the busiest expert of a layer, relative to the mean; sampled.",
            [({**model, "layer": str(load.layer)}, load.ratio) for load in loads],
        )
        yield _gauge(
            "infd_expert_load_unused",
            "Experts of a layer that no sampled token chose.",
            [({**model, "layer": str(load.layer)}, load.unused) for load in loads],
        )
        yield _counter(
            "infd_expert_load_steps", "Steps in which loads were sampled.", [(model, metrics.expert_loads.steps)]
        )
        yield from self._usage()
        yield from self._accepted("infd_draft_tokens_accepted", model)
        yield from self._http("infd_http")
        for series in SERIES:
            yield self._counted("infd_" + series.name, series, model)

    def _as_vllm(self, gauges: Gauges) -> Iterator[Metric]:
        metrics = self._metrics
        model = {"model_name": metrics.model_name, "engine": "0"}
        usage = gauges.pages_referenced / gauges.pages if gauges.pages else 0.0
        ended = dict(metrics.terminal)
        ended["abort"] += ended.pop("disconnect") + ended.pop("slow_reader")
        refused = _by("reason", metrics.turned_away, model)
        yield _counter("vllm:admission_rejections", "Requests refused because of load or state.", refused)
        yield _gauge("vllm:num_requests_running", "Sequences that run.", [(model, gauges.running)])
        yield _gauge("vllm:num_requests_waiting", "Sequences that wait.", [(model, gauges.waiting)])
        yield _gauge("vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1.", [(model, usage)])
        yield _counter("vllm:request_success", "How requests ended.", _by("finished_reason", ended, model))
        yield _gauge(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait, by what for.",
            _by("reason", {"capacity": gauges.waiting - gauges.preparing, "deferred": gauges.preparing}, model),
        )
        level = gauges.sleep_level
        sleep = {"awake": not level, "weights_offloaded": level == 1, "discard_all": level == 2}
        yield _gauge("vllm:engine_sleep_state", "1 for the state of the engine.", _by("sleep_state", sleep, model))
        cached = metrics.prompt_tokens_cached
        sources = {
            "local_compute": metrics.prompt_tokens - cached,
            "local_cache_hit": cached,
            "external_kv_transfer": 0,
        }
        yield _counter("vllm:prompt_tokens_by_source", "Prompt tokens by origin.", _by("source", sources, model))
        tiers = _by("source", {"device": cached}, model)
        yield _counter("vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by place.", tiers)
        if gauges.max_adapters:
            adapters = {
                "max_lora": str(gauges.max_adapters),
                "running_lora_adapters": ",".join(gauges.adapters_running),
                "waiting_lora_adapters": ",".join(gauges.adapters_waiting),
            }
            yield _gauge(
                "vllm:lora_requests_info", "Adapters in use; the value is the scrape's time.", [(adapters, time())]
            )
        yield from self._accepted("vllm:spec_decode_num_accepted_tokens", model)
        yield from self._http("http")
        if metrics.cache_config:
            yield _gauge(
                "vllm:cache_config_info", "Constants of the cache.", [({**metrics.cache_config, "engine": "0"}, 1)]
            )
        for series in SERIES:
            if series.compat is not None:
                yield self._counted("vllm:" + series.compat, series, model)

    def _accepted(self, name: str, labels: Mapping[str, str]) -> Iterator[Metric]:
        kept = self._metrics.accepted_drafts
        places = {str(place): count for place, count in enumerate(kept)}
        yield _counter(name, "Drafts kept.", [(labels, sum(kept))])
        yield _counter(f"{name}_per_pos", "Drafts kept, by position.", _by("position", places, labels))

    def _usage(self) -> Iterator[Metric]:
        for name, help in USAGE.items():
            rows = [
                ({"key": key, "tenant": usage.tenant}, getattr(usage, name.removesuffix("_tokens")))
                for key, usage in self._metrics.usage.items()
            ]
            yield _counter(f"infd_key_{name}", help, rows)

    def _http(self, prefix: str) -> Iterator[Metric]:
        metrics = self._metrics
        requests = [
            ({"handler": handler, "method": method, "status": status}, count)
            for (handler, method, status), count in metrics.http_requests.items()
        ]
        yield _counter(f"{prefix}_requests", "HTTP requests answered, health probes and scrapes aside.", requests)
        durations = [
            ({"handler": handler, "method": method}, seconds)
            for (handler, method), seconds in metrics.http_seconds.items()
        ]
        if durations:
            yield _histogram(f"{prefix}_request_duration_seconds", "From headers to the last byte.", durations)

    def _counted(self, name: str, series: _Series, labels: Mapping[str, str]) -> Metric:
        value = getattr(self._metrics, series.attribute)
        if not isinstance(value, Histogram):
            return _counter(name, series.help, [(labels, value)])
        return _histogram(name, series.help, [(labels, value)])


def _by(label: str, values: Mapping[str, float], labels: Mapping[str, str] | None = None) -> Rows:
    return [({**(labels or {}), label: key}, value) for key, value in values.items()]


def _gauge(name: str, help: str, rows: Rows) -> Metric:
    return _fill(GaugeMetricFamily(name, help), rows)


def _counter(name: str, help: str, rows: Rows) -> Metric:
    return _fill(CounterMetricFamily(name, help), rows, "_total")


def _histogram(name: str, help: str, rows: Sequence[tuple[Mapping[str, str], Histogram]]) -> Metric:
    family = HistogramMetricFamily(name, help, labels=list(rows[0][0]))
    for labels, histogram in rows:
        family.add_metric(list(labels.values()), histogram.cumulative(), histogram.sum)
    return family


def _fill(family: Metric, rows: Rows, suffix: str = "") -> Metric:
    for labels, value in rows:
        family.add_sample(family.name + suffix, dict(labels), float(value))
    return family
