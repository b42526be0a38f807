"""The fields that OpenAI's chat and completions APIs share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw, Struct

from infd.http.schema.constraints import Options, ResponseFormat, StructuredOutputs, Text
from infd.http.schema.peers import PeerFields
from infd.http.schema.sampling import RequestId, StopString
from infd.http.schema.unsupported import ABSENT


class StreamOptions(Struct, kw_only=True):
    """The options of a stream: whether the stream reports usage, at the end or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # ignored: infd pads no events


class OpenAIRequest(PeerFields, kw_only=True):
    """Further fields that chat requests and completion requests share. None: absent from the request."""

    n: Annotated[int, Meta(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: StopString | list[StopString] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None  # -1: of all tokens
    # Beam search, see http/beams.py: `n` answers of as many beams; a completion's `best_of` may ask for more beams.
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    return_tokens_as_token_ids: bool | None = None  # logprobs name tokens "token_id:5", not by their text
    return_routed_experts: bool | None = None  # each choice reports the experts that its tokens chose

    # Read and ignored, see IGNORED.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    session_id: Any = None
    extra_key: Any = None
    custom_labels: Any = None
    cache_prompt: bool | None = None
    id_slot: Any = None
    n_discard: Any = None
    n_keep: Any = None
    return_mm_kwargs: bool | None = None

    # Fields under other servers' names; `ALIASES` maps these names to OpenAI's and vLLM's.
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None
    no_stop_trim: bool | None = None
    n_predict: Annotated[int, Meta(ge=-1)] | None = None  # -1: no limit
    rid: RequestId | None = None

    # Constraints of the text, under OpenAI's and other servers' names; see http/constraints.py.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = ABSENT
    guided_regex: Text | None = None
    guided_choice: Options | None = None
    guided_grammar: Text | None = None
    json_schema: Raw = ABSENT
    structural_tag: Raw = ABSENT
    regex: Text | None = None
    grammar: Text | None = None
    ebnf: Text | None = None

    SUPPORTED: ClassVar[frozenset[str]] = frozenset({"guided_json", "json_schema", "structural_tag"})
    # These fields cannot change an answer.
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
            *("metadata", "store", "service_tier"),
            *("session_id", "return_mm_kwargs"),  # vLLM
            *("extra_key", "custom_labels"),  # SGLang
            *("cache_prompt", "id_slot", "n_discard", "n_keep"),  # llama.cpp
        }
    )
    ALIASES: ClassVar[dict[str, str]] = {
        "repeat_penalty": "repetition_penalty",
        "min_new_tokens": "min_tokens",
        "no_stop_trim": "include_stop_str_in_output",
        "n_predict": "max_tokens",
        "rid": "request_id",
    }

    def __post_init__(self) -> None:
        if self.n_predict == 0:
            raise ValueError("n_predict is at least 1, or -1: no limit")
        if self.n_predict == -1:
            self.n_predict = None
        for alias, name in self.ALIASES.items():
            value = getattr(self, alias)
            if value is None:
                continue
            if getattr(self, name) not in (None, value):
                raise ValueError(f"{alias} and {name} mean the same: send one of them")
            setattr(self, name, value)
