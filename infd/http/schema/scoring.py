"""POST /score and /rerank."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from infd.http.schema.chat import ContentPart
from infd.http.schema.pooling import PooledResponse, PoolingFields, PromptUsage
from infd.http.schema.thinking import TemplateKwargs
from infd.http.schema.unsupported import ABSENT, UnsupportedField

MostTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # 0: no limit


class ScoredText(Struct, kw_only=True):
    """A text as an object: Cohere's and Jina's `text`, or vLLM's `content`, whose parts must be texts."""

    text: str | None = None
    content: str | Annotated[list[ContentPart], Meta(max_length=4096)] | None = None
    image: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}


Text = str | ScoredText


class ScoringFields(PoolingFields, kw_only=True):
    """The fields that requests for scores share.

    max_tokens_per_query, max_tokens_per_doc  most tokens of a query and of a document, which are cut; 0: all are kept
    instruction                               the task, for a model whose template of pairs reads one
    """

    max_tokens_per_query: MostTokens | None = None
    max_tokens_per_doc: MostTokens | None = None
    instruction: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ScoreRequest(ScoringFields, kw_only=True):
    """The body of POST /score: one text or as many as there are in the other list, and the texts to compare.

    `queries` with `documents` or `items`, `text_1` with `text_2`, or `data_1` with `data_2`: all mean the same.
    """

    queries: Text | list[Text] | None = None
    documents: Text | list[Text] | None = None
    items: Text | list[Text] | None = None
    text_1: Text | list[Text] | None = None
    text_2: Text | list[Text] | None = None
    data_1: Text | list[Text] | None = None
    data_2: Text | list[Text] | None = None


class Score(Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(PooledResponse, kw_only=True):
    """The scores, in the order of the pairs."""

    data: list[Score]


class RerankRequest(ScoringFields, kw_only=True):
    """The body of POST /rerank, /v1/rerank and /v2/rerank: exactly one of `documents` and `texts` must be set.

    documents         Jina's and Cohere's name; the answer has their form
    texts             text-embeddings-inference's name; the answer has its form
    top_n             most results; None and 0: all
    return_documents  whether results have their documents; None: true
    return_text       text-embeddings-inference's return_documents; None: false
    raw_scores        whether scores are the model's logits; None: false
    truncate          whether texts are cut so that they fit
    """

    query: Text
    documents: Text | list[Text] | None = None
    texts: list[str] | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None

    max_chunks_per_doc: UnsupportedField = ABSENT
    rank_fields: UnsupportedField = ABSENT
    return_embeddings: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **PoolingFields.NEUTRAL,
        "max_chunks_per_doc": (1, 10),
        "rank_fields": (["text"],),
        "return_embeddings": (False,),
    }
    ALIASES: ClassVar[dict[str, str]] = {**PoolingFields.ALIASES, "truncation": "truncate"}


class RankedText(Struct, kw_only=True):
    """The text of a document."""

    text: str


class RankedDocument(Struct, kw_only=True):
    """One document's place. index: its number in the request."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class BilledUnits(Struct, frozen=True, kw_only=True):
    """Cohere's units: one for each request."""

    search_units: int = 1


class ApiVersion(Struct, frozen=True, kw_only=True):
    """The version of Cohere's API."""

    version: str = "2"


class RerankMeta(Struct, kw_only=True):
    """The metadata that Cohere's clients read."""

    api_version: ApiVersion = ApiVersion()
    billed_units: BilledUnits = BilledUnits()


class RerankResponse(Struct, kw_only=True):
    """The documents, most relevant first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    usage: PromptUsage
    results: list[RankedDocument]
    meta: RerankMeta


class Rank(Struct, kw_only=True):
    """One text's place, in text-embeddings-inference's form."""

    index: int
    text: str | UnsetType = UNSET
    score: float
