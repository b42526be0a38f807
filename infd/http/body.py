"""From the bytes of a body to a checked request.

Size first, then nesting, then types: nothing is built from a body before its
size and depth are known to be harmless. A wrong value is named by its path.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from infd.errors import BodyTooLarge, InvalidRequest
from infd.http.service import SERVICE

if TYPE_CHECKING:
    from aiohttp import web

T = TypeVar("T")

# Below this, work on a body is quicker than handing it to a thread.
SMALL_BYTES: Final = 64 * 2**10

# A string, or a run of brackets. Possessive, so that a body without a closing quote is read once.
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]+|[\]}]+', re.DOTALL)
_PATH: Final = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"required field `(?P<field>[^`]+)`|unknown field `(?P<unknown>[^`]+)`")


async def read(request: web.Request, decoder: msgspec.json.Decoder[T]) -> tuple[T, int]:
    """Return the decoded body and its size in bytes. Raises InvalidRequest, BodyTooLarge."""
    service = request.app[SERVICE]
    config = service.config
    data = await _receive(request, config.server.max_body_bytes, config.server.body_timeout_s)
    if len(data) <= SMALL_BYTES:
        return decode(data, decoder, config.limits.json_depth), len(data)
    return await service.offload(decode, data, decoder, config.limits.json_depth), len(data)


def decode(data: bytes, decoder: msgspec.json.Decoder[T], depth_limit: int) -> T:
    """Return the typed value of a JSON body. Raises InvalidRequest."""
    if exceeds_depth(data, depth_limit):
        raise InvalidRequest(f"the JSON is nested more than {depth_limit} levels deep", code="json_too_deep")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error))
        raise InvalidRequest(message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None


def exceeds_depth(data: bytes, limit: int) -> bool:
    """Say whether arrays and objects nest deeper than `limit`, without parsing."""
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    depth = 0
    for match in _STRUCTURE.finditer(data):
        first = data[match.start()]
        if first in b"[{":
            depth += match.end() - match.start()
            if depth > limit:
                return True
        elif first in b"]}":
            depth -= match.end() - match.start()
    return False


async def _receive(request: web.Request, limit: int, timeout_s: float) -> bytes:
    # A few compressed kilobytes can stand for gigabytes.
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InvalidRequest("a compressed body is not accepted: send it without Content-Encoding")
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(f"the body is larger than {limit} bytes")
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {timeout_s:g} s", code="body_timeout") from None


def _explain(error: str) -> tuple[str, str | None]:
    """Split what msgspec says into words and the dotted path they are about."""
    path = ""
    if at := _PATH.search(error):
        path = at["path"].removesuffix("[...]")
        error = error[: at.start()]
    if named := _MISSING.search(error):
        field = named["field"] or named["unknown"]
        path = f"{path}.{field}" if path else field
    return (f"{path}: {error}" if path else error), path or None
