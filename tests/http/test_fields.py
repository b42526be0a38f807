"""infd/http/README.md is current, and every field that other servers know is served, refused or ignored by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import pytest

from tests.http import field_page

STRUCTS = field_page.requests()


def test_the_page_is_current():
    assert field_page.FILE.read_text(encoding="utf-8") == field_page.page(), "run `python -m tests.http.field_page`"


@pytest.mark.parametrize("server", field_page.NAMES)
def test_every_field_that_a_server_knows_is_known_by_name(server: str):
    for path, fields in field_page.known()[server].items():
        assert fields <= {*STRUCTS[path].__struct_fields__}, path


@pytest.mark.parametrize("path", STRUCTS)
def test_the_tables_of_a_request_name_its_fields(path: str):
    request = STRUCTS[path]
    fields = {*request.__struct_fields__}

    assert {*getattr(request, "IGNORED", ())} <= fields
    assert {*getattr(request, "SUPPORTED", ())} <= fields
    assert {*getattr(request, "NEUTRAL", {})} <= {*field_page.refusals(request)}
    assert {*getattr(request, "ALIASES", {}), *getattr(request, "ALIASES", {}).values()} <= fields


@pytest.mark.exhaustive
def test_anthropics_fields_are_its_packages():
    package = pytest.importorskip("anthropic", reason="`make test-all` installs it")
    from anthropic.types import beta, message_count_tokens_params, message_create_params

    assert package
    known = field_page.known()["anthropic"]
    kinds: dict[str, list[Any]] = {
        "/v1/messages": [
            message_create_params.MessageCreateParamsStreaming,
            beta.message_create_params.MessageCreateParamsStreaming,
        ],
        "/v1/messages/count_tokens": [message_count_tokens_params.MessageCountTokensParams],
    }
    for path, types in kinds.items():
        assert {field for kind in types for field in get_type_hints(kind)} <= known[path], path


async def test_refused_and_ignored_fields_are_so_at_the_route(endpoint: Any):
    least: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/v1/responses/input_tokens": {"input": "a"},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
        "/tokenize": {"prompt": "a"},
        "/v1/embeddings": {"input": "a"},
        "/pooling": {"input": "a"},
        "/classify": {"input": "a"},
        "/score": {"text_1": "a", "text_2": "b"},
        "/rerank": {"query": "a", "documents": ["b"]},
    }
    for path, body in least.items():
        answer = None
        for name, values in field_page.refusals(STRUCTS[path]).items():
            for value in (None, *values):
                status, answer = await endpoint.post(path, {**body, name: value})
                assert status == 200, (path, name, value, answer)
            status, answer = await endpoint.post(path, {**body, name: {"an": "odd value"}})
            assert status == 400, (path, name, answer)
            assert name in answer["error"]["message"]
        for name in getattr(STRUCTS[path], "IGNORED", ()):
            for value in ("x", {"x": "y"}, True, ["x"]):
                said = msgspec.json.encode({name: value})
                if _valid(STRUCTS[path], {**body, name: value}):
                    status, answer = await endpoint.post(path, {**body, name: value})
                    assert status == 200, (path, said, answer)


def _valid(struct: Any, body: dict[str, Any]) -> bool:
    try:
        msgspec.convert(body, struct)
    except msgspec.ValidationError:
        return False
    return True
