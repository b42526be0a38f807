"""`infdctl bench` as a process."""

from __future__ import annotations

import msgspec

from infd.admin.ctl.benchview import differences
from infd.http.auth import Keys
from infd.loadgen.datasets.spec import Synthetic
from tests.admin.test_ctl import infdctl
from tests.bench.fake_server import FakeOpenAI
from tests.http.endpoint import serving


async def test_json_carries_settings_and_figures() -> None:
    async with FakeOpenAI().serving() as server:
        code, out, err = await infdctl(
            "bench", "--url", server.url, "--requests", "3", "--output-tokens", "4", "--seed", "5", "--json"
        )
    assert code == 0, err
    (report,) = msgspec.json.decode(out)["runs"]
    assert report["settings"]["seed"] == 5
    assert report["requests"] == {"completed": 3, "failed": 0, "errors": {}, "unfinished": 0}
    assert report["tokens"]["output"] == 12
    assert set(report["latency_ms"]) == {"ttft", "inter_token", "per_token", "e2e"}
    assert set(report["latency_ms"]["ttft"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
    assert "3 requests to" in err


async def test_the_table_shows_percentiles_and_errors() -> None:
    async with FakeOpenAI(fail=["", "refuse", ""].__getitem__).serving() as server:
        code, out, err = await infdctl(
            "bench", "--url", server.url, "--requests", "2", "--output-tokens", "4", "--concurrency", "1"
        )
    assert code == 1
    assert err.endswith("infdctl: 1 of 2 requests failed\n")
    assert "http 429 queue_full" in out
    assert "first token" in out
    assert "P99" in out


async def test_a_key_is_taken_from_the_named_variable() -> None:
    async with FakeOpenAI().serving() as server:
        options = ("bench", "--url", server.url, "--requests", "1", "--api-key-env", "MY_KEY")
        code, out, _ = await infdctl(*options, "--json", MY_KEY="s3cret")
        assert code == 0
        assert "s3cret" not in out
        assert server.headers[-1]["Authorization"] == "Bearer s3cret"
        code, _, err = await infdctl(*options)
    assert code == 2
    assert "MY_KEY" in err
    async with serving(keys=Keys.of("secret")) as endpoint:
        ask = ("bench", "--url", endpoint.url, "--requests", "1", "--input-tokens", "4", "--output-tokens", "2")
        code, _, err = await infdctl(*ask)
        assert (await infdctl(*ask, INFD_API_KEY="secret"))[0] == 0
    assert code == 1
    assert "--api-key-env" in err


async def test_no_server_exits_3_and_no_answer_exits_1() -> None:
    async with FakeOpenAI(fail=lambda number: "refuse").serving() as server:
        code, _, err = await infdctl("bench", "--url", server.url, "--requests", "2", "--warmup", "0")
        assert code == 1
        assert "2 of 2 requests failed" in err
    code, _, err = await infdctl("bench", "--url", server.url)
    assert code == 3
    assert "is the server running" in err


def test_settings_that_differ_are_shown_as_options() -> None:
    settings = [
        {"dataset": Synthetic(input_tokens=n, output_tokens=8), "body": body}
        for n, body in ((32, {}), (96, {"top_k": 1}))
    ]

    assert list(differences("", *settings)) == ["--input-tokens 32, 96", "--top-k not given, 1"]
