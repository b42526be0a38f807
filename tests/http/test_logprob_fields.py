"""Which log-probabilities a request gets: listed tokens, all tokens, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from infd.config import Config, LimitsConfig, ServerConfig
from infd.errors import InvalidRequest
from infd.http import sampling
from tests.http.endpoint import serving
from tests.http.model import served
from tests.http.test_sampling import asked

if TYPE_CHECKING:
    from infd.request import SamplingParams
    from tests.http.endpoint import Endpoint


def params(*, logprobs: int | None, **fields: Any) -> SamplingParams:
    return sampling.sampling_params(asked(**fields), served(256), max_tokens=10, choices=1, logprobs=logprobs)


def test_listed_tokens_are_reported_once_each():
    found = params(logprobs=0, logprob_token_ids=[5, 3, 5], logprobs_mode="processed_logits")
    assert (found.logprobs, found.logprob_ids, found.logprobs_mode) == (0, (5, 3), "processed_logits")


@pytest.mark.parametrize(
    ("logprobs", "fields"), [(None, {"logprob_token_ids": [1]}), (0, {"logprob_token_ids": [10**6]})]
)
def test_listed_tokens_need_logprobs_and_a_vocabulary(logprobs: int | None, fields: dict[str, Any]):
    with pytest.raises(InvalidRequest) as refused:
        params(logprobs=logprobs, **fields)
    assert refused.value.param == "logprob_token_ids"


def test_all_tokens_are_reported_only_where_the_settings_allow_as_many():
    model = served(256)
    assert sampling.alternatives(-1, model, LimitsConfig(top_logprobs=10**6)) == model.vocab_size
    assert sampling.alternatives(5, model, LimitsConfig()) == 5
    with pytest.raises(InvalidRequest, match=r"limits\.top_logprobs"):
        sampling.alternatives(-1, model, LimitsConfig())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": -1},
        ),
        ("/v1/completions", {"prompt": "a", "logprobs": -1}),
        ("/v1/completions", {"prompt": "a", "logprobs": -1, "echo": True}),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -1}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "logprobs_mode": "cooked"}),
        ("/v1/responses", {"input": "a", "top_logprobs": -1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprob_token_ids": [1]}),
    ],
)
async def test_what_cannot_be_reported_is_refused(endpoint: Endpoint, path: str, fields: dict[str, Any]):
    assert (await endpoint.post(path, fields))[0] == 400


async def test_all_tokens_of_a_prompts_positions_are_reported():
    size = served(256).vocab_size
    config = Config(limits=LimitsConfig(top_logprobs=size))
    async with serving(config) as endpoint:
        answer = await endpoint.complete(max_tokens=1, prompt_logprobs=-1)
        first, *others = answer["choices"][0]["prompt_logprobs"]
        assert first is None
        assert [len(each) for each in others] == [size, size]
        chat = await endpoint.chat(max_tokens=1, prompt_logprobs=-1)
        assert {len(each) for each in chat["prompt_logprobs"][1:]} == {size}


@pytest.mark.parametrize(("mode", "found"), [(None, "processed_logits"), ("raw_logprobs", "raw_logprobs")])
async def test_the_servers_mode_holds_for_requests_without_one(mode: str | None, found: str):
    config = Config(server=ServerConfig(logprobs_mode="processed_logits"))
    async with serving(config) as endpoint:
        modes: set[str] = set()
        add = endpoint.engine.core.scheduler.add

        def watch(seq: Any, *place: Any, **number: int) -> None:
            modes.add(seq.request.wants[0].sampling.logprobs_mode)
            add(seq, *place, **number)

        endpoint.engine.core.scheduler.add = watch  # type: ignore[method-assign]
        await endpoint.complete(max_tokens=1, logprobs=1, **({} if mode is None else {"logprobs_mode": mode}))
        assert modes == {found}
