"""Cross-origin requests of web pages."""

from __future__ import annotations

from typing import Any

import pytest

from infd.config import Config, ServerConfig
from infd.http.auth import Keys
from tests.http.endpoint import Endpoint, serving

PAGE = "https://chat.example"
COMPLETIONS = "/v1/completions"
ASKING = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def allowing(*origins: str) -> Config:
    return Config(server=ServerConfig(cors_origins=origins))


async def preflight(endpoint: Endpoint, origin: str = PAGE) -> tuple[int, Any]:
    async with endpoint.session.options(COMPLETIONS, headers={"Origin": origin, **ASKING}) as response:
        return response.status, response.headers


async def ask(endpoint: Endpoint, origin: str = PAGE, **fields: Any) -> tuple[int, Any]:
    said = {"prompt": [5, 6, 7], "max_tokens": 2, **fields}
    async with endpoint.session.post(COMPLETIONS, json=said, headers={"Origin": origin}) as response:
        await response.read()
        return response.status, response.headers


async def test_an_allowed_origin_may_send_a_key_and_read_the_answer():
    async with serving(allowing(PAGE, "http://localhost:3000"), keys=Keys.of("secret")) as endpoint:
        status, headers = await preflight(endpoint)

        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == PAGE
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in headers["Access-Control-Allow-Methods"]

        status, headers = await ask(endpoint)
        assert status == 401, "a preflight needs no key, the request does"
        assert headers["Access-Control-Allow-Origin"] == PAGE, "else the page could not read why"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"max_tokens": -1}])
async def test_every_kind_of_answer_is_readable(fields: dict[str, Any]):
    async with serving(allowing(PAGE)) as endpoint:
        _, headers = await ask(endpoint, **fields)

        assert headers["Access-Control-Allow-Origin"] == PAGE
        assert "X-Request-Id" in headers["Access-Control-Expose-Headers"]
        assert headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    "origin", ["https://chat.example.evil", "http://chat.example", "https://chat.example:444", "null"]
)
async def test_other_origins_get_no_permission(origin: str):
    async with serving(allowing(PAGE)) as endpoint:
        status, headers = await preflight(endpoint, origin)
        assert status == 403
        assert "Access-Control-Allow-Origin" not in headers

        _, headers = await ask(endpoint, origin)
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Vary"] == "Origin"


async def test_a_star_allows_every_page():
    async with serving(allowing("*")) as endpoint:
        assert (await preflight(endpoint, "null"))[1]["Access-Control-Allow-Origin"] == "*"
        _, headers = await ask(endpoint, "https://anything.example")
        assert headers["Access-Control-Allow-Origin"] == "*"


async def test_unless_set_no_page_may(endpoint: Endpoint):
    status, headers = await preflight(endpoint)
    assert status == 403
    assert not {"Access-Control-Allow-Origin", "Vary"} & headers.keys()


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:8080", True),
        ("http://localhost.evil.example", False),
        ("http://localhost:3000.evil.example", False),
        ("file://localhost", False),
    ],
)
async def test_localhost_allows_every_port_of_this_machine(origin: str, allowed: bool):
    async with serving(allowing("localhost")) as endpoint:
        status, headers = await preflight(endpoint, origin)

        assert (status, headers.get("Access-Control-Allow-Origin")) == ((204, origin) if allowed else (403, None))


async def test_a_refused_preflight_names_the_setting():
    async with (
        serving() as endpoint,
        endpoint.session.options(COMPLETIONS, headers={"Origin": PAGE, **ASKING}) as response,
    ):
        error = (await response.json())["error"]

    assert (response.status, error["code"]) == (403, "origin_not_allowed")
    assert PAGE in error["message"]
    assert "server.cors_origins" in error["message"]
