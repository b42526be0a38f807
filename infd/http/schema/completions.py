"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from infd.http.schema.error import ErrorDetail
from infd.http.schema.logprobs import PromptLogprobs
from infd.http.schema.openai import OpenAIRequest
from infd.http.schema.routing import RoutedExperts
from infd.http.schema.sampling import TokenId
from infd.http.schema.unsupported import ABSENT, UnsupportedField
from infd.http.schema.usage import Timings, Usage


class CompletionRequest(OpenAIRequest, kw_only=True):
    """The body of a completion request. `prompt` is a text, a list of texts, token ids or a list of token id lists."""

    prompt: str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # 0: echo or score the prompt, generate nothing
    best_of: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=-1)] | None = None  # -1: of all tokens
    suffix: str | None = None  # text after the answer, where the vocabulary has tokens for filling in the middle

    prompt_embeds: UnsupportedField = ABSENT
    thinking_token_budget: UnsupportedField = ABSENT


class CompletionLogprobs(Struct, kw_only=True):
    """Parallel lists with one entry per token. `text_offset`: characters of the answer before the token.

    The first token of an echoed prompt has no log-probability: its `token_logprobs` and `top_logprobs` are null.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """One choice, or its new part.

    stop_reason     the stop string or token id that finished the choice
    matched_stop    SGLang's field: as stop_reason, or if that is null, the model's end id that finished the choice
    error           the error of a failed choice; finish_reason is then "error"
    routed_experts  with return_routed_experts; of a stream, in the choice's last event
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    matched_stop: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    routed_experts: RoutedExperts | UnsetType = UNSET


class CompletionResponse(Struct, kw_only=True):
    """The body of a whole answer, or one event of a streamed answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
