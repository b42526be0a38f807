"""POST /v1/embeddings, /classify and /pooling."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Struct

from infd.http.schema.chat import MESSAGES, Message
from infd.http.schema.sampling import RequestId, TokenId
from infd.http.schema.thinking import TemplateKwargs
from infd.http.schema.unsupported import ABSENT, UnsupportedField
from infd.request import PoolTask

# Most inputs of a request: OpenAI's limit.
INPUTS: Final = 2048

Dimensions = Annotated[int, Meta(ge=1, le=2**31 - 1)]
PromptName = Annotated[str, Meta(min_length=1, max_length=256)]
Turns = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES)]


class PoolingFields(Struct, kw_only=True):
    """The fields that requests to pool prompts share. None: absent from the request.

    truncate_prompt_tokens  most tokens of an input, special tokens included; -1: as many as fit; None: all must fit
    truncation_side         the end at which tokens are removed; None: right
    use_activation          whether embeddings are normalized, and labels get probabilities; None: as the model's files
                            say
    """

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None

    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestId | None = None  # echoed as X-Request-Id
    rid: RequestId | None = None  # SGLang's name of request_id
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    user: str | None = None

    mm_processor_kwargs: UnsupportedField = ABSENT
    padding: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"mm_processor_kwargs": ({},), "padding": ("do_not_pad",)}
    IGNORED: ClassVar[frozenset[str]] = frozenset({"user"})
    ALIASES: ClassVar[dict[str, str]] = {"rid": "request_id"}

    def __post_init__(self) -> None:
        for alias, name in self.ALIASES.items():
            value = getattr(self, alias)
            if value is None:
                continue
            if getattr(self, name) not in (None, value):
                raise ValueError(f"{alias} and {name} mean the same: send one of them")
            setattr(self, name, value)


class InputFields(PoolingFields, kw_only=True):
    """Exactly one of `input` and `messages` must be set; each has one input or several.

    input     a text, texts, token ids, lists of token ids, a conversation, or conversations
    messages  a conversation, or conversations
    """

    input: str | list[str | TokenId | list[TokenId | Message] | Message] | None = None
    messages: Annotated[list[Message | Turns], Meta(min_length=1, max_length=MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    chat_template: UnsupportedField = ABSENT
    media_io_kwargs: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {**PoolingFields.NEUTRAL, "media_io_kwargs": ({},)}


class EncodingFields(InputFields, kw_only=True):
    """How numbers are written.

    embed_dtype  of base64; endianness: of base64; native is that of the server
    normalize    another name of use_activation
    prompt_name  name of a text that precedes the input, from config_sentence_transformers.json; None: the model's
                 default
    input_type   the role of the inputs, such as "query" or "passage": selects the prompt with that name
    """

    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "big", "little"] | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    prompt_name: PromptName | None = None
    input_type: PromptName | None = None

    ALIASES: ClassVar[dict[str, str]] = {**PoolingFields.ALIASES, "normalize": "use_activation"}


class EmbeddingRequest(EncodingFields, kw_only=True):
    """The body of POST /v1/embeddings."""

    late_chunking_params: UnsupportedField = ABSENT


class PoolingRequest(EncodingFields, kw_only=True):
    """The body of POST /pooling. task: None: the first that the model's card lists."""

    task: PoolTask | None = None
    data: UnsupportedField = ABSENT


class ClassifyRequest(InputFields, kw_only=True):
    """The body of POST /classify."""


class PromptUsage(Struct, kw_only=True):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class PooledResponse(Struct, kw_only=True):
    """The fields that answers share; `data` has an item for each input, or pair, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PromptUsage


class Embedding(Struct, kw_only=True):
    """The embedding of one input: numbers, or with encoding_format base64 the base64 of their bytes."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(PooledResponse, kw_only=True):
    """The embeddings, in the order of the inputs."""

    data: list[Embedding]


class PooledInput(Struct, kw_only=True):
    """The numbers of one input: a list, by token a list for each token, or the base64 of all numbers' bytes."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float | list[float]] | str


class PoolingResponse(PooledResponse, kw_only=True):
    """The numbers of each input, in the order of the inputs."""

    data: list[PooledInput]


class Classification(Struct, kw_only=True):
    """The scores of one input's labels.

    label  the label with the highest score; null: the model has no name for it
    """

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(PooledResponse, kw_only=True):
    """The labels, in the order of the inputs."""

    data: list[Classification]
