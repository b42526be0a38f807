"""A hook of schemathesis: half of the bodies that it generates become bodies that infd answers.

Most of its bodies are refused, each for a value of one of a hundred fields, and only an answer creates what other
operations are called for.
"""

from __future__ import annotations

from typing import Any

import schemathesis

_MESSAGE = {"type": "message", "role": "user", "content": "a"}
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
_KEPT = ("echo", "metadata", "n", "stop", "store", "stream", "temperature", "top_p")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    operation, size = context.operation.definition.raw["operationId"], len(repr(body))
    if operation not in ANSWERED or not isinstance(body, dict) or size % 2:
        return body
    answered = ANSWERED[operation] | {name: body[name] for name in _KEPT if name in body}
    if operation == "createResponse" and size % 8:  # most responses run in the background, which can be cancelled
        answered |= {"background": True, "store": True, "stream": False}
    return answered
