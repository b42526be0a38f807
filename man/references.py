"""The pages of section 7: HTTP endpoints, metrics, and vLLM's flags."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families
from roff import escaped, start

from infd.admin.commands import FEEDS, VERBS
from infd.config.vllm import flags
from infd.http.openapi.document import statuses
from infd.http.openapi.operations import OPERATIONS
from infd.telemetry.exposition import expose
from infd.telemetry.metrics import Gauges, Metrics
from infd.telemetry.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from infd.config.vllm import Flags
    from infd.http.openapi.operation import Operation

# Labels whose values differ between models, machines and versions; a page lists the values of other labels.
OPEN = {"model_name", "version", "engine", "handler", "method", "status", "adapter", "position", "key", "tenant"}

HTTP_START = r"""
.SH DESCRIPTION
infd answers these endpoints at server.host and server.port.
.B GET /openapi.json
describes the fields of each, and
.B GET /docs
shows the description as a page. The paths of /v1/chat/completions, /v1/completions, /v1/messages and /v1/models exist
without /v1 too. If API keys are set, a request has one as
.B Authorization: Bearer KEY
or
.BR "X\-Api\-Key: KEY" ,
except where an endpoint is marked open. Each endpoint lists the statuses of its errors; ERRORS lists their codes.
"""

HTTP_END = r"""
.SH RATES
If quotas.requests_per_minute or the like limits a key, answers of the endpoints that generate text have the headers
.BR x\-ratelimit\-limit\-requests ,
.B x\-ratelimit\-remaining\-requests
and
.B x\-ratelimit\-reset\-requests
(the time until all of the limit is left again, such as 1m30s), and the same for tokens; those of /v1/messages
.BR anthropic\-ratelimit\-requests\-limit ,
.B \-remaining
and
.BR \-reset ,
and the same for tokens. If the key and its tenant are limited, the limit with less left is reported. Beyond a limit
the answer is 429 rate_limit_exceeded, with Retry\-After.
.SH SEE ALSO
.BR infd (1),
.BR infdctl (1),
.BR infd\-metrics (7)
"""

ADMIN = r""".SH ADMIN SOCKET
.B infdctl
uses these endpoints of the Unix socket admin.socket. Arguments are a JSON object (POST) or in the query (GET). Errors
are answered as RFC 9457 says, a feed with one JSON object a line.
"""

METRICS_START = r"""
.SH DESCRIPTION
.B GET /metrics
answers these metrics in Prometheus' text format. A counter's samples end in _total; a histogram's in _bucket (with the
label le), _count and _sum. Health probes, scrapes and the work of starting are not counted.
"""

COMPAT = r"""Metrics under the names and with the labels that vLLM's dashboards, autoscalers and gateways query. With
metrics.compat = "none" infd omits them.
"""

METRICS_END = r"""
.SH SEE ALSO
.BR infd (1),
.BR infd.toml (5),
.BR infd\-http (7)
"""

VLLM_START = r"""
.SH DESCRIPTION
Each flag of vLLM 0.33's commands
.B vllm serve
and
.BR "vllm bench serve" ,
and what takes its place in
.B infd start
and
.BR "infdctl bench" .
"""

VLLM_END = r"""
.SH SEE ALSO
.BR infd (1),
.BR infdctl (1),
.BR infd.toml (5)
"""


def http_page() -> str:
    """Return the page of all HTTP endpoints, from the table of operations."""
    lines = [*start("infd-http", 7, "HTTP endpoints of infd"), HTTP_START.strip()]
    for tag in dict.fromkeys(operation.tag for operation in OPERATIONS):
        lines.append(f".SH {escaped(tag.upper())}")
        for operation in OPERATIONS:
            if operation.tag == tag:
                lines += _endpoint(operation)
    lines.append(ADMIN.strip())
    for entry in (*VERBS, *FEEDS):
        kind = "Feed" if entry in FEEDS else "Verb"
        allowed = " For the daemon's user, root and the group infd-admin." if entry.mutates else ""
        lines += [".TP", f".B {entry.method} {escaped(entry.path)}", escaped(f"{kind}: {entry.name}.{allowed}")]
    lines += [".SH ERRORS", *_codes()]
    return "\n".join(lines) + HTTP_END


def _endpoint(operation: Operation) -> Iterator[str]:
    yield ".TP"
    yield f".B {operation.method.upper()} {escaped(operation.path)}"
    found = statuses(operation)
    streams = " May stream." if operation.streams else ""
    open = "" if HTTPStatus.UNAUTHORIZED in found else " Open."
    failing = () if operation.failing is None else (operation.failing,)
    listed = ", ".join(str(int(status)) for status in sorted({*found, *failing}))
    yield escaped(f"{operation.text}{streams}{open} Errors: {listed}.")
    for parameter in operation.parameters:
        yield ".RS"
        yield ".TP"
        yield f".I {escaped(parameter.name)}"
        yield escaped(parameter.text)
        yield ".RE"


def _codes() -> Iterator[str]:
    codes: dict[int, set[str]] = {}
    for operation in OPERATIONS:
        for status, errors in statuses(operation).items():
            codes.setdefault(int(status), set()).update(error.code for error in errors if error.code)
    for status, some in sorted(codes.items()):
        yield ".TP"
        yield f".B {status} {escaped(HTTPStatus(status).phrase)}"
        yield escaped("Codes: " + ", ".join(sorted(some)) + "." if some else "Without a code.")


def metrics_page() -> str:
    """Return the page of all metrics, from a scrape of counters that have each label."""
    families = list(text_string_to_metric_families(expose(_counted()).decode()))
    sections: tuple[tuple[str, tuple[str, ...], str], ...] = (
        ("METRICS", ("infd_",), ""),
        ("PROCESS", ("process_",), ""),
        ("VLLM'S NAMES", ("vllm:", "http_"), COMPAT),
    )
    lines = [*start("infd-metrics", 7, "metrics of infd"), METRICS_START.strip()]
    for title, prefixes, text in sections:
        lines += [f".SH {title}", *([text.strip()] if text else [])]
        for family in families:
            if family.name.startswith(prefixes):
                lines += _metric(family)
    return "\n".join(lines) + METRICS_END


def _counted() -> Metrics:
    """Return metrics with a value of each series that appears with its first value."""
    metrics = Metrics("")
    metrics.gauges = lambda: Gauges(max_adapters=1)
    metrics.cache_config = dict.fromkeys(("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype"), "")
    metrics.rejected = metrics.turned_away = {"": 1}
    metrics.adapter_requests = {"": 1}
    metrics.usage = {"": Usage()}
    metrics.accepted_drafts = (1,)
    metrics.answered("", "", 200, 0.0)
    return metrics


def _metric(family: Metric) -> Iterator[str]:
    suffix = "_total" if family.type == "counter" else ""
    labels: dict[str, set[str]] = {}
    for sample in family.samples:
        for name, value in sample.labels.items():
            if name != "le":
                labels.setdefault(name, set()).add(value)
    named = ", ".join(f"{name}{_values(name, some)}" for name, some in labels.items())
    yield ".TP"
    yield f".B {escaped(family.name + suffix)}"
    yield escaped(f"{family.type.capitalize()}. {family.documentation}" + (f" Labels: {named}." if named else ""))


def _values(name: str, values: set[str]) -> str:
    return "" if name in OPEN or "" in values else f" ({', '.join(sorted(values))})"


def vllm_page() -> str:
    """Return the page of vLLM's flags."""
    lines = [*start("infd-vllm", 7, "flags of vLLM in infd"), VLLM_START.strip()]
    for title, known in (("VLLM SERVE", flags("serve")), ("VLLM BENCH SERVE", flags("bench"))):
        lines += [f".SH {title}", *_flags(known)]
    return "\n".join(lines) + VLLM_END


def _flags(known: Flags) -> Iterator[str]:
    yield from (".SS The same flag", escaped(", ".join(known.taken) + "."))
    if known.aliases:
        yield ".SS Taken as another name of"
        for flag, ours in known.aliases.items():
            yield from (".TP", f".B {escaped(flag)}", escaped(ours))
    yield ".SS Another name"
    for flag, ours in known.ours.items():
        yield from (".TP", f".B {escaped(flag)}", escaped(ours))
    yield ".SS None, with the reason"
    for refused in known.refused:
        yield from (".PP", escaped(refused.reason[:1].upper() + refused.reason[1:] + ":"), ".RS")
        yield from (escaped(", ".join(refused.flags) + "."), ".RE")
