"""The tokens and durations that an answer reports."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct, kw_only=True):
    """Details of prompt tokens: the number found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    """Details of generated tokens.

    reasoning_tokens            number in thoughts, including the markers of thoughts
    accepted_prediction_tokens  tokens of the request's prediction that were drafted and are in the answer
    rejected_prediction_tokens  tokens of the request's prediction that were drafted and are not in the answer
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct, kw_only=True):
    """The counts of prompt tokens and generated tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Timings(Struct, kw_only=True):
    """Durations in milliseconds and rates in tokens per second, over all choices. Field names as in llama.cpp.

    cache_n      prompt tokens found in the prefix cache
    prompt_n     prompt tokens computed; prompt_ms: until the first token of any choice
    predicted_n  tokens generated; predicted_per_second does not count the first token of each choice
    """

    queue_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
