"""Checks before a request is queued: keys, caps, room in the queue; and timeouts of requests."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import Config, SchedulerConfig, ServerConfig
from infd.http.auth import Keys
from tests.fakes import FakeExecutor, capacity
from tests.http.endpoint import Endpoint, serving
from tests.http.test_connections import connect, said
from tests.http.test_streaming import COMPLETIONS, held, until

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Coroutine

PROMPT = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 0}


def keys(*lines: str) -> Keys:
    text = [line.replace("#", sha256(line.partition(":")[0].encode()).hexdigest()) for line in lines]
    return Keys.parse("\n".join(text), "keys")


def asking(endpoint: Endpoint, key: str, **fields: Any) -> Coroutine[Any, Any, tuple[int, dict[str, Any]]]:
    return endpoint.post(COMPLETIONS, {**PROMPT, **fields}, Authorization=f"Bearer {key}")


async def test_requests_in_flight_are_bounded_per_key():
    async with held(keys=keys("ann:# in_flight=2", "bob:#")) as endpoint:
        anns = [asyncio.create_task(asking(endpoint, "ann")) for _ in range(2)]
        await until(lambda: len(endpoint.engine.requests()) == 2)

        status, body = await asking(endpoint, "ann")
        bob = asyncio.create_task(asking(endpoint, "bob"))

        assert (status, body["error"]["code"]) == (429, "key_in_flight")
        await until(lambda: len(endpoint.engine.requests()) == 3)
        endpoint.executor.gate.set()
        assert [(await task)[0] for task in (*anns, bob)] == [200] * 3
        assert (await asking(endpoint, "ann"))[0] == 200


async def test_a_request_that_fails_or_leaves_frees_its_keys_place():
    async with held(keys=keys("ann:# in_flight=1")) as endpoint:
        assert (await asking(endpoint, "ann", temperature=9))[0] == 400
        leaving = asyncio.create_task(asking(endpoint, "ann"))
        await until(endpoint.engine.requests)
        leaving.cancel()
        await until(lambda: not endpoint.engine.requests())
        endpoint.executor.gate.set()

        assert (await asking(endpoint, "ann"))[0] == 200


async def test_a_key_cannot_ask_for_an_earlier_place_than_its_own():
    async with serving(keys=keys("ann:# priority=5", "bob:#")) as endpoint:
        status, body = await asking(endpoint, "ann", priority=4)
        assert (status, body["error"]["param"]) == (400, "priority")
        assert (await asking(endpoint, "ann", priority=5))[0] == 200
        assert (await asking(endpoint, "bob", priority=-9))[0] == 200


async def test_a_request_that_names_no_priority_gets_its_keys_own():
    async with held(keys=keys("ann:# priority=5", "bob:# priority=-5")) as endpoint:
        tasks = []
        for key, count in (("ann", 1), ("bob", 2)):
            tasks.append(asyncio.create_task(asking(endpoint, key)))
            await until(lambda count=count: len(endpoint.engine.requests()) == count)

        assert [row.priority for row in endpoint.engine.requests()] == [5, 0]
        endpoint.executor.gate.set()
        await asyncio.gather(*tasks)


@asynccontextmanager
async def overloaded() -> AsyncIterator[Endpoint]:
    """Run an endpoint with one running and one waiting request, and no room for a third request."""
    executor = FakeExecutor(capacity(rows=1, pages=64, max_model_len=64))
    executor.gate.clear()
    async with serving(Config(scheduler=SchedulerConfig(max_waiting=1)), executor=executor) as endpoint:
        first = asyncio.create_task(endpoint.complete())
        await until(lambda: endpoint.engine.status().running == 1)
        second = asyncio.create_task(endpoint.complete())
        await until(lambda: endpoint.engine.status().waiting == 1)
        yield endpoint
        executor.gate.set()
        assert (await first)["choices"] == (await second)["choices"]


async def test_under_overload_refusals_wait_neither_for_a_body_nor_for_the_device():
    async with overloaded() as endpoint:
        before = endpoint.engine.core.in_flight.accepted
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"

        clients = [await connect(endpoint, head) for _ in range(100)]
        answers = [await heard(client) for client in clients]

        assert all(answer.startswith(b"HTTP/1.1 429 ") for answer in answers)
        assert all(re.search(rb"\r\nRetry-After: [1-9]\d?\r\n", answer) for answer in answers)
        assert endpoint.server.service.metrics.rejected == {"queue_full": 100}
        assert (endpoint.engine.core.in_flight.accepted, endpoint.executor.device.steps) == (before, 0)
        for client in clients:
            client.close()


async def heard(client: socket.socket) -> bytes:
    """Return the first bytes that the server sends."""
    async with asyncio.timeout(20):  # reached only if the test fails
        return await asyncio.get_running_loop().sock_recv(client, 65536)


def within(**settings: float) -> Config:
    return Config(server=ServerConfig(**settings))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_waits_too_long_is_503_and_was_never_begun(stream: bool):
    executor = FakeExecutor(capacity(rows=1, pages=64, max_model_len=64))
    executor.gate.clear()
    async with serving(within(queue_timeout_s=0.1), executor=executor) as endpoint:
        first = asyncio.create_task(endpoint.complete(max_tokens=3))
        await until(lambda: endpoint.engine.status().running)

        async with endpoint.session.post(COMPLETIONS, json={**PROMPT, "stream": stream}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"]["code"] == "queue_timeout"

        executor.gate.set()
        assert (await first)["choices"][0]["finish_reason"] == "length", "who has begun waits no more"
        assert endpoint.engine.status().terminal["error"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_lives_too_long_before_its_first_token_is_504(stream: bool):
    async with held(config=within(request_timeout_s=0.05)) as endpoint:
        async with endpoint.session.post(COMPLETIONS, json={**PROMPT, "stream": stream}) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "request_timeout"
        assert not endpoint.engine.requests()


async def test_inputs_to_pool_have_the_deadlines_of_prompts():
    pooled = {
        "/v1/embeddings": {"input": "a"},
        "/rerank": {"query": "a", "documents": ["b", "c"]},
        "/embed": {"inputs": "a"},
    }
    async with held(config=within(request_timeout_s=0.05)) as endpoint:
        for path, body in pooled.items():
            assert (await endpoint.post(path, body))[0] == 504, path
        assert not endpoint.engine.requests()
    executor = FakeExecutor(capacity(rows=1, pages=64, max_model_len=64))
    executor.gate.clear()
    async with serving(within(queue_timeout_s=0.05), executor=executor) as endpoint:
        first = asyncio.create_task(endpoint.complete(max_tokens=3))
        await until(lambda: endpoint.engine.status().running)
        assert [(await endpoint.post(path, body))[0] for path, body in pooled.items()] == [503] * len(pooled)
        executor.gate.set()
        await first
        assert endpoint.engine.status().terminal["error"] == 4, "one for each input"


async def test_a_stream_that_lives_too_long_ends_in_an_error_event():
    async with serving(within(request_timeout_s=0.3), executor=FakeExecutor(step_s=0.01)) as endpoint:
        *events, last = await endpoint.events(COMPLETIONS, {**PROMPT, "max_tokens": 200})

        assert events
        assert last["error"]["code"] == "request_timeout"
        await endpoint.idle()
        assert endpoint.engine.status().pages_referenced == 0


async def test_time_that_runs_out_while_a_request_is_prepared_ends_it_too():
    async with serving(within(queue_timeout_s=0.01)) as endpoint:
        engine = endpoint.engine
        async with engine.admit(1, 0) as ticket:
            await until(lambda: ticket.expired)
            with pytest.raises(type(ticket.expired)):
                await ticket.submit()


@pytest.mark.parametrize("path", ["/readyz", "/health", "/v1/models"])
async def test_every_503_has_retry_after(path: str):
    async with serving(load=False) as endpoint, endpoint.session.get(path) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0


async def test_a_health_check_is_answered_while_the_queue_is_full():
    async with overloaded() as endpoint:
        answer = await said(await connect(endpoint, b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))

        assert answer.startswith(b"HTTP/1.1 200")
