"""Encode admin answers as JSON and refusals as problem documents (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from aiohttp import web

from infd.admin.protocol import ANSWER_TYPE, PROBLEM_TYPE, Problem


def reply(answer: msgspec.Struct) -> web.Response:
    """Return `answer` as a JSON response."""
    return web.Response(body=msgspec.json.encode(answer), content_type=ANSWER_TYPE)


def problem(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> web.Response:
    """Return a problem document. `code` is for programs, `detail` for people."""
    content = Problem(HTTPStatus(status).phrase, status, detail, code)
    return web.Response(status=status, body=msgspec.json.encode(content), content_type=PROBLEM_TYPE, headers=headers)
