"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from infd.http.schema.error import ErrorDetail
from infd.http.schema.logprobs import PromptLogprobs, TokenLogprob
from infd.http.schema.openai import OpenAIRequest
from infd.http.schema.routing import RoutedExperts
from infd.http.schema.thinking import Budget, Effort, ReasoningOptions, TemplateKwargs, ThinkingOptions, Verbosity
from infd.http.schema.tools import (
    CALLS,
    TOOLS,
    Called,
    CalledFunction,
    CallId,
    ChosenFunction,
    Function,
    FunctionDelta,
    ReplyCall,
    ReplyCallDelta,
    ReplyFunction,
    Tool,
    ToolChoice,
)
from infd.http.schema.unsupported import ABSENT, UnsupportedField
from infd.http.schema.usage import Timings, Usage

# Maximum messages in a request. Even an empty message takes time to render, so bounding the body's size is not enough.
MESSAGES: Final = 2**14
DOCUMENTS: Final = 1024


class ContentPart(Struct, kw_only=True):
    """A part of a message. Types other than "text" are refused."""

    type: str
    text: str | None = None


class PredictedPart(Struct, kw_only=True):
    """A part of a prediction."""

    type: Literal["text"]
    text: str


class Message(Struct, kw_only=True):
    """One message of a request."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=4096)] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Called], Meta(max_length=CALLS)] | None = None
    tool_call_id: CallId | None = None
    function_call: CalledFunction | None = None  # the older form of tool_calls
    audio: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}


class Prediction(Struct, kw_only=True):
    """Text that much of the answer is expected to repeat."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Meta(max_length=4096)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(OpenAIRequest, kw_only=True):
    """The body of a chat request."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1)] | None = None  # -1: of all tokens
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Annotated[list[Raw], Meta(max_length=DOCUMENTS)] | None = None  # objects for the chat template
    tools: Annotated[list[Tool], Meta(max_length=TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # The older form of tools and tool_choice; an answer then has one call, as function_call.
    functions: Annotated[list[Function], Meta(min_length=1, max_length=TOOLS)] | None = None
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None  # the answer's content begins with the final message, if that is the assistant's
    verbosity: Verbosity | None = None

    prediction: Prediction | None = None

    # Thoughts, under OpenAI's and other servers' names; see http/thinking.py.
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingOptions | bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    thinking_budget_tokens: Budget | None = None

    audio: UnsupportedField = ABSENT
    best_of: UnsupportedField = ABSENT
    chat_template: UnsupportedField = ABSENT
    input_ids: UnsupportedField = ABSENT
    max_dynamic_patch: UnsupportedField = ABSENT
    media_io_kwargs: UnsupportedField = ABSENT
    min_dynamic_patch: UnsupportedField = ABSENT
    mm_processor_kwargs: UnsupportedField = ABSENT
    modalities: UnsupportedField = ABSENT
    moderation: UnsupportedField = ABSENT
    parse_tool_calls: UnsupportedField = ABSENT
    return_meta_info: UnsupportedField = ABSENT
    return_prompt_text: UnsupportedField = ABSENT
    return_prompt_token_ids: UnsupportedField = ABSENT
    task: UnsupportedField = ABSENT
    use_audio_in_video: UnsupportedField = ABSENT
    web_search_options: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OpenAIRequest.NEUTRAL,
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "parse_tool_calls": (True,),
        "return_meta_info": (False,),
        "return_prompt_text": (False,),
        "return_prompt_token_ids": (False,),
        "use_audio_in_video": (False,),
    }


class ReplyMessage(Struct, kw_only=True):
    """The assistant's message. Two fields contain the thought, because clients read either `reasoning_content` or
    `reasoning`.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None  # a model's refusal is part of `content`
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ReplyCall] | UnsetType = UNSET
    function_call: ReplyFunction | UnsetType = UNSET


class ChatLogprobs(Struct, kw_only=True):
    """Log-probabilities of the generated tokens, one entry per token."""

    content: list[TokenLogprob]


class ChatChoice(Struct, kw_only=True):
    """One choice.

    stop_reason     the stop string or token id that finished the choice
    matched_stop    SGLang's field: as stop_reason, or if that is null, the model's end id that finished the choice
    error           the error of a failed choice; finish_reason is then "error"
    routed_experts  with return_routed_experts; of a stream, in the choice's last event
    """

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    routed_experts: RoutedExperts | UnsetType = UNSET


class ChatResponse(Struct, kw_only=True):
    """The body of a whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True):
    """The new part of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ReplyCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """The new part of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    matched_stop: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    routed_experts: RoutedExperts | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
