"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from infd.http.schema.sampling import ABSENT, GenerationRequest, NotBuilt, TokenId
from infd.http.schema.usage import Usage


class CompletionRequest(GenerationRequest, kw_only=True):
    """What is asked. A prompt is a text or token ids; several of either may be given."""

    prompt: str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0)] | None = None

    echo: NotBuilt = ABSENT
    prompt_embeds: NotBuilt = ABSENT
    suffix: NotBuilt = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationRequest.NEUTRAL, "echo": (False,), "suffix": ("",)}


class CompletionLogprobs(Struct, kw_only=True):
    """Parallel lists, one entry per generated token; offsets count characters of the answer."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class CompletionChoice(Struct, kw_only=True):
    """One answer, or what is new in it. `stop_reason` is the stop string or token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(Struct, kw_only=True):
    """The whole answer, and in a stream one event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
