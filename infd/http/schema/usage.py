"""Tokens and time that a request took."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct, kw_only=True):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    """Tokens of thoughts, their markers included."""

    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Timings(Struct, kw_only=True):
    """Where the time went, as llama.cpp's server names it. All choices together; milliseconds, and tokens a second.

    cache_n      prompt tokens found in the cache
    prompt_n     prompt tokens computed
    predicted_n  tokens generated; the first of each choice belongs to the prompt's time
    """

    queue_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
