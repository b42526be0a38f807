"""Every row of the table of errors, over a real socket."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from yarl import URL

from infd.config import Config, LimitsConfig, MetricsConfig, SchedulerConfig, ServerConfig
from infd.engine.lifecycle.state import State
from infd.http.auth import Keys
from tests.fakes import VOCAB, FakeExecutor, capacity
from tests.http.endpoint import decode_events, serving
from tests.http.model import MODEL

if TYPE_CHECKING:
    from infd.scheduler.plan import StepPlan
    from tests.http.endpoint import Endpoint

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (CHAT, b"{", 400, None, "invalid_json"),
        (CHAT, b'{"messages":' + b"[" * 200 + b"]" * 200 + b"}", 400, None, "json_too_deep"),
        (CHAT, {"messages": [USER, {"role": "user", "content": 3}]}, 400, "messages[1].content", None),
        (CHAT, {"messages": [USER], "temperature": 3}, 400, "temperature", None),
        (CHAT, {"messages": [{**USER, "content": "refuse me"}]}, 400, "messages", None),
        (CHAT, {"messages": [USER], "tools": []}, 400, "tools", None),
        (CHAT, {"messages": [USER], "tools": [{}]}, 400, "tools[0].type", None),
        (CHAT, {"messages": [USER], "stream_options": {}}, 400, "stream_options", None),
        (CHAT, {"messages": [USER], "top_logprobs": 1}, 400, "top_logprobs", None),
        (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", None),
        (CHAT, {"messages": [USER], "max_tokens": 256}, 400, "max_tokens", "context_length_exceeded"),
        (CHAT, {"messages": [{**USER, "content": "xyz" * 100}]}, 400, "messages", "context_length_exceeded"),
        (
            CHAT,
            {"messages": [USER], "add_generation_prompt": True, "continue_final_message": True},
            400,
            "continue_final_message",
            None,
        ),
        (CHAT, {"messages": [USER], "model": "gpt-4"}, 404, "model", "model_not_found"),
        (COMPLETIONS, {"prompt": [VOCAB]}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt[0]", None),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs", None),
        (COMPLETIONS, {"prompt": ["a"] * 1000, "n": 5}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": [5] * 256}, 400, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", None),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True, "n": 2}, 400, "n", None),
        (COMPLETIONS, {"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of", None),
        (COMPLETIONS, {"prompt": "a", "best_of": 129}, 400, "best_of", None),
        (COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}, 400, "best_of", None),
        (COMPLETIONS, {"prompt": "a", "bad_words": ["a", " "]}, 400, "bad_words[1]", None),
        (COMPLETIONS, {"prompt": "a", "bad_words": ["x" * 16385]}, 400, "bad_words", None),
        (COMPLETIONS, {"prompt": "a", "bad_words": ["é" * 8193]}, 400, "bad_words", None),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids", None),
        (COMPLETIONS, {"prompt": "a", "thinking_token_budget": 5}, 400, "thinking_token_budget", "unsupported"),
        (COMPLETIONS, {"prompt": [5] * 300, "truncate_prompt_tokens": 256}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions/render", {"prompt": [VOCAB]}, 400, "prompt", None),
        ("/v1/chat/completions/render", {"messages": [{**USER, "content": 3}]}, 400, "messages[0].content", None),
        ("/tokenize", {}, 400, "prompt", None),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt", None),
        ("/detokenize", {"tokens": [VOCAB]}, 400, "tokens", None),
        ("/v1/nothing", {}, 404, None, "unknown_path"),
        ("/livez", {}, 405, None, "method_not_allowed"),
    ],
)
async def test_a_bad_request_gets_its_error(
    endpoint: Endpoint, path: str, body: Any, status: int, param: str | None, code: str | None
):
    answered, error = await endpoint.post(path, body)

    assert answered == status
    assert error["error"].pop("message")
    assert error["error"] == {"type": "invalid_request_error", "param": param, "code": code}
    assert endpoint.engine.status().waiting == 0


async def test_a_wrong_method_names_the_right_one(endpoint: Endpoint):
    async with endpoint.session.get(CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_too_large_is_refused(declared: bool):
    config = Config(server=ServerConfig(max_body_bytes=1024))
    async with serving(config) as endpoint:

        async def chunks() -> Any:
            yield b" " * 2000

        async with endpoint.session.post(CHAT, data=b" " * 2000 if declared else chunks()) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "body_too_large"


async def test_a_compressed_body_is_refused(endpoint: Endpoint):
    status, error = await endpoint.post(CHAT, b"\x1f\x8b", **{"Content-Encoding": "gzip"})

    assert status == 400
    assert "compressed" in error["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER], "model": "x" * 10_000}),
        (CHAT, {"messages": [{**USER, "role": "x" * 10_000}]}),
        (CHAT, {"messages": [{**USER, "content": [{"type": "x" * 10_000}]}]}),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"x" * 10_000: 1}}),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "'`x" * 10_000}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"9" * 4000: 1}}),
        (COMPLETIONS, b'{"prompt": "a", "stop_token_ids": [%b]}' % (b"9" * 4000)),
        ("/" + "x" * 4000, {}),
    ],
)
async def test_an_error_quotes_little_of_the_request(endpoint: Endpoint, path: str, body: Any):
    _, answer = await endpoint.post(path, body)

    assert len(str(answer["error"])) < 700


async def test_a_body_that_never_arrives_is_not_waited_for_for_ever():
    async with serving(Config(server=ServerConfig(body_timeout_s=0.05))) as endpoint:

        async def chunks() -> Any:
            yield b"{"
            await asyncio.Event().wait()

        async with endpoint.session.post(CHAT, data=chunks()) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "body_timeout"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"HELO there\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X-More: x\r\n" * 200 + b"\r\n",
        b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
async def test_bytes_that_are_not_http_get_400(endpoint: Endpoint, request_bytes: bytes):
    head, _, body = (await converse(endpoint, request_bytes)).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert b"aiohttp" not in head


async def converse(endpoint: Endpoint, sent: bytes) -> bytes:
    """Return all bytes that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection(*endpoint.url.removeprefix("http://").split(":"))
    writer.write(sent)
    received = await reader.read()
    writer.close()
    await writer.wait_closed()
    return received


async def test_before_the_model_is_loaded_every_request_is_503_with_retry_after():
    async with serving(load=False) as endpoint:
        for path, body in (
            (CHAT, {"messages": [USER]}),
            (COMPLETIONS, {"prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            async with endpoint.session.post(path, json=body) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) > 0
                assert (await response.json())["error"]["code"] == "starting"
        async with endpoint.session.get("/v1/models") as response:
            assert response.status == 503


async def test_while_draining_new_requests_are_503_and_the_connection_is_closed(endpoint: Endpoint):
    endpoint.engine.lifecycle.enter(State.DRAINING)

    async with endpoint.session.post(COMPLETIONS, json={"prompt": "a"}) as response:
        assert response.status == 503
        assert response.headers["Connection"] == "close"
        assert "Retry-After" in response.headers


async def test_a_full_queue_is_429_and_changes_no_other_answer():
    config = Config(scheduler=SchedulerConfig(max_waiting=2))
    executor = FakeExecutor(capacity(rows=1, pages=64, max_model_len=64))
    async with serving(config, executor=executor) as endpoint:
        executor.gate.clear()
        running = [asyncio.create_task(endpoint.complete(n=1)) for _ in range(2)]
        while len(endpoint.engine.requests()) < 2:
            await asyncio.sleep(0)

        async with endpoint.session.post(COMPLETIONS, json={"prompt": "a", "n": 2}) as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
            assert (await response.json())["error"]["type"] == "overloaded_error"

        executor.gate.set()
        bodies = await asyncio.gather(*running)
        assert bodies[0]["choices"] == bodies[1]["choices"]


async def test_an_internal_error_is_a_500_that_names_the_request(caplog: pytest.LogCaptureFixture):
    def fault(plan: StepPlan) -> None:
        raise RuntimeError("secret detail")

    async with serving(executor=FakeExecutor(fault=fault)) as endpoint:
        status, error = await endpoint.post(COMPLETIONS, {"prompt": "a"}, **{"X-Request-Id": "mine"})

    assert status == 500
    assert "mine" in error["error"]["message"]
    assert "secret" not in error["error"]["message"]
    assert error["error"]["type"] == "internal_error"


async def test_after_a_stream_has_begun_an_error_is_its_last_event():
    def fault(plan: StepPlan) -> None:
        if any(span.start > 8 for span in plan.spans):
            raise RuntimeError("broken")

    async with (
        serving(executor=FakeExecutor(fault=fault)) as endpoint,
        endpoint.session.post(COMPLETIONS, json={"prompt": [5, 6, 7], "stream": True, "max_tokens": 20}) as response,
    ):
        assert response.status == 200
        *events, last = decode_events(await response.text())

    assert events
    assert last["error"]["code"] == "internal_error"


async def test_a_stream_that_fails_before_its_first_token_keeps_its_status():
    def fault(plan: StepPlan) -> None:
        raise RuntimeError("broken")

    async with serving(executor=FakeExecutor(fault=fault)) as endpoint:
        status, error = await endpoint.post(COMPLETIONS, {"prompt": "a", "stream": True})

    assert (status, error["error"]["code"]) == (500, "internal_error")


OPEN = ["/livez", "/readyz", "/health", "/ping", "/version"]
CLOSED = [
    "/v1/models",
    "/metrics",
    "/load",
    "/",
    "/nothing",
    "/livez/",
    "//livez",
    "/livez%2f..%2fmetrics",
    "/./livez",
    "/LIVEZ",
    "/health;x",
]


async def test_with_keys_only_health_is_open():
    async with serving(keys=Keys.of("secret")) as endpoint:
        assert [await status_of(endpoint, path) for path in OPEN] == [200] * len(OPEN)
        assert [await status_of(endpoint, path) for path in CLOSED] == [401] * len(CLOSED)
        status, error = await endpoint.post(COMPLETIONS, {"prompt": "a"})
        assert (status, error["error"]["code"]) == (401, "invalid_api_key")
        assert (await endpoint.post(COMPLETIONS, {"prompt": "a"}, Authorization="Bearer secret"))[0] == 200
        assert (await endpoint.post(COMPLETIONS, {"prompt": "a"}, Authorization="Bearer Secret"))[0] == 401


async def test_metrics_are_open_where_a_setting_says_so():
    async with serving(Config(metrics=MetricsConfig(public=True)), keys=Keys.of("secret")) as endpoint:
        assert await status_of(endpoint, "/metrics") == 200
        assert await status_of(endpoint, "/load") == 401


async def test_an_odd_host_or_target_opens_nothing():
    async with serving(keys=Keys.of("secret")) as endpoint:
        for target in (b"http://x/livez", b"/metrics?/livez", b"/metrics#/livez", b"/v1/models?path=/livez"):
            request = b"GET " + target + b" HTTP/1.1\r\nHost: /livez\r\nConnection: close\r\n\r\n"
            assert re.match(rb"HTTP/1.[01] (401|400) ", await converse(endpoint, request)), target


async def status_of(endpoint: Endpoint, path: str) -> int:
    async with endpoint.session.get(URL(endpoint.url + path, encoded=True)) as response:
        return response.status


async def test_request_ids_come_back_and_each_answer_has_one_of_its_own(endpoint: Endpoint):
    async def ids(**headers: str) -> tuple[str, str]:
        async with endpoint.session.post(COMPLETIONS, json={"prompt": "a"}, headers=headers) as response:
            return response.headers["X-Request-Id"], (await response.json())["id"]

    (sent_a, id_a), (sent_b, id_b) = await ids(**{"X-Request-Id": "mine"}), await ids(**{"X-Request-Id": "mine"})
    internal, id_c = await ids()
    too_long, _ = await ids(**{"X-Request-Id": "x" * 129})

    assert sent_a == sent_b == "mine"
    assert id_a != id_b
    assert id_c == f"cmpl-{internal}"
    assert too_long != "x" * 129


async def test_streams_and_errors_carry_the_request_id_too(endpoint: Endpoint):
    said = {"prompt": "a", "stream": True, "request_id": "in-the-body"}
    async with endpoint.session.post(COMPLETIONS, json=said) as response:
        assert response.headers["X-Request-Id"] == "in-the-body"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.content_type == "text/event-stream"
    async with endpoint.session.get("/nothing") as response:
        assert response.headers["X-Request-Id"]


async def test_the_access_line_of_a_refusal_names_client_request_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "infd.access")
    async with serving() as endpoint:
        await endpoint.post("/v1/completions", {"prompt": "hi", "temperature": 9})
        await endpoint.post("/v1/completions", {"prompt": [1] * 1000})
        await endpoint.post("/v1/nonsense", {})
        await endpoint.complete(max_tokens=1)

    told = [vars(record) for record in caplog.records if record.name == "infd.access"]
    assert [(line.get("error"), line.get("param")) for line in told] == [
        ("invalid_request", "temperature"),
        ("context_length_exceeded", "prompt"),
        ("unknown_path", None),
        (None, None),
    ]
    assert {line["peer"] for line in told} == {"127.0.0.1"}


async def test_one_access_line_is_written_for_each_request_and_none_for_probes(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "infd.access")

    await endpoint.post(COMPLETIONS, {"prompt": "a secret"}, **{"X-Request-Id": "mine"})
    await status_of(endpoint, "/livez")
    await status_of(endpoint, "/nothing")
    await asyncio.sleep(0)

    lines = [vars(record) for record in caplog.records if record.name == "infd.access"]
    assert [(line["request_id"], line["status"]) for line in lines if line["path"] != "/nothing"] == [("mine", 200)]
    assert [line["status"] for line in lines] == [200, 404]
    assert "secret" not in msgspec.json.encode(lines, enc_hook=str).decode()


async def test_a_scrape_is_logged_only_at_debug_level(endpoint: Endpoint, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG", "infd.access")

    await status_of(endpoint, "/metrics")
    await status_of(endpoint, "/load")

    assert [record.levelname for record in caplog.records if record.name == "infd.access"] == ["DEBUG", "INFO"]


async def test_models_are_listed_under_all_their_names(endpoint: Endpoint):
    async with endpoint.session.get("/v1/models") as response:
        listed = await response.json()
    async with endpoint.session.get(f"/v1/models/{MODEL}") as response:
        one = await response.json()

    assert [card["id"] for card in listed["data"]] == [MODEL, "alias"]
    assert one == listed["data"][0]
    assert one["max_model_len"] == 256
    assert await status_of(endpoint, "/v1/models/org%2Ffake-model") == 200
    assert await status_of(endpoint, "/v1/models/org/other") == 404


async def test_limits_are_settings():
    async with serving(Config(limits=LimitsConfig(choices=2, json_depth=8))) as endpoint:
        assert (await endpoint.post(COMPLETIONS, {"prompt": "a", "n": 3, "temperature": 1}))[0] == 400
        deep: list[Any] = []
        for _ in range(8):
            deep = [deep]
        assert (await endpoint.post(COMPLETIONS, {"prompt": "a", "fancy": deep}))[0] == 400


@pytest.mark.parametrize(
    ("state", "live", "healthy", "ready"),
    [
        (State.STARTING, 200, 503, 503),
        (State.READY, 200, 200, 200),
        (State.DRAINING, 200, 200, 503),
        (State.PAUSED, 200, 200, 503),
        (State.SLEEPING, 200, 200, 503),
        (State.FAILED, 503, 503, 503),
    ],
)
async def test_health_follows_the_state(endpoint: Endpoint, state: State, live: int, healthy: int, ready: int):
    endpoint.engine.lifecycle.enter(state, "because")

    assert await status_of(endpoint, "/livez") == live
    assert await status_of(endpoint, "/health") == healthy
    assert await status_of(endpoint, "/ping") == healthy
    assert await status_of(endpoint, "/readyz") == ready
    async with endpoint.session.get("/readyz?verbose") as response:
        said = await response.json()
    assert (said["state"], said["reason"]) == (state.value, "because")
    assert {"since", "last_step_age_s"} <= said.keys()


async def test_load_version_and_metrics_answer(endpoint: Endpoint):
    async with endpoint.session.get("/load") as response:
        assert await response.json() == {"server_load": 0, "running": 0, "waiting": 0}
    async with endpoint.session.get("/version") as response:
        assert "version" in await response.json()
    async with endpoint.session.get("/metrics") as response:
        assert response.content_type == "text/plain"
        assert "infd_" in await response.text()


async def test_refusals_are_counted_by_reason(endpoint: Endpoint):
    await endpoint.post(COMPLETIONS, {"prompt": "a", "model": "gpt-4"})
    await endpoint.post(COMPLETIONS, {"prompt": 5})
    await endpoint.post(COMPLETIONS, {"prompt": "a"})

    assert endpoint.server.service.metrics.rejected == {"model_not_found": 1, "invalid_request": 1}


async def test_a_closed_listener_refuses_connections_and_open_ones_continue(endpoint: Endpoint):
    async with endpoint.session.get("/livez") as response:
        assert response.status == 200

    endpoint.server.close_listeners()

    async with endpoint.session.get("/livez") as response:
        assert response.status == 200
    async with aiohttp.ClientSession(endpoint.url) as stranger:
        with pytest.raises(aiohttp.ClientConnectorError):
            await stranger.get("/livez")
