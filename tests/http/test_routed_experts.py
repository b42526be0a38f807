"""`return_routed_experts`: each choice reports the experts of its tokens, streamed or not."""

from __future__ import annotations

from array import array
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from infd.config import Config, LimitsConfig
from tests.fakes import EXPERTS, FakeExecutor, capacity, continuation, routed
from tests.http.endpoint import serving
from tests.http.model import tokenizer

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint

PROMPT = [5, 6, 7]


def check(choice: dict[str, Any], prompt: list[int], generated: list[int]) -> None:
    """Assert that a choice reports the experts of all its tokens but the last."""
    report, tokens = choice["routed_experts"], [*prompt, *generated][:-1]
    assert report["dtype"] == "int16"
    assert report["shape"] == [len(tokens), EXPERTS.layers, EXPERTS.chosen]
    assert b64decode(report["data"], validate=True) == routed(tokens, len(prompt))


async def test_a_completion_reports_experts_of_prompt_and_answer(endpoint: Endpoint):
    body = await endpoint.complete(max_tokens=5, return_routed_experts=True)
    (choice,) = body["choices"]

    check(choice, PROMPT, continuation(PROMPT, 5))
    assert len(array("h", b64decode(choice["routed_experts"]["data"]))) == 7 * EXPERTS.layers * EXPERTS.chosen
    assert "routed_experts" not in (await endpoint.complete(max_tokens=5))["choices"][0]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"return_token_ids": True}, {"prompt_logprobs": 0}])
async def test_a_stream_reports_experts_in_the_last_event_of_each_choice(endpoint: Endpoint, fields: dict[str, Any]):
    asked = {"prompt": PROMPT, "seed": 0, "max_tokens": 4, "n": 2, "return_routed_experts": True, **fields}
    found = {}
    for event in await endpoint.events("/v1/completions", asked):
        for choice in event["choices"]:
            assert ("routed_experts" in choice) == (choice["finish_reason"] is not None)
            if choice["finish_reason"]:
                found[choice["index"]] = choice
    for index in (0, 1):
        check(found[index], PROMPT, continuation(PROMPT, 4, seed=index))


async def test_an_answer_cut_by_a_stop_string_reports_its_own_tokens(endpoint: Endpoint):
    generated = continuation(PROMPT, 6)
    stop = tokenizer().decode(generated[2:3])
    length = next(n for n in range(1, 7) if stop in tokenizer().decode(generated[:n]))
    (choice,) = (await endpoint.complete(max_tokens=6, stop=stop, return_routed_experts=True))["choices"]

    assert (choice["finish_reason"], length < 6) == ("stop", True)
    check(choice, PROMPT, generated[:length])


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_reports_experts(endpoint: Endpoint, stream: bool):
    asked = {"messages": [{"role": "user", "content": "hi"}], "seed": 0, "max_tokens": 3, "return_token_ids": True}
    asked["return_routed_experts"] = True
    if stream:
        events = await endpoint.events("/v1/chat/completions", asked)
        prompt = next(event["prompt_token_ids"] for event in events if "prompt_token_ids" in event)
        (choice,) = (choice for event in events for choice in event["choices"] if choice["finish_reason"])
    else:
        _, body = await endpoint.post("/v1/chat/completions", asked)
        prompt, (choice,) = body["prompt_token_ids"], body["choices"]

    check(choice, prompt, continuation(prompt, 3))


async def test_only_scoring_reports_the_experts_of_all_prompt_tokens_but_the_last(endpoint: Endpoint):
    fields = {"max_tokens": 0, "prompt_logprobs": 0, "return_routed_experts": True}
    (choice,) = (await endpoint.complete(**fields))["choices"]

    check(choice, PROMPT, [])


async def test_a_model_without_experts_refuses_by_name():
    dense = replace(capacity(pages=64, step_tokens=64), experts=None)
    async with serving(executor=FakeExecutor(dense)) as endpoint:
        for path in ("completions", "chat/completions"):
            body = {"prompt": PROMPT, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            body["return_routed_experts"] = True
            status, answer = await endpoint.post(f"/v1/{path}", body)
            assert status == 400
            assert answer["error"]["param"] == "return_routed_experts"
            assert (await endpoint.post(f"/v1/{path}", {**body, "return_routed_experts": False}))[0] == 200


async def test_a_report_larger_than_the_limit_is_refused():
    per_token = 2 * EXPERTS.layers * EXPERTS.chosen
    async with serving(Config(limits=LimitsConfig(routed_experts_bytes=2 * 3 * per_token))) as small:
        fields = {"prompt": PROMPT, "max_tokens": 2, "return_routed_experts": True}
        assert (await small.post("/v1/completions", {**fields, "n": 2}))[0] == 200
        status, answer = await small.post("/v1/completions", {**fields, "n": 3})
        assert (status, answer["error"]["param"]) == (400, "return_routed_experts")


@pytest.mark.parametrize(("path", "fields"), [("/v1/completions", {"use_beam_search": True}), ("/infill", {})])
async def test_beams_and_infill_refuse_by_name(endpoint: Endpoint, path: str, fields: dict[str, Any]):
    body = {"prompt": PROMPT, "input_prefix": "a", "input_suffix": "b", "return_routed_experts": True, **fields}
    if path == "/infill":
        body["prompt"] = ""
    status, answer = await endpoint.post(path, body)
    assert (status, answer["error"]["param"]) == (400, "return_routed_experts")
