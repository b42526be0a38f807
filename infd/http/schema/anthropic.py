"""Anthropic's POST /v1/messages and /v1/messages/count_tokens, and its models and errors.

Unknown fields of requests are ignored, because clients send fields of other versions. Known fields that would change an
answer are supported, or refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from infd.http.schema.chat import MESSAGES
from infd.http.schema.sampling import GenerationFields, StopString
from infd.http.schema.tools import TOOLS, CallId, ToolName
from infd.http.schema.unsupported import ABSENT, UnsupportedField


class Block(Struct, kw_only=True):
    """A content block of a request, with the fields of all types that infd reads.

    input    arguments of a tool_use block
    content  content of a tool_result block
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: CallId | None = None
    name: str | None = None
    input: Raw = ABSENT
    tool_use_id: CallId | None = None
    content: str | Annotated[list[Block], Meta(max_length=4096)] | None = None


class InputMessage(Struct, kw_only=True):
    """One message of a request."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=4096)]


class InputTool(Struct, kw_only=True):
    """A tool. Only tools of type "custom", the default, are supported."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: Raw = ABSENT
    strict: bool | None = None


class InputToolChoice(Struct, kw_only=True):
    """Which tools an answer may or must call. `name` is required by type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, kw_only=True):
    """Whether the model thinks before it answers, and whether the answer shows the thought."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, kw_only=True):
    """The JSON schema of the answer's text."""

    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(Struct, kw_only=True):
    """The effort of thinking, and the format of the answer's text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesFields(GenerationFields, kw_only=True):
    """The fields of a conversation, in requests for an answer and for a token count."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MESSAGES)]
    system: str | Annotated[list[Block], Meta(max_length=4096)] | None = None
    tools: Annotated[list[InputTool], Meta(max_length=TOOLS)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    # Read and ignored, see IGNORED.
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    chat_template_kwargs: UnsupportedField = ABSENT  # vLLM
    container: UnsupportedField = ABSENT
    context_management: UnsupportedField = ABSENT
    mcp_servers: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template_kwargs": ({},),
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "mcp_servers": ([],),
    }
    # These fields cannot change an answer. Prefixes are cached without cache_control.
    IGNORED: ClassVar[frozenset[str]] = frozenset({"cache_control", "speed", "user_profile_id", "workspace_id"})


class CountTokensRequest(MessagesFields, kw_only=True):
    """The body of a request to count a conversation's tokens."""


class MessagesRequest(MessagesFields, kw_only=True):
    """The body of a messages request."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[StopString] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    betas: list[str] | None = None
    billing_policy: Any = None
    diagnostics: Any = None
    fallback_credit_token: str | None = None
    fallbacks: Any = None

    compaction: UnsupportedField = ABSENT
    inference_geo: UnsupportedField = ABSENT
    kv_transfer_params: UnsupportedField = ABSENT  # vLLM
    thread: UnsupportedField = ABSENT
    use_beam_search: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **MessagesFields.NEUTRAL,
        "inference_geo": ("global",),
        "kv_transfer_params": ({},),
        "use_beam_search": (False,),
    }
    IGNORED: ClassVar[frozenset[str]] = MessagesFields.IGNORED | {
        *("metadata", "service_tier", "betas", "billing_policy", "diagnostics", "fallback_credit_token", "fallbacks"),
    }


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    """A part of an answer's text."""

    text: str


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """A thought of an answer. Clients send `signature` back with the thought; infd ignores it."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call of an answer. `input` is a JSON object."""

    id: str
    name: str
    input: Raw


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(Struct, kw_only=True):
    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """Token counts of a request. The prompt's length is the sum of the three input counts."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


class OutputMessage(Struct, kw_only=True):
    """A whole answer; in a stream's first event, the answer without content and stop_reason."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct, kw_only=True):
    """The number of tokens of a conversation's prompt."""

    input_tokens: int


class ModelInfo(Struct, kw_only=True):
    """A name that requests may send as `model`. `created_at` is a time in the format of RFC 3339."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(Struct, kw_only=True):
    """One page of the list of models."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageErrorDetail(Struct, kw_only=True):
    type: str
    message: str


class MessageError(Struct, kw_only=True):
    """The body of an error response, and the data of an error event."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
