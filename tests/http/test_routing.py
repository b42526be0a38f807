from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from infd.http.app import routes
from infd.http.routing import Routes

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.routing import Request
    from tests.http.endpoint import Endpoint


async def one(request: Request) -> web.StreamResponse:
    raise NotImplementedError


async def other(request: Request) -> web.StreamResponse:
    raise NotImplementedError


@pytest.fixture
def some() -> Routes:
    found = Routes()
    found.add("GET", "/things", one)
    found.add("POST", "/things/{id}", one)
    found.add("DELETE", "/things/{id}", other)
    found.add("GET", "/things/{id}/parts/{part}", other)
    found.add("GET", "/names/{name:.+}", other)
    return found


@pytest.mark.parametrize(
    ("method", "path", "label", "variables"),
    [
        ("GET", "/things", "/things", {}),
        ("HEAD", "/things", "/things", {}),
        ("POST", "/things/a", "/things/{id}", {"id": "a"}),
        ("DELETE", "/things/a%2Fb%2525", "/things/{id}", {"id": "a/b%25"}),
        ("HEAD", "/things/a/parts/b", "/things/{id}/parts/{part}", {"id": "a", "part": "b"}),
        ("GET", "/names/a/b", "/names/{name}", {"name": "a/b"}),
        ("POST", "/things", "none", {}),
        ("GET", "/things/a", "none", {}),
        ("GET", "/things/", "none", {}),
        ("POST", "/things/a/b", "none", {}),
        ("GET", "things", "none", {}),
    ],
)
def test_a_route_is_found_by_method_and_path(
    some: Routes, method: str, path: str, label: str, variables: dict[str, str]
):
    route, found = some.find(method, path)

    assert (route.path, found) == (label, variables)


def test_the_methods_of_a_path_are_known(some: Routes):
    assert some.methods("/things") == {"GET", "HEAD"}
    assert some.methods("/things/a") == {"POST", "DELETE"}
    assert some.methods("/elsewhere") == set()


async def test_a_head_request_gets_the_headers_of_get_without_the_body(endpoint: Endpoint):
    async with endpoint.session.get("/version") as whole, endpoint.session.head("/version") as head:
        assert head.status == 200
        assert head.headers["Content-Length"] == whole.headers["Content-Length"]
        assert await head.read() == b""


async def test_a_percent_encoded_path_is_that_of_its_route(endpoint: Endpoint):
    async with endpoint.session.get(endpoint.url + "/v1/m%6Fdels") as response:
        assert response.status == 200


@pytest.mark.parametrize("path", [path for method, path in routes() if method == "POST"])
async def test_a_wrong_method_is_refused_in_the_format_of_its_path(endpoint: Endpoint, path: str):
    async with endpoint.session.put(re.sub(r"\{\w+\}", "x", path)) as response:
        body = await response.json()
        assert response.status == 405
        assert "POST" in response.headers["Allow"].split(",")
        assert ("error_type" in body) == (path in {"/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity"})
