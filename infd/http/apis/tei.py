"""The APIs of text-embeddings-inference: /embed, /embed_all, /embed_sparse, /predict and /similarity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from infd.errors import CannotServe, InvalidRequest
from infd.http.apis.api import PoolingApi
from infd.http.formats.numbers import Encoding, numbers
from infd.http.formats.tei import TEI_ERRORS
from infd.http.pieces import listed
from infd.http.pooling.pooling import Asker, Pooling, check_count, numbered, require_text
from infd.http.pooling.scoring import Scoring, scores
from infd.http.schema.tei import (
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    Prediction,
    PredictRequest,
    SimilarityParameters,
    SimilarityRequest,
    SparseValue,
)
from infd.text.cutting import Passage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.config import Config
    from infd.http.pooling.pooling import Input, Reduced
    from infd.http.schema.tei import Direction, TeiFields
    from infd.http.served_model import ServedModel
    from infd.request import PoolTask
    from infd.text.cutting import Side

PLAIN: Final = Encoding()


def embed(request: EmbedRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request for embeddings. Raises InvalidRequest, CannotServe."""
    found = _pooling(request, body_bytes, served, config, "embed")
    return msgspec.structs.replace(found, normalize=request.normalize is not False, dimensions=request.dimensions)


def embed_all(request: EmbedAllRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request for the embeddings of tokens, which are not normalized. Raises InvalidRequest, CannotServe."""
    return msgspec.structs.replace(_pooling(request, body_bytes, served, config, "token_embed"), normalize=False)


def embed_sparse(request: EmbedSparseRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request for weights of tokens. Raises InvalidRequest, CannotServe."""
    judges = len(served.pooling.labels) > 1 or served.pooling.step_token is not None
    if "token_classify" in served.pools and judges:
        raise CannotServe(f"{served.names[0]} gives tokens labels, not weights")
    return _pooling(request, body_bytes, served, config, "token_classify")


def _pooling(request: EmbedAllRequest, body_bytes: int, served: ServedModel, config: Config, task: PoolTask) -> Pooling:
    served.require_pooling(task)
    given: Any = request.inputs
    inputs: Sequence[Input]
    kinds = {str} if isinstance(given, str) else {type(each) for each in given}
    several = not isinstance(given, str) and kinds != {int}
    if kinds == {str}:
        inputs = [Passage((text,)) for text in ([given] if isinstance(given, str) else given)]
    elif kinds == {int}:
        inputs = [given]
    elif kinds == {list}:
        inputs = given
    else:
        raise InvalidRequest("inputs is a text, texts, token ids or lists of token ids, not a mixture", param="inputs")
    return _found(request, inputs, body_bytes, config, task, several=several, prompt_name=request.prompt_name)


def predict(request: PredictRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request for the scores of labels. Raises InvalidRequest, CannotServe."""
    served.require_pooling("classify")
    given: Any = request.inputs
    if isinstance(given, str):
        passages = [Passage((given,))]
    elif {type(each) for each in given} == {str}:
        if len(given) > 2:
            raise InvalidRequest(
                "a list of texts is one text or a pair; several inputs are a list of such lists", param="inputs"
            )
        passages = [Passage(tuple(given))]
    elif {type(each) for each in given} == {list}:
        passages = [Passage(tuple(each)) for each in given]
    else:
        raise InvalidRequest("inputs is a text, a pair, or a list of lists of texts, not a mixture", param="inputs")
    if served.pooling.label_tokens and any(len(passage.texts) > 1 for passage in passages):
        raise InvalidRequest("this model's chat template renders pairs: send them to /rerank or /score", param="inputs")
    several = _several(request)
    found = _found(request, passages, body_bytes, config, "classify", several=several)
    return msgspec.structs.replace(found, activation=False if request.raw_scores else None)


def similarity(request: SimilarityRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request to compare texts. Raises InvalidRequest, CannotServe."""
    served.require_pooling("embed")
    sentences, parameters = request.inputs.sentences, request.parameters or SimilarityParameters()
    check_count(len(sentences), config, "inputs.sentences")
    where = numbered("inputs.sentences", several=True)
    where_source = numbered("inputs.source_sentence", several=False)
    require_text(request.inputs.source_sentence, where_source(0))
    for number, text in enumerate(sentences):
        require_text(text, where(number))
    return Scoring(
        asker=Asker(model=request.model),
        queries=[request.inputs.source_sentence],
        documents=sentences,
        where_query=where_source,
        where_document=where,
        body_bytes=body_bytes,
        keep=-1 if parameters.truncate else None,
        side=_side(parameters.truncation_direction),
        prompt_name=parameters.prompt_name,
    ).pooling(served)


def _found(
    request: TeiFields,
    inputs: Sequence[Input],
    body_bytes: int,
    config: Config,
    task: PoolTask,
    *,
    several: bool,
    prompt_name: str | None = None,
) -> Pooling:
    check_count(len(inputs), config, "inputs")
    where = numbered("inputs", several=several)
    for number, each in enumerate(inputs):
        if isinstance(each, Passage):
            require_text(each.texts[0], where(number))
    return Pooling(
        asker=Asker(model=request.model),
        inputs=inputs,
        where=where,
        body_bytes=body_bytes,
        task=task,
        keep=-1 if request.truncate else None,
        side=_side(request.truncation_direction),
        prompt_name=prompt_name,
    )


def _side(direction: Direction | None) -> Side:
    return "left" if direction is not None and direction.lower() == "left" else "right"


def _several(request: PredictRequest) -> bool:
    return isinstance(request.inputs, list) and isinstance(request.inputs[0], list)


def embedded(request: EmbedRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield a list of embeddings."""
    return listed(PLAIN.json(pooled, by_token=False) for pooled in reduced.pooled)


def embedded_tokens(request: EmbedAllRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield, for each input, a list of its tokens' embeddings."""
    return listed(PLAIN.json(pooled, by_token=True) for pooled in reduced.pooled)


def weighted(request: EmbedSparseRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield, for each input, the largest weight of each token that is not special, where it is positive."""
    special = reduced.served.tokenizer.special_ids - reduced.served.tokenizer.ids_of("mask_token")

    def item(ids: Sequence[int], weights: Sequence[float]) -> bytes:
        largest: dict[int, float] = {}
        for token_id, weight in zip(ids, weights, strict=False):  # the token that ends the text may have no weight
            if token_id not in special and weight > largest.get(token_id, 0.0):
                largest[token_id] = weight
        return msgspec.json.encode([SparseValue(index=index, value=value) for index, value in largest.items()])

    inputs = zip(reduced.prompts, reduced.skips, reduced.pooled, strict=True)
    return listed((item(ids[skip:], numbers(pooled)),) for ids, skip, pooled in inputs)


def predicted(request: PredictRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield the labels of an input, or lists of labels if the request has several, highest score first."""
    names = reduced.served.pooling.labels

    def item(found: Sequence[float]) -> bytes:
        order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
        return msgspec.json.encode([Prediction(score=found[index], label=names[index]) for index in order])

    items = (item(numbers(pooled)) for pooled in reduced.pooled)
    return listed((each,) for each in items) if _several(request) else items


def compared(request: SimilarityRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield the list of similarities."""
    yield msgspec.json.encode(scores(reduced, len(request.inputs.sentences)))


EMBED: Final = PoolingApi(msgspec.json.Decoder(EmbedRequest), embed, embedded, TEI_ERRORS)
EMBED_ALL: Final = PoolingApi(msgspec.json.Decoder(EmbedAllRequest), embed_all, embedded_tokens, TEI_ERRORS)
EMBED_SPARSE: Final = PoolingApi(msgspec.json.Decoder(EmbedSparseRequest), embed_sparse, weighted, TEI_ERRORS)
PREDICT: Final = PoolingApi(msgspec.json.Decoder(PredictRequest), predict, predicted, TEI_ERRORS)
SIMILARITY: Final = PoolingApi(msgspec.json.Decoder(SimilarityRequest), similarity, compared, TEI_ERRORS)
