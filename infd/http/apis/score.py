"""POST /score and /rerank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET

from infd.errors import InvalidRequest, Unsupported
from infd.http.apis import inputs
from infd.http.apis.api import PoolingApi
from infd.http.apis.embeddings import usage
from infd.http.formats.openai import OPENAI_ERRORS
from infd.http.formats.tei import TEI_ERRORS
from infd.http.pooling.pooling import check_count, numbered, require_text
from infd.http.pooling.scoring import Scoring, scores
from infd.http.sampling import refuse_unsupported
from infd.http.schema.scoring import (
    Rank,
    RankedDocument,
    RankedText,
    RerankMeta,
    RerankRequest,
    RerankResponse,
    Score,
    ScoredText,
    ScoreRequest,
    ScoreResponse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infd.config import Config
    from infd.http.formats.base import Errors
    from infd.http.pooling.pooling import Pooling, Reduced
    from infd.http.schema.scoring import ScoringFields, Text
    from infd.http.served_model import ServedModel

# The pairs of fields that hold the two sides of a comparison.
SIDES: Final = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


def score(request: ScoreRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request for scores. Raises InvalidRequest, Unsupported, CannotServe."""
    given = {name for pair in SIDES for name in pair if getattr(request, name) is not None}
    first, second = next(((a, b) for a, b in SIDES if given == {a, b}), (None, None))
    if first is None or second is None:
        raise InvalidRequest("give queries and documents, or text_1 and text_2", param="queries")
    queries, where_query = _texts(getattr(request, first), first)
    documents, where_document = _texts(getattr(request, second), second)
    check_count(len(queries), config, first)
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"{first} has {len(queries)} texts and {second} {len(documents)}: give one or as many {first}", param=first
        )
    return _scoring(request, queries, where_query, documents, where_document, second, body_bytes, config).pooling(
        served
    )


def rerank(request: RerankRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request to order documents. Raises InvalidRequest, Unsupported, CannotServe."""
    query, where_query = _texts(request.query, "query")
    found = _documents(request)
    name = "documents" if request.texts is None else "texts"
    where_document = numbered(name, several=isinstance(request.texts or request.documents, list))
    scoring = _scoring(request, query, where_query, found, where_document, name, body_bytes, config)
    keep, side = scoring.keep, scoring.side
    if request.truncate and keep is None:
        keep = -1
    if request.truncation_direction is not None:
        side = "left" if request.truncation_direction.lower() == "left" else "right"
    raw = False if request.raw_scores else scoring.activation
    return msgspec.structs.replace(scoring, keep=keep, side=side, activation=raw).pooling(served)


def rerank_errors(request: RerankRequest) -> Errors:
    """Return the errors of the API whose field holds the documents."""
    return OPENAI_ERRORS if request.texts is None or request.documents is not None else TEI_ERRORS


def _scoring(
    request: ScoringFields,
    queries: Sequence[str],
    where_query: Callable[[int], str],
    documents: Sequence[str],
    where_document: Callable[[int], str],
    param: str,
    body_bytes: int,
    config: Config,
) -> Scoring:
    common = inputs.asker(request, config.limits)
    inputs.check_ends(request.add_generation_prompt, request.continue_final_message)
    check_count(len(documents), config, param)
    for number, text in enumerate(queries):
        require_text(text, where_query(number))
    return Scoring(
        asker=common,
        queries=queries,
        documents=documents,
        where_query=where_query,
        where_document=where_document,
        body_bytes=body_bytes,
        query_tokens=request.max_tokens_per_query or None,
        document_tokens=request.max_tokens_per_doc or None,
        keep=request.truncate_prompt_tokens,
        side=request.truncation_side or "right",
        add_special_tokens=request.add_special_tokens,
        activation=request.use_activation,
        instruction=request.instruction,
        variables={} if request.chat_template_kwargs is None else msgspec.to_builtins(request.chat_template_kwargs),
        add_generation_prompt=request.add_generation_prompt is not False,
    )


def _texts(given: Text | list[Text], name: str) -> tuple[list[str], Callable[[int], str]]:
    """Return the texts of a field, and the function that names them. Raises InvalidRequest, Unsupported."""
    where = numbered(name, several=isinstance(given, list))
    listed = given if isinstance(given, list) else [given]
    return [_text(each, where(number)) for number, each in enumerate(listed)], where


def _text(given: Text, where: str) -> str:
    if isinstance(given, str):
        return given
    refuse_unsupported(given, ScoredText.NEUTRAL, path=f"{where}.")
    if (given.text is None) == (given.content is None):
        raise InvalidRequest(f"{where} has either text or content", param=where)
    if given.text is not None:
        return given.text
    if isinstance(given.content, str):
        return given.content
    for number, part in enumerate(given.content or ()):
        if part.type != "text" or part.text is None:
            raise Unsupported(f"content of type {part.type[:32]!r}", param=f"{where}.content[{number}].type")
    return "".join(part.text or "" for part in given.content or ())


def _documents(request: RerankRequest) -> list[str]:
    """Return the documents of a request. Raises InvalidRequest."""
    if (request.documents is None) == (request.texts is None):
        raise InvalidRequest(
            "give documents, as Jina's and Cohere's clients do, or texts, as those of text-embeddings-inference",
            param="documents",
        )
    if request.documents is None:
        return request.texts or []
    return _texts(request.documents, "documents")[0]


def scored(request: ScoreRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield the body of an answer with scores."""
    second = next(getattr(request, b) for a, b in SIDES if getattr(request, a) and getattr(request, b) is not None)
    found = scores(reduced, len(second) if isinstance(second, list) else 1)
    response = ScoreResponse(
        id=f"score-{reduced.id}",
        created=reduced.created,
        model=reduced.model,
        data=[Score(index=index, score=value) for index, value in enumerate(found)],
        usage=usage(reduced),
    )
    yield msgspec.json.encode(response)


def ranked(request: RerankRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield the body of an answer with ordered documents, in the form of the API whose field held them."""
    documents = _documents(request)
    found = scores(reduced, len(documents))
    order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
    if request.texts is not None:
        ranks = [
            Rank(index=index, text=documents[index] if request.return_text else UNSET, score=found[index])
            for index in order[: request.top_n or None]
        ]
        yield msgspec.json.encode(ranks)
        return
    shown = request.return_documents is not False
    results = [
        RankedDocument(
            index=index,
            relevance_score=found[index],
            document=RankedText(text=documents[index]) if shown else UNSET,
        )
        for index in order[: request.top_n or None]
    ]
    response = RerankResponse(
        id=f"rerank-{reduced.id}", model=reduced.model, usage=usage(reduced), results=results, meta=RerankMeta()
    )
    yield msgspec.json.encode(response)


SCORE: Final = PoolingApi(msgspec.json.Decoder(ScoreRequest), score, scored, OPENAI_ERRORS)
RERANK: Final = PoolingApi(msgspec.json.Decoder(RerankRequest), rerank, ranked, OPENAI_ERRORS, rerank_errors)
