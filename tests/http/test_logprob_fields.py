"""Which log-probabilities a request gets: listed tokens, all tokens, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from infd.config import LimitsConfig
from infd.errors import InvalidRequest
from infd.http import sampling
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
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "logprobs_mode": "cooked"}),
        ("/v1/responses", {"input": "a", "top_logprobs": -1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprob_token_ids": [1]}),
    ],
)
async def test_what_cannot_be_reported_is_refused(endpoint: Endpoint, path: str, fields: dict[str, Any]):
    assert (await endpoint.post(path, fields))[0] == 400
