"""The requests of text-embeddings-inference: /embed, /embed_all, /embed_sparse, /predict, /similarity and /info."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from infd.http.schema.pooling import Dimensions, PromptName
from infd.http.schema.sampling import TokenId

Direction = Literal["Left", "Right", "left", "right"]
Inputs = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class TeiFields(Struct, kw_only=True):
    """The fields that these requests share. None: absent from the request.

    truncate              whether inputs are cut so that they fit; if not, one that is too long is refused
    truncation_direction  the end at which tokens are removed; None: Right
    """

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None


class EmbedAllRequest(TeiFields, kw_only=True):
    """The body of POST /embed_all: the embedding of each token."""

    inputs: Inputs
    prompt_name: PromptName | None = None


class EmbedSparseRequest(EmbedAllRequest, kw_only=True):
    """The body of POST /embed_sparse: the weights of the tokens that an input contains."""


class EmbedRequest(EmbedAllRequest, kw_only=True):
    """The body of POST /embed. normalize: None: true."""

    normalize: bool | None = None
    dimensions: Dimensions | None = None


class PredictRequest(TeiFields, kw_only=True):
    """The body of POST /predict.

    inputs  a text; a list of one text, or of two, a pair; or a list of such lists
    """

    inputs: str | Annotated[list[str | Annotated[list[str], Meta(min_length=1, max_length=2)]], Meta(min_length=1)]
    raw_scores: bool | None = None


class Sentences(Struct, kw_only=True):
    """A text, and the texts that are compared with it."""

    source_sentence: str
    sentences: Annotated[list[str], Meta(min_length=1)]


class SimilarityParameters(Struct, kw_only=True):
    """The options of POST /similarity."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: PromptName | None = None


class SimilarityRequest(Struct, kw_only=True):
    """The body of POST /similarity."""

    inputs: Sentences
    parameters: SimilarityParameters | None = None
    model: str | None = None


class Prediction(Struct, kw_only=True):
    """The score of a label."""

    score: float
    label: str


class SparseValue(Struct, kw_only=True):
    """The weight of a token. index: its id."""

    index: int
    value: float


class Info(Struct, kw_only=True):
    """The body of GET /info. model_type: one of `embedding`, `classifier` and `reranker`."""

    model_id: str
    model_sha: str | None = None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None = None
    max_client_batch_size: int
    auto_truncate: bool = False
    tokenization_workers: int
    version: str
    sha: str | None = None
    docker_label: str | None = None
    served_model_name: str | UnsetType = UNSET


class TeiError(Struct, kw_only=True):
    """The body of an error. error_type: the kind, for programs."""

    error: str
    error_type: str
