"""Convert a request's sampling fields to SamplingParams.

This module checks configurable bounds; the schema's types check fixed bounds. Defaults come from the model's
generation_config.json.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import astuple

from infd.errors import InvalidRequest, PromptTooLong, Unsupported
from infd.http import samplers
from infd.http.schema.unsupported import ABSENT
from infd.request import Breakers, LogprobsMode, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from typing import Any

    from infd.config import LimitsConfig
    from infd.http.schema.openai import OpenAIRequest
    from infd.http.schema.responses import ResponsesRequest
    from infd.http.schema.sampling import GenerationFields
    from infd.http.served_model import ServedModel

NO_BREAKERS: Final = Breakers()
# At a lower temperature sampling would select the same tokens, but dividing the logits could overflow to infinity.
MIN_TEMPERATURE: Final = 1e-3
# Upper bound of seeds, so that adding a choice's index does not overflow.
SEED_LIMIT: Final = 2**62
# Length of the longest neutral value of an unsupported field, rounded up.
MAX_NEUTRAL_BYTES: Final = 256


def check(request: OpenAIRequest, limits: LimitsConfig) -> None:
    """Refuse values that are invalid for every model. Raises InvalidRequest, Unsupported."""
    refuse_unsupported(request, request.NEUTRAL, {"best_of": (request.n or 1,)}, supported=request.SUPPORTED)
    check_fields(request, stop_strings(request), limits)
    if (request.prompt_logprobs or 0) > limits.top_logprobs:
        raise InvalidRequest(f"prompt_logprobs is at most {limits.top_logprobs}", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only for requests with stream: true", param="stream_options")
    if (request.n or 1) > limits.choices:
        raise InvalidRequest(f"n is at most {limits.choices}", param="n")


def check_fields(
    fields: GenerationFields, stop_strings: Sequence[str], limits: LimitsConfig, *, stop_param: str = "stop"
) -> None:
    """Check the fields that all APIs share against the configured limits. Raises InvalidRequest."""
    if fields.truncate_prompt_tokens == 0:
        raise InvalidRequest("a prompt has at least one token", param="truncate_prompt_tokens")
    if len(fields.bad_words or ()) > limits.bad_words:
        raise InvalidRequest(f"bad_words is at most {limits.bad_words} entries", param="bad_words")
    if len(stop_strings) > limits.stop_strings:
        raise InvalidRequest(f"{stop_param} is at most {limits.stop_strings} strings", param=stop_param)
    if any(len(string) > limits.stop_characters for string in stop_strings):
        raise InvalidRequest(f"a stop string is at most {limits.stop_characters} characters", param=stop_param)
    if len(fields.logit_bias or ()) > limits.logit_bias:
        raise InvalidRequest(f"logit_bias is at most {limits.logit_bias} entries", param="logit_bias")
    if len(fields.cache_salt or "") > limits.cache_salt:
        raise InvalidRequest(f"cache_salt is at most {limits.cache_salt} characters", param="cache_salt")


def refuse_unsupported(
    fields: Struct,
    neutral: Mapping[str, tuple[Any, ...]],
    extra_neutral: Mapping[str, tuple[Any, ...]] | None = None,
    supported: Container[str] = (),
    path: str = "",
) -> None:
    """Refuse fields of type UnsupportedField unless null or neutral. Raises Unsupported, InvalidRequest for bad JSON.

    neutral        accepted values that do not change an answer, by field
    extra_neutral  further neutral values, by field
    supported      fields that are supported although they have this type
    path           path of `fields` in the request, for errors
    """
    for name, value in zip(fields.__struct_fields__, astuple(fields), strict=True):
        if type(value) is not Raw or value is ABSENT or name in supported:
            continue
        decoded = _decode(value, name, f"{path}{name}")
        accepted = (*neutral.get(name, ()), *(extra_neutral or {}).get(name, ()))
        if decoded is not None and not any(_equal(decoded, known) for known in accepted):
            raise Unsupported(name, param=f"{path}{name}")


def stop_strings(request: OpenAIRequest | ResponsesRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def max_tokens(
    prompt_tokens: int,
    requested: int | None,
    default: int | None,
    served: ServedModel,
    *,
    prompt_param: str,
    param: str = "max_tokens",
) -> int:
    """Return the maximum number of tokens to generate for a choice. Raises PromptTooLong, InvalidRequest.

    requested  the request's limit; None: `default`
    default    limit if `requested` is None, lowered to the rest of the context; None: the rest of the context
    param      request field of `requested`, for error messages
    """
    remaining = served.max_model_len - prompt_tokens
    if remaining < 1:
        raise PromptTooLong(prompt_tokens, served.max_model_len - 1, param=prompt_param)
    if requested is None:
        return remaining if default is None else min(default, remaining)
    if requested > remaining:
        raise InvalidRequest(
            f"{prompt_tokens} prompt tokens and {param} {requested} are too many: this model's maximum context length"
            f" is {served.max_model_len} tokens",
            param=param,
            code="context_length_exceeded",
        )
    return requested


def alternatives(
    requested: int | None, served: ServedModel, limits: LimitsConfig, param: str = "logprobs"
) -> int | None:
    """Return the number of likeliest tokens to report, if -1 requests all. Raises InvalidRequest.

    param  the request's field, for error messages
    """
    if requested != -1:
        return requested
    if served.vocab_size > limits.top_logprobs:
        raise InvalidRequest(
            f"the log-probabilities of all {served.vocab_size} tokens are more than the {limits.top_logprobs} that this"
            " server reports for a token (limits.top_logprobs): give a number, or name tokens in logprob_token_ids",
            param=param,
        )
    return served.vocab_size


def sampling_params(
    fields: GenerationFields,
    served: ServedModel,
    *,
    max_tokens: int,
    choices: int,
    choices_param: str = "n",
    logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    breakers: Breakers = NO_BREAKERS,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> SamplingParams:
    """Return the request's sampling parameters, with the model's defaults for missing fields. Raises InvalidRequest.

    logprobs_mode  the server's, for requests without one
    """
    defaults = served.defaults
    temperature = defaults.temperature if fields.temperature is None else fields.temperature
    if choices > 1 and max_tokens == 0:
        raise InvalidRequest("with max_tokens 0 no answer is generated: request one answer", param=choices_param)
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens {min_tokens} is more than max_tokens {max_tokens}", param="min_tokens")
    bias = fields.logit_bias or {}
    check_ids(bias, served, "logit_bias")
    check_ids(fields.stop_token_ids or (), served, "stop_token_ids")
    allowed = tuple(fields.allowed_token_ids or ())
    if len(allowed) > served.vocab_size:
        raise InvalidRequest("allowed_token_ids names more tokens than there are", param="allowed_token_ids")
    check_ids(allowed, served, "allowed_token_ids")
    if allowed and min_tokens and end_ids(fields, served).issuperset(allowed):
        raise InvalidRequest(
            "allowed_token_ids names only tokens that end an answer, and min_tokens forbids those",
            param="allowed_token_ids",
        )
    listed = tuple(dict.fromkeys(fields.logprob_token_ids or ()))
    check_ids(listed, served, "logprob_token_ids")
    if listed and logprobs is None:
        raise InvalidRequest("logprob_token_ids is only for requests with logprobs", param="logprob_token_ids")
    on = samplers.enabled(fields)
    if "temperature" not in on:
        temperature = 1.0
    top_k = defaults.top_k if fields.top_k is None else max(fields.top_k, 0)
    top_p = defaults.top_p if fields.top_p is None else fields.top_p
    min_p = defaults.min_p if fields.min_p is None else fields.min_p
    repetition = defaults.repetition_penalty if fields.repetition_penalty is None else fields.repetition_penalty
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature and max(temperature, MIN_TEMPERATURE),
        top_k=min(top_k, served.vocab_size) if "top_k" in on else 0,
        top_p=top_p if "top_p" in on else 1.0,
        min_p=min_p if "min_p" in on else 0.0,
        repetition_penalty=repetition if "penalties" in on else 1.0,
        presence_penalty=(fields.presence_penalty or 0.0) if "penalties" in on else 0.0,
        frequency_penalty=(fields.frequency_penalty or 0.0) if "penalties" in on else 0.0,
        chain=samplers.chain(fields, temperature),
        dry=samplers.dry(fields, breakers),
        mirostat=samplers.mirostat(fields),
        logit_bias=bias,
        allowed_token_ids=allowed,
        bad_words=bad_words,
        seed=secrets.randbelow(SEED_LIMIT) if fields.seed is None else fields.seed % SEED_LIMIT,
        logprobs=logprobs,
        logprob_ids=listed,
        logprobs_mode=fields.logprobs_mode or logprobs_mode,
    )


def end_ids(fields: GenerationFields, served: ServedModel) -> frozenset[int]:
    """Return the token ids that finish an answer: stop_token_ids, and the model's end ids unless ignore_eos is set."""
    stop_ids = frozenset(fields.stop_token_ids or ())
    return stop_ids if fields.ignore_eos else stop_ids | served.tokenizer.end_ids


def check_ids(ids: Iterable[int], served: ServedModel, param: str) -> None:
    """Raise InvalidRequest for an id outside the vocabulary. The types of the schema refuse negative ids."""
    largest = max(ids, default=0)
    if largest >= served.vocab_size:
        raise InvalidRequest(f"token id {largest} is not in the vocabulary of {served.vocab_size} tokens", param=param)


def _decode(value: Raw, name: str, param: str) -> Any:
    # Neutral values are short. `value` may be invalid JSON, because decoding the body skipped it without checking it.
    if len(memoryview(value)) > MAX_NEUTRAL_BYTES:
        raise Unsupported(name, param=param)
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None


def _equal(value: Any, known: Any) -> bool:
    # In Python False == 0 and True == 1; in JSON a boolean equals no number.
    return value == known and isinstance(value, bool) == isinstance(known, bool)
