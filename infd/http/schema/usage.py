"""What a request cost."""

from __future__ import annotations

from msgspec import Struct


class PromptTokensDetails(Struct, kw_only=True):
    """How much of the prompt was found in the cache."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
