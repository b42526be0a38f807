"""POST /v1/embeddings, /pooling and /classify: OpenAI's and vLLM's requests to pool prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import InvalidRequest
from infd.http.apis import inputs
from infd.http.apis.api import PoolingApi
from infd.http.formats.numbers import Encoding, numbers
from infd.http.formats.openai import OPENAI_ERRORS
from infd.http.pieces import enclosed, placeholder
from infd.http.schema.pooling import (
    Classification,
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    PromptUsage,
)
from infd.request import by_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from infd.config import Config
    from infd.http.pooling.pooling import Pooling, Reduced
    from infd.http.schema.pooling import EncodingFields
    from infd.http.served_model import ServedModel
    from infd.request import PoolTask


def usage(reduced: Reduced) -> PromptUsage:
    tokens = reduced.tokens
    return PromptUsage(prompt_tokens=tokens, total_tokens=tokens)


def embedding(request: EmbeddingRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request for embeddings. Raises InvalidRequest, Unsupported, CannotServe."""
    return _encoded(request, body_bytes, config, served.require_pooling("embed"))


def pooling(request: PoolingRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request for any task of pooling. Raises InvalidRequest, Unsupported, CannotServe."""
    return _encoded(request, body_bytes, config, served.require_pooling(request.task))


def classify(request: ClassifyRequest, body_bytes: int, served: ServedModel, config: Config) -> Pooling:
    """Convert a request for labels. Raises InvalidRequest, Unsupported, CannotServe."""
    return inputs.pooling(request, body_bytes, config, served.require_pooling("classify"))


def _encoded(request: EncodingFields, body_bytes: int, config: Config, task: PoolTask) -> Pooling:
    if request.prompt_name is not None and request.input_type is not None:
        raise InvalidRequest("prompt_name and input_type both name a prompt: send one of them", param="input_type")
    return inputs.pooling(
        request,
        body_bytes,
        config,
        task,
        prompt_name=request.prompt_name,
        input_type=request.input_type,
        dimensions=request.dimensions,
        normalize=request.use_activation,
    )


def _encoding(request: EncodingFields) -> Encoding:
    return Encoding(
        request.encoding_format == "base64", request.embed_dtype or "float32", request.endianness or "little"
    )


def embeddings(request: EmbeddingRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield the body of an answer with embeddings."""
    encoding = _encoding(request)
    items = (
        _item(b'{"object":"embedding","index":%d,"embedding":' % index, encoding.json(pooled, by_token=False))
        for index, pooled in enumerate(reduced.pooled)
    )
    return _answer(EmbeddingResponse, "embd", reduced, items)


def pooled_numbers(request: PoolingRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield the body of an answer with the numbers of any task."""
    encoding, rows = _encoding(request), by_token(reduced.task)
    items = (
        _item(b'{"object":"pooling","index":%d,"data":' % index, encoding.json(pooled, by_token=rows))
        for index, pooled in enumerate(reduced.pooled)
    )
    return _answer(PoolingResponse, "pool", reduced, items)


def _item(opening: bytes, numbers: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the JSON of an object. opening: its fields but the last one's value, which is `numbers`."""
    for piece in numbers:
        yield opening + piece
        opening = b""
    yield b"}"


def labels(request: ClassifyRequest, reduced: Reduced) -> Iterator[bytes]:
    """Yield the body of an answer with labels."""
    names = reduced.served.pooling.labels

    def item(index: int, scores: tuple[float, ...]) -> bytes:
        best = max(range(len(scores)), key=scores.__getitem__)
        label = names[best] if best < len(names) else None
        found = Classification(index=index, label=label, probs=list(scores), num_classes=len(scores))
        return msgspec.json.encode(found)

    items = ((item(index, numbers(pooled)),) for index, pooled in enumerate(reduced.pooled))
    return _answer(ClassifyResponse, "classify", reduced, items)


def _answer(
    kind: type[EmbeddingResponse | PoolingResponse | ClassifyResponse],
    prefix: str,
    reduced: Reduced,
    items: Iterable[Iterable[bytes]],
) -> Iterator[bytes]:
    """Yield the body of an answer. prefix: of its id; items: the elements of its list, each encoded in pieces."""
    response = kind(
        id=f"{prefix}-{reduced.id}",
        created=reduced.created,
        model=reduced.model,
        data=placeholder("data"),
        usage=usage(reduced),
    )
    return enclosed(response, items)


EMBEDDINGS: Final = PoolingApi(msgspec.json.Decoder(EmbeddingRequest), embedding, embeddings, OPENAI_ERRORS)
POOLING: Final = PoolingApi(msgspec.json.Decoder(PoolingRequest), pooling, pooled_numbers, OPENAI_ERRORS)
CLASSIFY: Final = PoolingApi(msgspec.json.Decoder(ClassifyRequest), classify, labels, OPENAI_ERRORS)
