from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import LimitsConfig
from infd.errors import CheckpointError, InvalidRequest, PromptTooLong, Unsupported
from infd.http import sampling
from infd.http.apis.chat import CHAT
from infd.http.apis.completions import COMPLETIONS
from infd.http.conversation import template_messages
from infd.http.json_body import decode
from infd.http.served_model import SamplingDefaults
from tests.fakes import VOCAB
from tests.http.model import served

if TYPE_CHECKING:
    from infd.http.schema.chat import ChatRequest
    from infd.http.schema.completions import CompletionRequest
    from infd.request import SamplingParams


def asked(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return decode(json.dumps(body).encode(), CHAT.decoder, 128)


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": "hi", **fields}).encode(), COMPLETIONS.decoder, 128)


def params(defaults: dict[str, float] | None = None, **fields: Any) -> SamplingParams:
    return sampling.sampling_params(
        asked(**fields), served(256, **(defaults or {})), max_tokens=10, choices=fields.get("n", 1), logprobs=None
    )


NEUTRAL = {
    "best_of": 1,
    "chat_template": None,
    "grammar_lazy": False,
    "guided_decoding_backend": "auto",
    "guided_json": None,
    "logits_processors": None,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "structured_outputs": None,
}

UNSUPPORTED = {
    "audio": {"voice": "alloy"},
    "best_of": 2,
    "chat_template": "{{ messages }}",
    "grammar_lazy": True,
    "guided_decoding_backend": "outlines",
    "guided_whitespace_pattern": "x*",
    "logits_processors": ["x"],
    "mm_processor_kwargs": {"a": 1},
    "modalities": ["text", "audio"],
    "web_search_options": {},
}


@pytest.mark.parametrize("field", NEUTRAL)
def test_a_field_that_is_not_built_passes_with_its_neutral_value(field: str):
    sampling.check(asked(**{field: NEUTRAL[field]}), LimitsConfig())


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_a_field_that_is_not_built_is_refused_by_name(field: str):
    with pytest.raises(Unsupported, match=field) as caught:
        sampling.check(asked(**{field: UNSUPPORTED[field]}), LimitsConfig())

    assert caught.value.param == field


@pytest.mark.parametrize("value", [b'"\xff"', b'{"\xff": 1}', b"1e999"])
def test_an_invalid_value_of_an_unsupported_field_is_the_clients_error(value: bytes):
    with pytest.raises(InvalidRequest) as caught:
        sampling.check(COMPLETIONS.decoder.decode(b'{"prompt": "a", "prompt_embeds": %b}' % value), LimitsConfig())

    assert caught.value.param == "prompt_embeds"


def test_a_long_value_of_a_field_not_built_is_refused_without_being_read():
    with pytest.raises(Unsupported):
        sampling.check(
            COMPLETIONS.decoder.decode(b'{"prompt": "a", "prompt_embeds": %b}' % (b"9" * 5000)), LimitsConfig()
        )


@pytest.mark.parametrize("field", ["prompt_embeds"])
def test_fields_that_completions_lack_are_refused_by_name(field: str):
    with pytest.raises(Unsupported, match=field):
        sampling.check(completion(**{field: "x"}), LimitsConfig())


def test_best_of_is_neutral_when_it_is_n():
    sampling.check(asked(n=3, best_of=3), LimitsConfig())


def test_zero_is_not_taken_for_false():
    with pytest.raises(Unsupported):
        sampling.check(asked(grammar_lazy=0), LimitsConfig())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_settings_bound_a_request(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        sampling.check(asked(**fields), LimitsConfig())

    assert caught.value.param == param


def test_everything_at_its_bound_passes():
    sampling.check(
        asked(
            n=128,
            stop=["a" * 256] * 16,
            logit_bias={str(i): 100 for i in range(1024)},
            cache_salt="a" * 128,
            bad_words=["a"] * 1024,
            prompt_logprobs=20,
            stream=True,
            stream_options={"include_usage": True},
        ),
        LimitsConfig(),
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 11}, "min_tokens"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * (VOCAB + 1)}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_contradictory_or_impossible_sampling_is_refused(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        params(**fields)

    assert caught.value.param == param


def test_defaults_come_from_the_models_generation_config():
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}

    left_out, said = params(defaults), params(defaults, temperature=0, top_k=-1, top_p=1, min_p=0, repetition_penalty=1)

    assert {name: getattr(left_out, name) for name in defaults} == defaults
    assert (said.temperature, said.top_k, said.top_p, said.min_p, said.repetition_penalty) == (0, 0, 1, 0, 1)


def test_a_temperature_near_zero_stays_away_from_infinity():
    assert params(temperature=1e-300).temperature == sampling.MIN_TEMPERATURE
    assert params(temperature=0).temperature == 0


def test_a_seed_leaves_room_for_the_choices():
    assert params(seed=7).seed == 7
    assert 0 <= params(seed=-1).seed < 2**62
    assert 0 <= params(seed=2**63 - 1).seed < 2**62
    assert params().seed != params().seed


def test_max_tokens_is_by_default_the_rest_of_the_context_or_a_smaller_default():
    model = served(100)

    assert sampling.max_tokens(30, None, None, model, prompt_param="messages") == 70
    assert sampling.max_tokens(30, None, 16, model, prompt_param="prompt") == 16
    assert sampling.max_tokens(90, None, 16, model, prompt_param="prompt") == 10
    assert sampling.max_tokens(30, 70, None, model, prompt_param="messages") == 70


def test_more_than_the_context_holds_is_refused():
    with pytest.raises(InvalidRequest, match="30 prompt tokens") as caught:
        sampling.max_tokens(30, 71, None, served(100), prompt_param="messages")
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")

    with pytest.raises(PromptTooLong) as too_long:
        sampling.max_tokens(100, None, None, served(100), prompt_param="prompt")
    assert (too_long.value.param, too_long.value.code) == ("prompt", "context_length_exceeded")


def test_end_ids_are_the_models_and_those_that_the_request_names():
    model = served(100)

    assert sampling.end_ids(asked(), model) == model.tokenizer.end_ids == {2}
    assert sampling.end_ids(asked(stop_token_ids=[9]), model) == {2, 9}
    assert sampling.end_ids(asked(stop_token_ids=[9], ignore_eos=True), model) == {9}


def test_generation_config_sets_defaults_and_is_checked():
    config = {"top_k": 20, "temperature": 0.6, "do_sample": True, "eos_token_id": [1, 2], "top_p": None}

    assert SamplingDefaults.read(config) == SamplingDefaults(top_k=20, temperature=0.6)
    with pytest.raises(CheckpointError, match=r"generation_config.*top_p"):
        SamplingDefaults.read({"top_p": 7})


def test_templates_read_a_drawn_conversation():
    said = asked(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
            {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": []},
        ]
    )

    assert template_messages(said.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": "", "function_call": {"name": "f", "arguments": ""}}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": "[]"}},
            "messages[0].function_call.arguments",
        ),
        (
            {"role": "user", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
            "messages[0].tool_calls",
        ),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: dict[str, Any], param: str):
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        template_messages(asked(messages=[message]).messages)

    assert caught.value.param == param
