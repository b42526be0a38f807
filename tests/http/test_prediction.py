"""OpenAI's `prediction`: drafted where speculation is on, and no answer differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infd.config import Config, SchedulerConfig
from tests.http.scripted import speaking

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Again, with Z for 5."}]
NGRAM = Config(scheduler=SchedulerConfig(speculative="ngram", speculative_tokens=7))
PREDICTED = "0123456789#@&~{}wqzjkxvQZXJKVW"
ANSWER = PREDICTED.replace("5", "Z")


def predicted(content: Any) -> dict[str, Any]:
    return {"messages": USER, "seed": 0, "prediction": {"type": "content", "content": content}}


def steps(endpoint: Endpoint) -> int:
    return endpoint.executor.device.steps


@pytest.mark.parametrize("content", [PREDICTED, [{"type": "text", "text": part} for part in PREDICTED]])
async def test_a_prediction_saves_steps_and_its_tokens_are_counted(content: Any):
    async with speaking(ANSWER, config=NGRAM) as endpoint:
        status, body = await endpoint.post(CHAT, predicted(content))
        assert status == 200, body
        assert body["choices"][0]["message"]["content"] == ANSWER
        used, counted = body["usage"], body["usage"]["completion_tokens_details"]
        # Each step yields one token more than it accepts; the guesses behind the 5 are wrong, and behind the end.
        assert used["completion_tokens"] == len(ANSWER) + 1 == counted["accepted_prediction_tokens"] + steps(endpoint)
        assert steps(endpoint) <= 8
        assert counted["reasoning_tokens"] == 0
        assert 0 < counted["rejected_prediction_tokens"] <= 14


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["&~"]},  # in the middle of a draft
        {"stop": ["QZ", "{"], "include_stop_str_in_output": True},
        {"stop": ["~"], "min_tokens": 20},
        {"max_tokens": 9, "logprobs": True, "top_logprobs": 2},
        {"n": 3, "return_token_ids": True},
        {"stop_token_ids": [4], "ignore_eos": True, "max_tokens": 40},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_within_a_draft_where_it_ends_without_drafts(fields: dict[str, Any], stream: bool):
    async with speaking(ANSWER, ANSWER[::-1], ANSWER, config=NGRAM) as endpoint:
        asked, answers = {**predicted(PREDICTED), **fields}, []
        for speculative in (False, True):
            body = {**asked, "speculative": speculative}
            if stream:
                events = await endpoint.events(CHAT, {**body, "stream_options": {"include_usage": True}})
                answers.append((joined(events), events[-1]["usage"]["completion_tokens"]))
            else:
                status, answer = await endpoint.post(CHAT, body)
                assert status == 200, answer
                answers.append((answer["choices"], answer["usage"]["completion_tokens"]))
        assert sum(endpoint.engine.status().accepted_drafts) > 5
    assert answers[0] == answers[1]


def joined(events: list[Any]) -> list[tuple[Any, ...]]:
    """Return of each choice its text, its tokens, their log-probabilities and its ends."""
    found = []
    for index in range(3):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        likely = [token for choice in choices for token in (choice.get("logprobs") or {}).get("content") or ()]
        ends = [(choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]]
        found.append((text, ids, likely, ends))
    return found


async def test_no_more_tokens_are_drafted_than_the_settings_permit():
    for most in (1, 3):
        config = Config(scheduler=SchedulerConfig(speculative="ngram", speculative_tokens=most))
        async with speaking(ANSWER, config=config) as endpoint:
            await endpoint.post(CHAT, predicted(PREDICTED))
            assert max(span.drafts for step in endpoint.executor.issued for span in step.plan.spans) == most


async def test_drafts_are_counted_under_vllms_names():
    async with speaking(ANSWER, config=NGRAM) as endpoint:
        _, body = await endpoint.post(CHAT, predicted(PREDICTED))
        async with endpoint.session.get("/metrics") as response:
            page = await response.text()
    found = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("vllm:spec_decode") and {"engine", "model_name"} <= sample.labels.keys()
    }
    by_place = [found.pop(("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(place))) for place in range(7)]
    counted = body["usage"]["completion_tokens_details"]
    kept, rejected = (counted[f"{what}_prediction_tokens"] for what in ("accepted", "rejected"))

    assert found == {
        ("vllm:spec_decode_num_drafts_total", None): by_place[0] + 1,  # nothing is kept of the draft behind the end
        ("vllm:spec_decode_num_draft_tokens_total", None): kept + rejected,
        ("vllm:spec_decode_num_accepted_tokens_total", None): kept,
    }
    assert sum(by_place) == kept
    assert by_place == sorted(by_place, reverse=True)


async def test_streamed_usage_counts_the_prediction_too():
    async with speaking(ANSWER, config=NGRAM) as endpoint:
        asked = predicted(PREDICTED) | {"stream_options": {"include_usage": True}}
        *_, last = await endpoint.events(CHAT, asked)
        assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20


@pytest.mark.parametrize("content", ["wrong from the start", "", []])
async def test_a_wrong_prediction_changes_no_answer(content: Any):
    async with speaking(ANSWER, config=NGRAM) as endpoint:
        status, body = await endpoint.post(CHAT, predicted(content))
        assert status == 200, body
        assert body["choices"][0]["message"]["content"] == ANSWER
        assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


async def test_drafts_beside_an_empty_prediction_are_not_counted_as_its_tokens():
    async with speaking("abcd" * 12, config=NGRAM) as endpoint:
        _, body = await endpoint.post(CHAT, predicted(""))
        counted = body["usage"]["completion_tokens_details"]
        assert steps(endpoint) < body["usage"]["completion_tokens"]
        assert (counted["accepted_prediction_tokens"], counted["rejected_prediction_tokens"]) == (0, 0)


@pytest.mark.parametrize(("config", "field"), [(Config(), {}), (NGRAM, {"speculative": False})])
async def test_a_prediction_has_no_effect_without_speculation(config: Config, field: dict[str, Any]):
    async with speaking(ANSWER, config=config) as endpoint:
        status, body = await endpoint.post(CHAT, predicted(PREDICTED) | field)
        assert status == 200, body
        assert body["choices"][0]["message"]["content"] == ANSWER
        assert steps(endpoint) == len(ANSWER) + 1
        counted = body["usage"]["completion_tokens_details"]
        assert (counted["accepted_prediction_tokens"], counted["rejected_prediction_tokens"]) == (0, 0)


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
    ],
)
async def test_a_malformed_prediction_is_refused_by_name(prediction: Any, param: str):
    async with speaking(ANSWER) as endpoint:
        status, body = await endpoint.post(CHAT, {"messages": USER, "prediction": prediction})
        assert status == 400
        assert body["error"]["param"] == param, body
