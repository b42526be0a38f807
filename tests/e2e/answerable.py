"""A hook of schemathesis: half of the bodies that it generates become bodies that infd answers.

Most of its bodies are refused, each for a value of one of a hundred fields, and only an answer creates what other
operations are called for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import schemathesis

_MESSAGE = {"type": "message", "role": "user", "content": "a"}
_PAIR, _RANKED = {"text_1": "a", "text_2": ["b", "c"]}, {"query": "a", "documents": ["b", "c"]}
ANSWERED: dict[str, dict[str, Any]] = {
    "createChatCompletion": {"messages": [_MESSAGE], "max_tokens": 2},
    "createCompletion": {"prompt": "a", "max_tokens": 2},
    "createMessage": {"messages": [_MESSAGE], "max_tokens": 2},
    "createResponse": {"input": "a", "max_output_tokens": 2},
    "countInputTokens": {"input": "a"},
    "createConversation": {"items": [_MESSAGE]},
    "addItems": {"items": [_MESSAGE]},
    "tokenize": {"prompt": "a"},
}
# Operations that belong to no sequence of calls, and so get few bodies: all of the first few are answered.
ALONE: dict[str, dict[str, Any]] = {
    "createEmbedding": {"input": ["a", "b"]},
    "createEmbeddingUnprefixed": {"input": ["a", "b"]},
    "pool": {"input": "a"},
    "classify": {"input": "a"},
    "score": _PAIR,
    "scoreV1": _PAIR,
    "rerank": _RANKED,
    "rerankV1": _RANKED,
    "rerankV2": {"query": "a", "texts": ["b", "c"]},
    "embed": {"inputs": ["a", "b"]},
    "embedAll": {"inputs": "a"},
    "embedSparse": {"inputs": "a"},
    "predict": {"inputs": "a"},
    "similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
}
_KEPT = ("echo", "metadata", "n", "stop", "store", "stream", "temperature", "top_p", "encoding_format")

_FIRST = 3
_seen: Counter[str] = Counter()  # bodies by operation


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    operation, size = context.operation.definition.raw["operationId"], len(repr(body))
    answerable = (ANSWERED | ALONE).get(operation)
    if answerable is None or not isinstance(body, dict):
        return body
    _seen[operation] += 1
    if size % 2 and (operation in ANSWERED or _seen[operation] > _FIRST):
        return body
    answered = answerable | {name: body[name] for name in _KEPT if name in body}
    if operation == "createResponse" and size % 8:  # most responses run in the background, which can be cancelled
        answered |= {"background": True, "store": True, "stream": False}
    return answered
