"""Compare infd's routes with the types of the `openai` package.

python -m tests.http.openai_surface      list each route: request and answer fields that infd does not serve
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

import openai
from openai.types import (
    Completion,
    CreateEmbeddingResponse,
    Embedding,
    Model,
    completion_create_params,
    embedding_create_params,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat import completion_create_params as chat
from openai.types.chat.chat_completion import Choice
from openai.types.completion_choice import CompletionChoice
from openai.types.conversations import (
    Conversation,
    ConversationItemList,
    conversation_create_params,
    conversation_update_params,
    item_create_params,
)
from openai.types.responses import Response, input_token_count_params, response_create_params
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.responses.response_usage import ResponseUsage

from infd.http.openapi.operations import OPERATIONS
from infd.http.schema.chat import ChatChoice, ChatChunk, ChatResponse, ReplyMessage
from infd.http.schema.completions import CompletionChoice as Choices
from infd.http.schema.completions import CompletionResponse
from infd.http.schema.models import ModelCard
from infd.http.schema.pooling import Embedding as EmbeddingObject
from infd.http.schema.pooling import EmbeddingResponse
from infd.http.schema.responses import ConversationObject, InputTokens, ResponseObject
from infd.http.schema.responses import ResponseUsage as Used
from infd.http.store.items import ItemList

# Parameters of the types with which the package describes a request's body.
BODIES: dict[str, Any] = {
    "/v1/chat/completions": chat.CompletionCreateParamsStreaming,
    "/v1/completions": completion_create_params.CompletionCreateParamsStreaming,
    "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
    "/v1/responses": response_create_params.ResponseCreateParamsStreaming,
    "/v1/responses/input_tokens": input_token_count_params.InputTokenCountParams,
    "/v1/conversations": conversation_create_params.ConversationCreateParams,
    "/v1/conversations/{id}": conversation_update_params.ConversationUpdateParams,
    "/v1/conversations/{id}/items": item_create_params.ItemCreateParams,
}
# The package's types of answers, beside infd's.
ANSWERS: dict[Any, Any] = {
    ChatCompletion: ChatResponse,
    Choice: ChatChoice,
    ChatCompletionMessage: ReplyMessage,
    ChatCompletionChunk: ChatChunk,
    Completion: CompletionResponse,
    CompletionChoice: Choices,
    CreateEmbeddingResponse: EmbeddingResponse,
    Embedding: EmbeddingObject,
    Response: ResponseObject,
    ResponseUsage: Used,
    InputTokenCountResponse: InputTokens,
    Conversation: ConversationObject,
    ConversationItemList: ItemList,
    Model: ModelCard,
}
_CALL = re.compile(r'self\._(get|post|delete|get_api_list)\(\s*(?:path_template\(\s*)?f?"([^"?]+)"')
# Parts of OpenAI's API for accounts, and for products that are not models.
ACCOUNTS = (
    *(
        "admin",
        "beta",
        "chatkit",
        "containers",
        "content_provenance_checks",
        "decisions",
        "evals",
        "fine_tuning",
        "live",
    ),
    *("realtime", "safety", "skills", "uploads", "vector_stores", "videos", "webhooks"),
)


def body_fields() -> dict[str, set[str]]:
    """Return the fields of each route's body, except `include`, `after` and others that go into the query."""
    return {path: {*get_type_hints(kind)} - _in_query(path) for path, kind in BODIES.items()}


def _in_query(path: str) -> set[str]:
    return {"include", "conversation_id"} if path.endswith("/items") else {"conversation_id"} & {path}


def missing_answers() -> dict[str, list[str]]:
    """Return the fields of the package's answers that infd's answers never have."""
    found = {}
    for theirs, ours in ANSWERS.items():
        tag = ours.__struct_config__.tag_field
        if missing := sorted({*theirs.model_fields} - {*ours.__struct_fields__, tag}):
            found[theirs.__name__] = missing
    return found


def routes() -> list[tuple[str, str]]:
    """Return the method and path of each call of the package about models, sorted by path."""
    root = Path(openai.__file__).parent / "resources"
    calls = set()
    for file in root.rglob("*.py"):
        if file.relative_to(root).parts[0].removesuffix(".py") in ACCOUNTS:
            continue
        for method, path in _CALL.findall(file.read_text(encoding="utf-8")):
            calls.add(("get" if method == "get_api_list" else method, "/v1" + path))
    return sorted(calls, key=lambda call: (call[1], call[0]))


def missing_routes() -> list[str]:
    """Return the calls that infd does not answer, as "METHOD path"."""
    served = {(operation.method, _shape(operation.path)) for operation in OPERATIONS}
    return [f"{method.upper()} {path}" for method, path in routes() if (method, _shape(path)) not in served]


def _shape(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


if __name__ == "__main__":
    for route in missing_routes():
        sys.stdout.write(f"{route}: no such route\n")
    for name, fields in missing_answers().items():
        sys.stdout.write(f"{name}: {', '.join(fields)}\n")
