"""/openapi.json describes every route, and answers are as it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import jsonschema
import pytest

from infd.errors import RequestError
from infd.http import app
from infd.http.openapi.document import document, statuses
from infd.http.openapi.operations import OPERATIONS
from infd.http.openapi.page import page
from tests.http.endpoint import Endpoint, serving

USER = {"role": "user", "content": "hi"}
GENERATING = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 3, "logprobs": 2, "echo": True, "return_token_ids": True},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 3, "top_logprobs": 1, "text": {"format": {"type": "text"}}},
}
OTHERS = {
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 3},
    "/v1/chat/completions/render": {"messages": [USER]},
    "/v1/completions/render": {"prompt": ["a", "b"]},
    "/v1/messages/render": {"messages": [USER], "max_tokens": 1},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/conversations": {"items": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "ab", "return_token_strs": True},
    "/detokenize": {"tokens": [5]},
}


def check(path: str, method: str, status: int, body: Any) -> None:
    """Validate an answer against the document."""
    described = document()
    answer = described["paths"][path][method]["responses"][str(status)]
    schema = {**answer["content"]["application/json"]["schema"], "components": described["components"]}
    jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)


def test_the_document_describes_exactly_the_routes():
    served = {(method.lower(), path) for method, path in app.routes()}
    described = {(operation.method, operation.path) for operation in OPERATIONS}
    without_v1 = {(method, path.removeprefix("/v1")) for method, path in described}

    assert described <= served
    assert served - described <= without_v1
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


def test_every_reference_and_link_has_a_target():
    described = document()
    text = json.dumps(described)
    names = set(re.findall(r"#/components/schemas/([^\"]+)", text))

    assert names == {*described["components"]["schemas"]}
    operations = {operation.name for operation in OPERATIONS}
    assert {link.operation for operation in OPERATIONS for link in operation.links} <= operations
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_error_with_a_status_is_described_somewhere():
    def kinds(kind: type[RequestError]) -> set[type[RequestError]]:
        return {kind}.union(*map(kinds, kind.__subclasses__()))

    known = {status for operation in OPERATIONS for status in statuses(operation)}
    errors = {each for each in kinds(RequestError) if each.__module__ == "infd.errors"}
    # 403 (to an OPTIONS request of another origin) and 405 answer methods that no operation has.
    assert {error.status for error in errors} == known | {403, 405}


@pytest.mark.parametrize("path", [*GENERATING, *OTHERS])
async def test_answers_are_as_described(endpoint: Endpoint, path: str):
    body = (GENERATING | OTHERS)[path]
    schema = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(body, {**schema, "components": document()["components"]})
    for said, status in ((body, 200), ({**body, "model": "nobody"}, 404), (b"{", 400)):
        got, answer = await endpoint.post(path, said)
        if status != 404 or path != "/v1/conversations":
            assert got == status, answer
        check(path, "post", got, answer)


async def test_other_answers_are_as_described(endpoint: Endpoint):
    async def get(path: str, **headers: str) -> Any:
        async with endpoint.session.get(path, headers=headers) as response:
            return await response.json()

    check("/v1/models", "get", 200, await get("/v1/models"))
    check("/v1/models", "get", 200, await get("/v1/models", **{"anthropic-version": "2023-06-01"}))
    check("/v1/models/{id}", "get", 200, await get("/v1/models/alias"))
    check("/v1/models/{id}", "get", 404, await get("/v1/models/nobody"))
    _, response = await endpoint.post("/v1/responses", GENERATING["/v1/responses"])
    check("/v1/responses/{id}", "get", 200, await get(f"/v1/responses/{response['id']}"))
    check("/v1/responses/{id}/input_items", "get", 200, await get(f"/v1/responses/{response['id']}/input_items"))
    check("/v1/responses/{id}", "get", 404, await get("/v1/responses/resp_1"))


async def test_a_query_that_is_not_as_described_is_refused(endpoint: Endpoint):
    _, response = await endpoint.post("/v1/responses", GENERATING["/v1/responses"])
    async with endpoint.session.get(f"/v1/responses/{response['id']}?stream=H") as refused:
        assert (refused.status, (await refused.json())["error"]["param"]) == (400, "stream")
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        async with endpoint.session.get("/v1/models?limit=0", headers=headers) as refused:
            assert refused.status == 400


async def test_both_documents_are_served_and_need_a_key_where_there_are_keys(endpoint: Endpoint):
    async with endpoint.session.get("/openapi.json") as response:
        assert await response.json() == document()
    async with endpoint.session.get("/docs") as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert await response.read() == page()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    from infd.http.auth import Keys

    async with serving(keys=Keys.of("k")) as guarded:
        for path in ("/openapi.json", "/docs"):
            assert (await guarded.session.get(path)).status == 401


def test_the_page_names_every_path_and_fetches_nothing():
    text = page().decode()

    assert all(operation.path in text for operation in OPERATIONS)
    assert not re.search(r"<script|<link|src=|https?://|@import|url\(", text)


def test_start_does_not_load_the_description():
    code = "import sys, infd.http.app; print([name for name in sys.modules if name.startswith('infd.http.openapi')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded == "[]\n"
