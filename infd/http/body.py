"""From the bytes of a body to a checked request.

Size first, then nesting, then types: nothing is built from a body before its
size and depth are known to be harmless. A wrong value is named by its path.
A body has a deadline, and more time only while it comes at a pace; all bodies
together are bounded too, because they arrive before anything is queued.
"""

from __future__ import annotations

import asyncio
import re
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec import inspect

from infd.errors import BodyTooLarge, InvalidRequest, Overloaded, brief
from infd.http import connection, expectations
from infd.http.service import SERVICE

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.service import Service

T = TypeVar("T")

# Below this, work on a body is quicker than handing it to a thread.
SMALL_BYTES: Final = 64 * 2**10

# A string, or a run of brackets. Possessive, so that a body without a closing quote is read once.
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]+|[\]}]+', re.DOTALL)
_PATH: Final = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_STEP: Final = re.compile(r"[^.\[\]]+")
_LONG_QUOTE: Final = re.compile(r"(['`])(.{100}).+\1", re.DOTALL)
_MISSING: Final = re.compile(r"required field `(?P<field>[^`]+)`|unknown field `(?P<unknown>[^`]+)`")


async def read(request: web.Request, decoder: msgspec.json.Decoder[T]) -> tuple[T, int]:
    """Return the decoded body and its size in bytes. Raises InvalidRequest, BodyTooLarge."""
    service = request.app[SERVICE]
    depth = service.config.limits.json_depth
    data = bytearray()
    try:
        await _receive(request, data, service)
        if len(data) <= SMALL_BYTES:
            return decode(data, decoder, depth), len(data)
        return await service.offload(decode, data, decoder, depth), len(data)
    finally:
        service.bodies_bytes -= len(data)


def decode(data: bytes | bytearray, decoder: msgspec.json.Decoder[T], depth_limit: int) -> T:
    """Return the typed value of a JSON body. Raises InvalidRequest."""
    if exceeds_depth(data, depth_limit):
        raise InvalidRequest(f"the JSON is nested more than {depth_limit} levels deep", code="json_too_deep")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error), decoder.type)
        raise InvalidRequest(message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None


def exceeds_depth(data: bytes | bytearray, limit: int) -> bool:
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


async def _receive(request: web.Request, data: bytearray, service: Service) -> None:
    """Append the body to `data` as it arrives, counting it among all bodies. Raises RequestError."""
    server = service.config.server
    # A few compressed kilobytes can stand for gigabytes.
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InvalidRequest("a compressed body is not accepted: send it without Content-Encoding")
    most = service.largest_body_bytes
    if (request.content_length or 0) > most:
        raise BodyTooLarge(f"the body is larger than {most} bytes")
    await expectations.invite(request)
    client = connection.of(request)
    client.silent()
    deadline = asyncio.get_running_loop().time() + server.body_timeout_s
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            async for chunk in request.content.iter_any():
                data += chunk
                service.bodies_bytes += len(chunk)
                if len(data) > most:
                    raise BodyTooLarge(f"the body is larger than {most} bytes")
                if service.bodies_bytes > server.max_bodies_bytes:
                    raise Overloaded("too many large bodies are arriving at once", code="too_many_bodies")
                timeout.reschedule(deadline + len(data) / server.body_pace)
    except TimeoutError:
        raise InvalidRequest(
            f"the body did not arrive within {server.body_timeout_s:g} s, nor at {server.body_pace} bytes a second",
            code="body_timeout",
        ) from None
    finally:
        client.busy()


def _explain(error: str, body: object) -> tuple[str, str | None]:
    """Split what msgspec says about a body of a type into words and the dotted path they are about."""
    path = ""
    if at := _PATH.search(error):
        path = at["path"].removesuffix("[...]")
        error = error[: at.start()]
    if named := _MISSING.search(error):
        field = brief(named["field"] or named["unknown"])
        path = f"{path}.{field}" if path else field
    elif "enum value" in error and (known := _known(_shape(body), _STEP.findall(path))):
        error += f"; there are {', '.join(map(str, known))}"
    error = _LONG_QUOTE.sub(r"\1\2...\1", error)
    return (f"{path}: {error}" if path else error), path or None


@cache  # it takes two milliseconds for a chat
def _shape(type_: object) -> inspect.Type:
    return inspect.type_info(type_)


def _known(shape: inspect.Type, path: list[str]) -> tuple[object, ...]:
    """Return the values that may stand at the end of a path."""
    match shape, path:
        case inspect.LiteralType(values=values), []:
            return values
        case inspect.UnionType(types=options), _:
            return next(filter(None, (_known(option, path) for option in options)), ())
        case inspect.ListType(item_type=item), [_, *rest]:
            return _known(item, rest)
        case inspect.StructType(fields=fields), [name, *rest]:
            return next((_known(field.type, rest) for field in fields if field.encode_name == name), ())
    return ()
