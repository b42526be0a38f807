"""Make the OpenAPI document from the table of operations."""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from infd.http.openapi.operations import OPERATIONS
from infd.http.openapi.schemas import Components
from infd.version import __version__

if TYPE_CHECKING:
    from infd.errors import RequestError
    from infd.http.openapi.operation import Operation, Parameter

_ABOUT: Final = """infd serves a language model to clients of OpenAI's, Anthropic's and vLLM's APIs.

Unknown fields of a body are ignored. A known field that is not served is refused by name, unless its value changes no
answer. The paths of /v1/chat/completions, /v1/completions, /v1/messages and /v1/models exist without /v1 too.

The routes that pool need a model for embeddings, labels or scores: /v1/models lists the `tasks` of each model."""

# Before OpenAPI 3.2, the schema of an event stream describes each event.
_EVENT: Final = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "Of Responses and Anthropic's messages: the type of the event."},
        "data": {"type": "string", "description": "JSON; of OpenAI's other routes, the last is [DONE]."},
    },
    "required": ["data"],
}


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    components, paths = Components(), dict[str, dict[str, Any]]()
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "infd", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": components.schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


@cache
def encoded() -> bytes:
    return msgspec.json.encode(document())


def statuses(operation: Operation) -> dict[int, list[type[RequestError]]]:
    """Return the errors that an operation may answer, by status."""
    found: dict[int, list[type[RequestError]]] = {}
    for error in dict.fromkeys(operation.errors):
        found.setdefault(error.status, []).append(error)
    return dict(sorted(found.items()))


def _operation(operation: Operation, components: Components) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": components.any_of(operation.answers)}}
    success: dict[str, Any] = {"description": "The answer.", "content": dict(content)}
    if operation.streams:
        success["content"]["text/event-stream"] = {"schema": _EVENT}
    if operation.links:
        success["links"] = {
            link.operation: {"operationId": link.operation, "parameters": link.parameters} for link in operation.links
        }
    responses: dict[str, Any] = {"200": success}
    if operation.failing is not None:
        responses[str(operation.failing)] = {"description": "The probe fails.", "content": content}
    shape = components.any_of(operation.failures)
    for status, errors in statuses(operation).items():
        failure = {"description": _causes(status, errors), "content": {"application/json": {"schema": shape}}}
        if any(error.retry_after_s is not None for error in errors):
            failure["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
        responses[str(status)] = failure
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.text,
        "tags": [operation.tag],
        "responses": responses,
    }
    if any(error.status == HTTPStatus.UNAUTHORIZED for error in operation.errors):
        found["security"] = [{}, {"bearer": []}, {"x_api_key": []}]  # a key is required only if the server has keys
    if operation.parameters:
        found["parameters"] = [_parameter(operation, parameter, components) for parameter in operation.parameters]
    if operation.request is not None:
        content = {"application/json": {"schema": components.schema(operation.request)}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _parameter(operation: Operation, parameter: Parameter, components: Components) -> dict[str, Any]:
    in_path = f"{{{parameter.name}}}" in operation.path
    return {
        "name": parameter.name,
        "in": "path" if in_path else "query",
        "required": in_path,
        "description": parameter.text,
        "schema": components.schema(parameter.type),
    }


def _causes(status: int, errors: list[type[RequestError]]) -> str:
    codes = list(dict.fromkeys(error.code for error in errors if error.code))
    phrase = HTTPStatus(status).phrase
    return f"{phrase}; code {' or '.join(codes)}." if codes else f"{phrase}."
