"""Rates of keys and tenants, what keys have used, and the log of slow requests."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from fractions import Fraction
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from infd.config import Config, LiveConfig, LogConfig, QuotasConfig, SchedulerConfig
from infd.errors import ConfigError, RateLimited
from infd.http.accounts import Accounts
from infd.http.auth import Key, Keys
from infd.http.formats.openai import duration
from infd.http.rates import Bucket, Limit, tenants
from infd.telemetry.exposition import expose
from infd.telemetry.metrics import Metrics
from tests.http.endpoint import Endpoint, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key_file(*lines: str) -> Keys:
    """Return keys whose secret is their name; a line is a name and what follows the hash."""
    written = [(name, *rest) for name, *rest in (line.split(" ", 1) for line in lines)]
    return Keys.parse(
        "\n".join(f"{name}:{sha256(name.encode()).hexdigest()}{''.join(rest)}" for name, *rest in written), "keys"
    )


@asynccontextmanager
async def limited(clock: Clock, keys: Keys, **quotas: Any) -> AsyncIterator[Endpoint]:
    async with serving(Config(quotas=QuotasConfig(**quotas)), keys=keys) as endpoint:
        service = endpoint.server.service
        service.accounts = Accounts(service.live, service.metrics, clock)
        yield endpoint


async def ask(endpoint: Endpoint, key: str, path: str = "/v1/completions", **fields: Any) -> tuple[int, dict, dict]:
    """Return status, headers and body."""
    body = {"prompt": [5, 6, 7], "max_tokens": 7, "seed": 0, "ignore_eos": True, **fields}
    async with endpoint.session.post(path, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        return response.status, dict(response.headers), await response.json()


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 600),
    st.sampled_from([0.5, 6.0, 60.0]),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 700), st.integers(0, 700)), max_size=40),
)
def test_a_bucket_admits_the_requests_that_an_exact_one_admits(
    per_minute: int, burst_s: float, requests: list[tuple[int, int, int]]
):
    limit = Limit("tokens", "this key", per_minute, burst_s, Bucket())
    per_ms, capacity = Fraction(per_minute, 60_000), max(Fraction(1), Fraction(per_minute) * Fraction(burst_s) / 60)
    level, now_ms = capacity, 0
    for waited_ms, reserved, used in requests:
        now_ms += waited_ms
        level = min(capacity, level + waited_ms * per_ms)
        enough = level - min(Fraction(reserved), capacity)
        if abs(enough) < 1e-6:
            return  # rounding decides
        if enough < 0:
            with pytest.raises(RateLimited) as refused:
                limit.require(reserved, now_ms / 1000)
            assert 0 <= (refused.value.retry_after_s or -1) - float(-enough / per_ms / 1000) < 1.001
            continue
        limit.require(reserved, now_ms / 1000)
        limit.bucket.add(reserved)
        limit.bucket.add(used - reserved)
        level = min(capacity, level - used)


async def test_a_key_beyond_its_rate_of_requests_is_refused_with_retry_after():
    clock = Clock()
    async with limited(clock, key_file("ann  requests_per_minute=2", "bob")) as endpoint:
        first = await ask(endpoint, "ann")
        await ask(endpoint, "ann")
        accepted = endpoint.engine.core.in_flight.accepted
        status, headers, body = await ask(endpoint, "ann")

        assert (status, body["error"]["type"], body["error"]["code"]) == (429, "requests", "rate_limit_exceeded")
        assert "this key may use 2 requests a minute" in body["error"]["message"]
        assert headers["Retry-After"] == "30"
        names = [f"x-ratelimit-{kind}-requests" for kind in ("limit", "remaining", "reset")]
        assert [first[1][name] for name in names] == ["2", "1", "30s"]
        assert [headers[name] for name in names] == ["2", "0", "1m0s"]
        assert endpoint.engine.core.in_flight.accepted == accepted, "nothing was queued"
        assert endpoint.server.service.metrics.rejected == {"rate_limit_exceeded": 1}
        unlimited = await ask(endpoint, "bob")
        assert unlimited[0] == 200
        assert not any("ratelimit" in name for name in unlimited[1])

        clock.now += 30
        assert [(await ask(endpoint, "ann"))[0] for _ in range(2)] == [200, 429]


async def test_a_request_reserves_max_tokens_and_returns_the_unused_ones():
    async with limited(Clock(), key_file("ann"), tokens_per_minute=100) as endpoint:
        whole = await ask(endpoint, "ann", return_token_ids=True)
        assert whole[1]["x-ratelimit-remaining-tokens"] == "90"  # 3 of the prompt, 7 generated
        end = whole[2]["choices"][0]["token_ids"][1]

        stopped = await ask(endpoint, "ann", max_tokens=80, stop_token_ids=[end])
        used = stopped[2]["usage"]["total_tokens"]
        assert used <= 5
        assert stopped[1]["x-ratelimit-remaining-tokens"] == str(90 - used)

        status, headers, body = await ask(endpoint, "ann", max_tokens=90)
        assert (status, body["error"]["type"]) == (429, "tokens")
        assert f"{90 - used} are left now; this request may need 93" in body["error"]["message"]
        assert headers["x-ratelimit-limit-tokens"] == "100"
        invalid = await ask(endpoint, "ann", max_tokens=-1)
        assert invalid[1]["x-ratelimit-remaining-tokens"] == str(90 - used), "an invalid request uses no tokens"


async def test_inputs_to_pool_use_a_keys_rates_as_prompts_do():
    rerank = {"query": "a", "documents": ["b", "c"]}
    async with limited(Clock(), key_file("ann  requests_per_minute=3", "bob  tokens_per_minute=60")) as endpoint:

        async def post(path: str, key: str, **body: Any) -> int:
            async with endpoint.session.post(path, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
                return response.status

        assert await post("/rerank", "nobody", **rerank) == 401
        assert [await post("/rerank", "ann", **rerank) for _ in range(2)] == [200, 200]
        assert [await post("/v1/embeddings", "ann", input="a") for _ in range(2)] == [200, 429]
        assert [await post("/embed", "bob", inputs=[[5] * 20, [6] * 20]) for _ in range(2)] == [200, 429]
        used = endpoint.server.service.metrics.usage
        assert (used["ann"].requests, used["ann"].limited, used["ann"].answered) == (4, 1, 3)
        assert (used["bob"].prompt, used["bob"].generated) == (40, 0)


async def test_a_request_larger_than_the_bucket_waits_for_a_full_one():
    clock = Clock()
    async with limited(clock, key_file("ann"), tokens_per_minute=20) as endpoint:
        assert (await ask(endpoint, "ann", max_tokens=57))[0] == 200
        refused = await ask(endpoint, "ann", max_tokens=57)
        assert (refused[0], refused[1]["Retry-After"]) == (429, "180"), "not 123, when one token is left"
        assert refused[2]["error"]["message"].endswith("and 0 are left now")
        clock.now += 123
        refused = await ask(endpoint, "ann", max_tokens=57)
        assert (refused[0], refused[1]["Retry-After"]) == (429, "57"), "its body was read"
        clock.now += 57
        assert (await ask(endpoint, "ann", max_tokens=57))[0] == 200


async def test_before_the_body_is_read_retry_after_is_for_the_keys_usual_request():
    clock = Clock()
    async with limited(clock, key_file("ann"), tokens_per_minute=60) as endpoint:
        for tokens in (10, 40, 10):
            assert (await ask(endpoint, "ann", max_tokens=tokens - 3))[0] == 200
        refused = await ask(endpoint, "ann")
        # 60 of 60 are used; the average is 10 + 30 / 8, less 3.75 / 8.
        assert (refused[0], refused[1]["Retry-After"]) == (429, "14")
        clock.now += 14
        assert (await ask(endpoint, "ann"))[0] == 200


async def test_keys_of_a_tenant_share_its_rate_and_anthropics_headers_report_it():
    rates = {"team": "share=2 tokens_per_minute=50"}
    async with limited(Clock(), key_file("ann :team", "bob :team", "cy"), tenants=rates) as endpoint:
        assert (await ask(endpoint, "ann", max_tokens=37))[0] == 200
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": endpoint.server.service.model().names[0], "messages": messages, "max_tokens": 30}
        status, headers, answer = await ask(endpoint, "bob", "/v1/messages", **body)

        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert "the tenant 'team'" in answer["error"]["message"]
        assert headers["anthropic-ratelimit-tokens-limit"] == "50"
        assert headers["anthropic-ratelimit-tokens-remaining"] == "10"
        assert headers["anthropic-ratelimit-tokens-reset"].endswith("Z")
        assert (await ask(endpoint, "cy", max_tokens=37))[0] == 200


async def test_changed_rates_hold_from_the_next_request_on_and_used_amounts_remain():
    async with limited(Clock(), key_file("ann"), requests_per_minute=1) as endpoint:
        assert [(await ask(endpoint, "ann"))[0] for _ in range(2)] == [200, 429]
        live = endpoint.server.service.live
        live.now = replace(live.now, quotas=QuotasConfig(requests_per_minute=2))
        assert [(await ask(endpoint, "ann"))[0] for _ in range(2)] == [200, 429]
        endpoint.server.keys = key_file("ann  requests_per_minute=3")
        assert [(await ask(endpoint, "ann"))[0] for _ in range(2)] == [200, 429]


async def test_usage_is_counted_by_the_names_of_keys_and_forgotten_with_them():
    async with limited(Clock(), key_file("ann :team requests_per_minute=2", "bob")) as endpoint:
        for key in ("ann", "ann", "ann", "bob"):
            await ask(endpoint, key)
        await ask(endpoint, "nobody")
        metrics = endpoint.server.service.metrics
        used = metrics.usage["ann"]
        assert (used.tenant, used.requests, used.limited, used.answered) == ("team", 3, 1, 2)
        assert (used.prompt, used.generated) == (6, 14)
        text = expose(metrics.snapshot()).decode()
        assert 'infd_key_generated_tokens_total{key="ann",tenant="team"} 14.0' in text
        assert 'infd_key_requests_total{key="bob",tenant="bob"} 1.0' in text
        assert metrics.usage.keys() == {"ann", "bob"}

        endpoint.server.keys = key_file("bob")
        assert metrics.usage.keys() == {"bob"}


async def test_an_abandoned_stream_counts_the_delivered_tokens():
    async with limited(Clock(), key_file("ann"), tokens_per_minute=1000) as endpoint:
        body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with endpoint.session.post("/v1/completions", json=body, headers={"X-Api-Key": "ann"}) as response:
            await response.content.readline()
            response.close()
        await endpoint.idle()
        used = endpoint.server.service.metrics.usage["ann"]
        after = await ask(endpoint, "ann", max_tokens=1)
        spent = used.prompt + used.generated
        assert after[1]["x-ratelimit-remaining-tokens"] == str(1000 - spent)


def test_a_key_is_reported_with_the_tenant_to_which_a_reload_moved_it():
    metrics = Metrics()
    accounts = Accounts(LiveConfig(Config()), metrics)
    for tenant in ("before", "after"):
        accounts.of(Key("ann", b"", tenant)).enter()

    assert (metrics.usage["ann"].tenant, metrics.usage["ann"].requests) == ("after", 2)


@pytest.mark.parametrize("option", ["share=0", "share=x", "requests_per_minute=0", "tokens=5", "share", "share=-1"])
def test_a_mistake_in_a_tenants_options_is_refused_by_name(option: str):
    with pytest.raises(ConfigError, match=f"quotas.tenants.team: '{option}' is no option; there are"):
        tenants(QuotasConfig(tenants={"team": f"share=2 {option}"}))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.02, "20ms"), (1.5, "1.5s"), (72, "1m12s"), (360, "6m0s"), (3600, "1h0m0s")]
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str):
    assert duration(seconds) == text


async def test_a_slow_request_is_logged_with_its_stages_and_the_likely_cause(caplog: pytest.LogCaptureFixture):
    config = Config(log=LogConfig(slow_s=0.0, access=False))
    async with serving(config, keys=key_file("ann")) as endpoint:
        await ask(endpoint, "ann")
        live = endpoint.server.service.live
        live.now = replace(live.now, log=LogConfig(slow_s=60.0))
        await ask(endpoint, "ann")
        live.now = replace(live.now, log=LogConfig())
        await ask(endpoint, "ann")

    (line,) = [vars(record) for record in caplog.records if record.name == "infd.slow"]
    assert (line["client"], line["prompt"], line["cached"], line["generated"]) == ("ann", 3, 0, 7)
    stages = [line[f"{stage}_ms"] for stage in ("prepare", "queue", "prefill", "decode", "send")]
    assert min(stages) >= 0
    assert sum(stages) == pytest.approx(line["total_ms"], abs=1)
    assert line["model"]
    assert line["request_id"]
    assert line["cause"]
    assert line["levelname"] == "WARNING"


async def test_a_refusal_because_of_load_is_counted_for_its_key_and_a_long_prompt_is_logged_with_the_limit(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO", "infd.access")
    async with serving(Config(scheduler=SchedulerConfig(max_waiting=1)), keys=key_file("ann")) as endpoint:
        async with endpoint.engine.admit(1, 0):
            refused = await ask(endpoint, "ann")
        assert "(scheduler.max_waiting)" in refused[2]["error"]["message"]
        assert endpoint.server.service.metrics.usage["ann"].refused == 1
        assert (await ask(endpoint, "ann", prompt=[5] * 300))[0] == 400

    line = vars([record for record in caplog.records if record.name == "infd.access"][-1])
    assert (line["error"], line["prompt"], line["limit"]) == ("context_length_exceeded", 300, 255)


async def test_each_ended_request_is_compared_with_the_slowest():
    async with serving(Config(), keys=key_file("ann :team")) as endpoint:
        await ask(endpoint, "ann")
        slowest = endpoint.server.service.engine.slowest

    (ended,) = slowest.read("total")
    assert (ended.client, ended.tenant, ended.finish) == ("ann", "team", "length")
    assert (ended.prompt, ended.cached, ended.generated) == (3, 0, 7)
    assert 0 <= ended.queue_ms <= ended.ttft_ms <= ended.total_ms
    assert time.time() - 60 < ended.time <= time.time()
    assert slowest.read("ttft") == slowest.read("queue") == [ended]
