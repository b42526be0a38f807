"""The fields that requests for generated text share."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from infd.request import LogprobsMode

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopString = Annotated[str, Meta(min_length=1)]
RequestId = Annotated[str, Meta(pattern=r"^[!-~]{1,128}\Z")]
BadWord = Annotated[str, Meta(min_length=1)]

Breaker = Annotated[str, Meta(min_length=1, max_length=40)]
SamplerName = Annotated[str, Meta(max_length=32)]


class GenerationFields(Struct, kw_only=True):
    """The fields that have the same name and meaning in every API. None: absent from the request."""

    model: str | None = None
    stream: bool | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and -1: no limit
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None

    # llama.cpp's samplers, see http/samplers.py
    typical_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=1e6)] | None = None  # 0 and less: no limit
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None  # above 0.5: no token is dropped
    dynatemp_range: Annotated[float, Meta(ge=0, le=2)] | None = None
    dynatemp_exponent: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=0, le=100)] | None = None  # less than 1: the default
    dry_allowed_length: Annotated[int, Meta(ge=0, le=1024)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: all tokens; 0: no penalty
    dry_sequence_breakers: Annotated[list[Breaker], Meta(max_length=16)] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] | None = None
    mirostat_eta: Annotated[float, Meta(ge=0, le=1)] | None = None
    samplers: Annotated[list[SamplerName], Meta(max_length=16)] | None = None

    logit_bias: dict[TokenId, Bias] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None  # instead of the likeliest
    logprobs_mode: LogprobsMode | None = None

    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: list[BadWord] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # last tokens to keep; -1: as many as fit
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestId | None = None  # echoed as X-Request-Id
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    speculative: bool | None = None  # false: guess no tokens
