"""OpenAI's Responses API: requests, items of input and output, response objects."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from infd.http.schema.chat import MESSAGES
from infd.http.schema.constraints import StructuredOutputs
from infd.http.schema.logprobs import TokenLogprob
from infd.http.schema.sampling import GenerationFields, StopString
from infd.http.schema.thinking import Effort, Verbosity
from infd.http.schema.tools import TOOLS, CallId, ToolName
from infd.http.schema.unsupported import ABSENT, UnsupportedField


class ItemPart(Struct, kw_only=True, omit_defaults=True):
    """A part of a message's or a thought's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, kw_only=True, omit_defaults=True):
    """An item of any type, with the fields of the types that infd reads. An item without a type is a message."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[ItemPart], Meta(max_length=4096)] | None = None
    summary: Annotated[list[ItemPart], Meta(max_length=4096)] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] | None = None
    call_id: CallId | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Annotated[list[ItemPart], Meta(max_length=4096)] | None = None
    # of mcp_list_tools, mcp_call, mcp_approval_request and mcp_approval_response
    server_label: str | None = None
    tools: Annotated[list[Raw], Meta(max_length=TOOLS)] | None = None
    error: Raw = ABSENT
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = None


class ToolFormat(Struct, kw_only=True):
    """The format of a custom tool's input: any text, or text that a grammar accepts."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ToolFilter(Struct, kw_only=True):
    """Selects tools of an MCP server: those that meet every criterion that is set.

    read_only  whether the server says that the tool changes nothing
    """

    tool_names: Annotated[list[str], Meta(max_length=TOOLS)] | None = None
    read_only: bool | None = None


class ApprovalFilter(Struct, kw_only=True):
    """The tools of an MCP server whose calls the client approves first."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class ResponseTool(Struct, kw_only=True):
    """A tool of type "function" or "custom", which the client runs; or with type "mcp", an MCP server's tools.

    The settings list the servers: `server_label` is a label of theirs, or `server_url` one of their URLs. The server's
    headers are settings too.
    """

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None
    format: ToolFormat | None = None
    server_label: Annotated[str, Meta(min_length=1, max_length=64)] | UnsetType = UNSET
    server_url: str | UnsetType | None = UNSET
    server_description: str | UnsetType | None = UNSET
    allowed_tools: Annotated[list[str], Meta(max_length=TOOLS)] | ToolFilter | UnsetType | None = UNSET
    require_approval: Literal["always", "never"] | ApprovalFilter | UnsetType | None = UNSET
    allowed_callers: list[str] | UnsetType | None = UNSET
    authorization: str | UnsetType | None = UNSET
    connector_id: str | UnsetType | None = UNSET
    defer_loading: bool | UnsetType | None = UNSET
    headers: dict[str, str] | UnsetType | None = UNSET
    tunnel_id: str | UnsetType | None = UNSET


class AllowedTool(Struct, kw_only=True):
    type: str
    name: str | None = None
    server_label: str | None = None


class ResponseToolChoice(Struct, kw_only=True):
    """A tool_choice that names one tool to call, or with type "allowed_tools" the only tools that may be called.

    With type "mcp" and without a name: any tool of the server.
    """

    type: str
    name: str | None = None
    server_label: str | UnsetType = UNSET
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Meta(max_length=TOOLS)] | None = None


class TextFormat(Struct, kw_only=True):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: Raw = ABSENT
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Struct, kw_only=True):
    """The effort of thinking. Thoughts are returned unabridged, so no kind of summary can be chosen."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ConversationId(Struct, kw_only=True):
    """The conversation that a response continues."""

    id: str


Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


class ResponsesFields(GenerationFields, kw_only=True):
    """The fields of a conversation, in requests for a response and for a token count."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM
    truncation: Literal["auto", "disabled"] | None = None

    context_management: UnsupportedField = ABSENT
    image: UnsupportedField = ABSENT
    personality: UnsupportedField = ABSENT
    prompt: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"context_management": ([],)}
    IGNORED: ClassVar[frozenset[str]] = frozenset()  # fields that cannot change an answer


class InputTokensRequest(ResponsesFields, kw_only=True):
    """The body of a request to count a conversation's tokens."""


class ResponsesRequest(ResponsesFields, kw_only=True):
    """The body of a request to generate a response."""

    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    stop: StopString | list[StopString] | None = None
    top_logprobs: Annotated[int, Meta(ge=-1)] | None = None  # -1: of all tokens
    include: list[Include] | None = None
    metadata: Metadata | None = None
    background: bool | None = None
    store: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    stream_options: dict[str, Any] | None = None  # OpenAI's only option pads events; infd pads none

    access_programs: UnsupportedField = ABSENT
    moderation: UnsupportedField = ABSENT
    # vLLM
    enable_response_messages: UnsupportedField = ABSENT
    mm_processor_kwargs: UnsupportedField = ABSENT
    previous_input_messages: UnsupportedField = ABSENT
    previous_response: UnsupportedField = ABSENT
    vllm_xargs: UnsupportedField = ABSENT
    use_beam_search: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ResponsesFields.NEUTRAL,
        "access_programs": ([],),
        "enable_response_messages": (False,),
        "mm_processor_kwargs": ({},),
        "vllm_xargs": ({},),
        "use_beam_search": (False,),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
            *("service_tier", "stream_options"),
        }
    )


class OutputText(Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model: an item of the output that contains text."""

    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """A thought of the model: an item of the output."""

    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """The model's call of a function. `arguments` is the model's text, unchecked."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class CustomCallItem(Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """The model's call of a custom tool. `input` is text in the tool's format."""

    id: str
    status: str
    call_id: str
    name: str
    input: str


class ListedTool(Struct, kw_only=True):
    """A tool of an MCP server. `annotations`: the server's hints about it, any JSON."""

    name: str
    description: str | None
    input_schema: Raw
    annotations: Raw


class McpListItem(Struct, kw_only=True, tag_field="type", tag="mcp_list_tools"):
    """The tools of an MCP server that the model may call."""

    id: str
    server_label: str
    tools: list[ListedTool] = []
    error: str | None = None


class McpError(Struct, kw_only=True):
    """The reason why a call failed: `code` and `message` of the protocol or of HTTP, or `content` that a tool gave."""

    type: Literal["mcp_protocol_error", "mcp_tool_execution_error", "http_error"]
    code: int | UnsetType = UNSET
    message: str | UnsetType = UNSET
    content: list[ItemPart] | UnsetType = UNSET


class McpCallItem(Struct, kw_only=True, tag_field="type", tag="mcp_call"):
    """The model's call of an MCP server's tool, and its result."""

    id: str
    status: str
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: McpError | None = None
    approval_request_id: str | None = None


class McpApprovalItem(Struct, kw_only=True, tag_field="type", tag="mcp_approval_request"):
    """A call of an MCP server's tool that the client approves or refuses in its next request."""

    id: str
    server_label: str
    name: str
    arguments: str


OutputItem = (
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | McpListItem | McpCallItem | McpApprovalItem
)


class InputTokensDetails(Struct, kw_only=True):
    """Prompt tokens found in the prefix cache. `cache_write_tokens` is always 0: writing to the cache is free."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Struct, kw_only=True):
    code: str
    message: str


class ResponseObject(Struct, kw_only=True):
    """A response, complete or as far as it is generated."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    conversation: ConversationId | None = None
    error: ResponseFailure | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float | None
    text: TextOptions
    tool_choice: str | ResponseToolChoice
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class InputTokens(Struct, kw_only=True):
    """The number of tokens of a conversation's prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Deleted(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ConversationRequest(Struct, kw_only=True):
    """The body of a request to create a conversation."""

    items: Annotated[list[InputItem], Meta(max_length=MESSAGES)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Struct, kw_only=True):
    """The body of a request to replace a conversation's metadata."""

    metadata: Metadata | None


class NewItems(Struct, kw_only=True):
    """The body of a request to add items to a conversation."""

    items: Annotated[list[InputItem], Meta(min_length=1, max_length=MESSAGES)]


class ConversationObject(Struct, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(Struct, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
