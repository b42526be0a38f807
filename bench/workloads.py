"""Workloads for comparisons of servers, and their figures."""

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from infd.loadgen.figures import Report as Measured
from infd.loadgen.settings import Task


class Background(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests that are sent all the time while a workload is measured; no figure counts them."""

    concurrency: int
    input_tokens: int


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload for every server, and which of FIGURES to report; other fields are as in `Settings`, `Synthetic`."""

    name: Annotated[str, Meta(min_length=1)]
    figures: tuple[str, ...]
    task: Task = "generate"
    requests: int
    concurrency: int = 1
    inputs: int = 1
    input_tokens: int
    input_range: float = 0.0
    output_tokens: int = 0  # 0: the task does not generate
    beside: Background | None = None
    shared: float = 0.0
    warmup: int = 0


class Figure(Struct, frozen=True):
    """One figure of a window; `of` returns None if the window has none."""

    title: str
    unit: str
    more_is_better: bool
    of: Callable[[Measured], float | None]


def _p50(name: str) -> Callable[[Measured], float | None]:
    return lambda measured: spread.p50 if (spread := getattr(measured.latency_ms, name)) else None


def _p99(name: str) -> Callable[[Measured], float | None]:
    return lambda measured: spread.p99 if (spread := getattr(measured.latency_ms, name)) else None


def _stream_rate(measured: Measured) -> float | None:
    spread = measured.latency_ms.per_token
    return 1000 / spread.p50 if spread else None


FIGURES = {
    "stream": Figure("of one stream", "tok/s", True, _stream_rate),
    "output": Figure("of all streams", "tok/s", True, lambda measured: measured.throughput.output_tokens_s),
    "ttft": Figure("first token p50", "ms", False, _p50("ttft")),
    "gap": Figure("between tokens p50", "ms", False, _p50("inter_token")),
    "gap_p99": Figure("between tokens p99", "ms", False, _p99("inter_token")),
    "requests": Figure("answered", "1/s", True, lambda measured: measured.throughput.requests_s),
    "answer": Figure("answer p50", "ms", False, _p50("e2e")),
    "answer_p99": Figure("answer p99", "ms", False, _p99("e2e")),
}

WORKLOADS = (
    Workload(name="decode", figures=("stream", "gap_p99"), requests=3, input_tokens=32, output_tokens=64),
    Workload(name="prompt-512", figures=("ttft",), requests=3, input_tokens=512, output_tokens=1),
    Workload(
        name="streams-8",
        figures=("output", "ttft", "gap", "gap_p99"),
        requests=8,
        concurrency=8,
        input_tokens=128,
        output_tokens=128,
    ),
    Workload(name="offline-32", figures=("output",), requests=32, concurrency=32, input_tokens=128, output_tokens=128),
    Workload(name="cold-1032", figures=("ttft",), requests=3, input_tokens=1032, output_tokens=1),
    Workload(
        name="warm-1032",
        figures=("ttft",),
        requests=3,
        input_tokens=1032,
        output_tokens=1,
        shared=1000 / 1032,
        warmup=1,
    ),
    Workload(
        name="burst-32",
        figures=("ttft",),
        requests=32,
        concurrency=32,
        input_tokens=1032,
        output_tokens=1,
        shared=1000 / 1032,
        warmup=1,
    ),
)

EMBED_WORKLOADS = (
    Workload(name="one-32", task="embed", figures=("answer", "answer_p99"), requests=200, warmup=10, input_tokens=32),
    Workload(
        name="mixed-32",
        task="embed",
        figures=("requests", "answer", "answer_p99"),
        requests=256,
        warmup=32,
        concurrency=32,
        input_tokens=132,
        input_range=0.95,
    ),
    Workload(
        name="short-beside-long",
        task="embed",
        figures=("answer", "answer_p99"),
        requests=100,
        input_tokens=32,
        beside=Background(concurrency=8, input_tokens=504),
    ),
    Workload(
        name="long-32",
        task="embed",
        figures=("requests", "answer"),
        requests=64,
        concurrency=32,
        input_tokens=504,
    ),
)
RERANK_WORKLOADS = (
    Workload(
        name="rerank-16", task="rerank", figures=("answer", "answer_p99"), requests=20, inputs=16, input_tokens=60
    ),
    Workload(
        name="rerank-16x8",
        task="rerank",
        figures=("requests", "answer", "answer_p99"),
        requests=40,
        concurrency=8,
        inputs=16,
        input_tokens=60,
    ),
)
BY_TASK = {"generate": WORKLOADS, "embed": EMBED_WORKLOADS, "rerank": RERANK_WORKLOADS}
