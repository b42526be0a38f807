"""Decode a JSON body into a checked request.

Nesting is checked before decoding, so that a body nested too deeply creates no objects. An error names the path of the
wrong value.
"""

from __future__ import annotations

import codecs
import re
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from infd.errors import InvalidRequest, shorten

T = TypeVar("T")

# A string, or a run of brackets. The quantifiers are possessive, so that a body without a closing quote causes no
# backtracking.
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]+|[\]}]+', re.DOTALL)
_PATH: Final = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_STEP: Final = re.compile(r"[^.\[\]]+")
_LONG_QUOTE: Final = re.compile(r"(['`])(.{100}).+\1", re.DOTALL)
_MISSING: Final = re.compile(r"required field `(?P<field>[^`]+)`|unknown field `(?P<unknown>[^`]+)`")


def decode(data: bytes | bytearray, decoder: msgspec.json.Decoder[T], depth_limit: int) -> T:
    """Return the typed value of a JSON body. Raises InvalidRequest."""
    if exceeds_depth(data, depth_limit):
        raise InvalidRequest(f"the JSON is nested more than {depth_limit} levels deep", code="json_too_deep")
    try:
        if not data.isascii():
            codecs.utf_8_decode(data, "strict", True)  # msgspec checks neither fields kept as Raw nor unknown fields
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        try:
            message, param = _describe(str(error), decoder.type, data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as malformed:  # after the refused value
            raise InvalidRequest(f"the body is not valid JSON: {malformed}", code="invalid_json") from None
        raise InvalidRequest(message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None


def exceeds_depth(data: bytes | bytearray, limit: int) -> bool:
    """Return whether arrays and objects nest deeper than `limit`, without parsing values."""
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


def _describe(error: str, body: object, data: bytes | bytearray) -> tuple[str, str | None]:
    """Split msgspec's error message about a body of type `body` into a sentence and the dotted path of the value."""
    path = ""
    if match := _PATH.search(error):
        path = match["path"].removesuffix("[...]")
        if match["key"]:
            path = f"{path}.{shorten(_wrong_key(data, path))}"
        error = error[: match.start()]
    if missing := _MISSING.search(error):
        field = shorten(missing["field"] or missing["unknown"])
        path = f"{path}.{field}" if path else field
    elif "enum value" in error and (known := _enum_values(_shape(body), _STEP.findall(path))):
        error += f"; there are {', '.join(map(str, known))}"
    error = _LONG_QUOTE.sub(r"\1\2...\1", error)
    return (f"{path}: {error}" if path else error), path or None


def _wrong_key(data: bytes | bytearray, path: str) -> str:
    """Return the key that msgspec refused in the object at `path`. Checked keys are always token ids, so the refused
    key is not a number or, if all keys are numbers, too large.
    """
    found: Any = msgspec.json.decode(data)
    for step in _STEP.findall(path):
        found = found[int(step) if isinstance(found, list) else step]
    keys: list[str] = list(found)
    wrong = next((key for key in keys if not key.isdecimal()), None)
    return max(keys, key=lambda key: (len(key), key)) if wrong is None else wrong  # the largest number


@cache  # type_info(ChatRequest) takes two milliseconds
def _shape(type_: object) -> inspect.Type:
    return inspect.type_info(type_)


def _enum_values(shape: inspect.Type, path: list[str]) -> tuple[object, ...]:
    """Return the enum values allowed at a path; empty if the path's type is not an enum."""
    match shape, path:
        case inspect.LiteralType(values=values), []:
            return values
        case inspect.UnionType(types=options), _:
            return next(filter(None, (_enum_values(option, path) for option in options)), ())
        case inspect.ListType(item_type=item), [_, *rest]:
            return _enum_values(item, rest)
        case inspect.StructType(fields=fields), [name, *rest]:
            return next((_enum_values(field.type, rest) for field in fields if field.encode_name == name), ())
    return ()
