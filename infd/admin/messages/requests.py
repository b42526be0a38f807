"""Requests in flight, requests that have ended, and the usage of API keys and tenants."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class RequestRow(Struct):
    """A request, from its admission until its answer is sent or its client leaves.

    state   admitted (not queued yet), waiting, running, or done (the answer is not sent completely)
    client  name of the API key
    """

    id: str
    state: str
    client: str
    priority: int
    choices: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    age_s: float
    adapter: str | None = None
    tenant: str = ""


class Requests(Struct):
    requests: list[RequestRow]


class ReadSlow(Struct, forbid_unknown_fields=True):
    """List the slowest requests that ended within the last hours.

    by        the time that is compared: of the whole answer, until the first token, or until the first step
    within_s  only requests that ended in the last so many seconds
    """

    by: Literal["total", "ttft", "queue"] = "total"
    within_s: Annotated[float, Meta(ge=0)] = 6 * 3600.0


class SlowRequest(Struct):
    """A request that was queued and has ended.

    id         as the log's `request_id`: the client's X-Request-Id if it sent one
    client     name of the API key
    model      served name of the model or adapter
    time       Unix time of the end
    queue_ms   from the arrival to the first step; null: no step computed the request
    ttft_ms    from the arrival to the first token; null: there was none
    prompt     prompt tokens; `cached` of them were found in the cache
    generated  tokens delivered
    cause      the stage that took most of the time that is compared, in words
    """

    id: str
    client: str
    tenant: str
    model: str
    time: float
    queue_ms: float | None
    ttft_ms: float | None
    total_ms: float
    prompt: int
    cached: int
    generated: int
    finish: str
    cause: str


class SlowRequests(Struct):
    """At most 20 requests, the slowest first, of those that ended in the last `within_s` seconds."""

    within_s: float
    requests: list[SlowRequest]


class Abort(Struct, forbid_unknown_fields=True):
    """End the request with this `RequestRow.id`."""

    id: str


class Aborted(Struct):
    """The request `id` was aborted."""

    id: str


class UsageRow(Struct):
    """The use of one API key since the daemon's start.

    key        the key's name; empty: requests to a server without keys
    requests   inference requests that found room in the queue; those refused because of a rate too
    limited    requests refused because a rate was used up
    refused    requests refused because of load or the daemon's state (queue_full, key_in_flight, draining ...)
    answered   requests that were queued and have ended
    prompt     prompt tokens; `cached` of them were found in the cache
    generated  tokens delivered
    """

    key: str
    tenant: str
    requests: int
    limited: int
    refused: int
    answered: int
    prompt: int
    cached: int
    generated: int


class TenantUsage(Struct):
    """The sums over the API keys of one tenant. Fields that are not listed are as in `UsageRow`.

    keys   number of the tenant's API keys
    quota  rates and share in quotas.tenants; empty: none
    """

    tenant: str
    keys: int = 0
    quota: str = ""
    requests: int = 0
    limited: int = 0
    refused: int = 0
    answered: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0


class UsageRows(Struct):
    """The use of each API key and each tenant. `since`: the daemon's start, in Unix time."""

    since: float
    usage: list[UsageRow]
    tenants: list[TenantUsage] = []
