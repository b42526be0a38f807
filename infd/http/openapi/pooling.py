"""The operations that reduce prompts to numbers."""

from __future__ import annotations

from typing import Final

from infd.http.openapi.operation import MODEL, POOLED, Operation
from infd.http.schema import pooling, scoring, tei

_RERANKS = "Order documents by their relevance to a query."
_TEI = "text-embeddings-inference"


def _tei(path: str, name: str, text: str, request: type, *answers: object) -> Operation:
    return Operation(
        method="post",
        path=path,
        name=name,
        text=text,
        tag=_TEI,
        request=request,
        answers=answers,
        errors=POOLED,
        failure=tei.TeiError,
    )


POOLING: Final[tuple[Operation, ...]] = (
    *(
        Operation(
            method="post",
            path=path,
            name=name,
            text="Return the embeddings of texts, token ids or conversations.",
            tag="Pooling",
            request=pooling.EmbeddingRequest,
            answers=(pooling.EmbeddingResponse,),
            errors=POOLED,
        )
        for path, name in (("/v1/embeddings", "createEmbedding"), ("/embeddings", "createEmbeddingUnprefixed"))
    ),
    Operation(
        method="post",
        path="/pooling",
        name="pool",
        text="Reduce inputs to numbers by any task of the model, also for each token, as vLLM does.",
        tag="Pooling",
        request=pooling.PoolingRequest,
        answers=(pooling.PoolingResponse,),
        errors=POOLED,
    ),
    Operation(
        method="post",
        path="/classify",
        name="classify",
        text="Return the scores of labels, as vLLM does.",
        tag="Pooling",
        request=pooling.ClassifyRequest,
        answers=(pooling.ClassifyResponse,),
        errors=POOLED,
    ),
    *(
        Operation(
            method="post",
            path=path,
            name=name,
            text="Return the scores of pairs of texts, as vLLM does.",
            tag="Pooling",
            request=scoring.ScoreRequest,
            answers=(scoring.ScoreResponse,),
            errors=POOLED,
        )
        for path, name in (("/score", "score"), ("/v1/score", "scoreV1"))
    ),
    Operation(
        method="post",
        path="/rerank",
        name="rerank",
        text=f"{_RERANKS} `documents` in Jina's and Cohere's form, `texts` in text-embeddings-inference's.",
        tag="Pooling",
        request=scoring.RerankRequest,
        answers=(scoring.RerankResponse, list[scoring.Rank]),
        errors=POOLED,
    ),
    *(
        Operation(
            method="post",
            path=path,
            name=name,
            text=_RERANKS,
            tag="Pooling",
            request=scoring.RerankRequest,
            answers=(scoring.RerankResponse, list[scoring.Rank]),
            errors=POOLED,
        )
        for path, name in (("/v1/rerank", "rerankV1"), ("/v2/rerank", "rerankV2"))
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
