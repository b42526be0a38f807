"""The operations that reduce prompts to numbers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from infd.http.openapi.operation import MODEL, POOLED, Operation
from infd.http.schema import pooling, scoring, tei
from infd.http.schema.error import ErrorBody

if TYPE_CHECKING:
    from msgspec import Struct

_RERANKS = "Order documents by their relevance to a query."
_TEI = "text-embeddings-inference"


def _operation(
    path: str,
    name: str,
    text: str,
    request: type[Struct],
    *answers: object,
    tag: str = "Pooling",
    failures: tuple[type[Struct], ...] = (ErrorBody,),
) -> Operation:
    return Operation(
        method="post",
        path=path,
        name=name,
        text=text,
        tag=tag,
        request=request,
        answers=answers,
        errors=POOLED,
        failures=failures,
    )


_tei = partial(_operation, tag=_TEI, failures=(tei.TeiError,))


POOLING: Final[tuple[Operation, ...]] = (
    *(
        _operation(
            path,
            name,
            "Return the embeddings of texts, token ids or conversations.",
            pooling.EmbeddingRequest,
            pooling.EmbeddingResponse,
        )
        for path, name in (("/v1/embeddings", "createEmbedding"), ("/embeddings", "createEmbeddingUnprefixed"))
    ),
    _operation(
        "/pooling",
        "pool",
        "Reduce inputs to numbers by any task of the model, also for each token, as vLLM does.",
        pooling.PoolingRequest,
        pooling.PoolingResponse,
    ),
    _operation(
        "/classify",
        "classify",
        "Return the scores of labels, as vLLM does.",
        pooling.ClassifyRequest,
        pooling.ClassifyResponse,
    ),
    *(
        _operation(
            path,
            name,
            "Return the scores of pairs of texts, as vLLM does.",
            scoring.ScoreRequest,
            scoring.ScoreResponse,
        )
        for path, name in (("/score", "score"), ("/v1/score", "scoreV1"))
    ),
    *(
        _operation(
            path,
            name,
            text,
            scoring.RerankRequest,
            scoring.RerankResponse,
            list[scoring.Rank],
            failures=(ErrorBody, tei.TeiError),
        )
        for path, name, text in (
            (
                "/rerank",
                "rerank",
                f"{_RERANKS} `documents` in Jina's and Cohere's form, `texts` in text-embeddings-inference's.",
            ),
            ("/v1/rerank", "rerankV1", _RERANKS),
            ("/v2/rerank", "rerankV2", _RERANKS),
        )
    ),
    _tei("/embed", "embed", "Return embeddings.", tei.EmbedRequest, list[list[float]]),
    _tei(
        "/embed_all",
        "embedAll",
        "Return the embeddings of all tokens, which are not normalized.",
        tei.EmbedAllRequest,
        list[list[list[float]]],
    ),
    _tei(
        "/embed_sparse",
        "embedSparse",
        "Return the weights of the tokens that each input contains.",
        tei.EmbedSparseRequest,
        list[list[tei.SparseValue]],
    ),
    _tei(
        "/predict",
        "predict",
        "Return the scores of labels, of one input or of several.",
        tei.PredictRequest,
        list[tei.Prediction],
        list[list[tei.Prediction]],
    ),
    _tei(
        "/similarity",
        "similarity",
        "Return how similar sentences are to a source sentence.",
        tei.SimilarityRequest,
        list[float],
    ),
    Operation(
        method="get",
        path="/info",
        name="info",
        text="Describe the model as text-embeddings-inference does.",
        tag=_TEI,
        answers=(tei.Info,),
        errors=MODEL,
    ),
)
