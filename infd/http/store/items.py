"""Items of conversations, as they are stored and listed.

A part is the JSON of a list of items, each in the form in which OpenAI's API lists it, so that items are listed without
being encoded again. Every item has an id, unique in its entry.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct

from infd.errors import InvalidRequest
from infd.http.query import number
from infd.http.schema.responses import InputItem, ItemPart
from infd.http.schema.unsupported import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ITEMS: Final = msgspec.json.Decoder(list[InputItem])
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,96}\Z")
_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
_PAGE_ITEMS: Final = 20
_LARGEST_PAGE: Final = 100


class Listed(Struct):
    """The id of a stored item."""

    id: str


_IDS: Final = msgspec.json.Decoder(list[Listed])
_RAW: Final = msgspec.json.Decoder(list[Raw])


class Output(Struct):
    """The fields of a stored response that its continuation reads."""

    status: str
    background: bool
    output: list[InputItem]


class ItemList(Struct, kw_only=True):
    """One page of items."""

    object: str = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


def encode(items: Iterable[InputItem], taken: Iterable[str] = ()) -> bytes:
    """Encode items as a part. An item keeps its id if the id is safe in a URL, unique, and not among `taken`."""
    ids = set(taken)
    listed = []
    for item in items:
        id = item.id
        if id is None or id in ids or not _ID.match(id):
            id = f"{_PREFIXES.get(item.type, 'item')}_{secrets.token_hex(16)}"
        ids.add(id)
        listed.append(_listed(item, id))
    return msgspec.json.encode(listed)


def decode(parts: Iterable[bytes]) -> list[InputItem]:
    """Return the items of all parts."""
    return [item for part in parts for item in _ITEMS.decode(part)]


def recode(parts: Sequence[bytes], own: Sequence[InputItem]) -> tuple[list[InputItem], bytes]:
    """Return the items of the parts, decoded, and the part of the request's own items."""
    history = decode(parts)
    return history, encode(own, (item.id for item in history if item.id is not None))


def output(head: bytes) -> Output:
    """Return a stored response's status and output."""
    return msgspec.json.decode(head, type=Output)


def ids(parts: Iterable[bytes]) -> list[str]:
    return [listed.id for part in parts for listed in _IDS.decode(part)]


def find(parts: Iterable[bytes], id: str) -> bytes | None:
    """Return the JSON of the item with an id; None: there is none."""
    return next((bytes(raw) for part in parts for listed, raw in _pairs(part) if listed == id), None)


def without(parts: Iterable[bytes], id: str) -> tuple[bytes, ...]:
    """Return the parts without the item with an id."""
    left = []
    for part in parts:
        pairs = _pairs(part)
        kept = [raw for listed, raw in pairs if listed != id]
        if kept:
            left.append(part if len(kept) == len(pairs) else msgspec.json.encode(kept))
    return tuple(left)


def page(parts: Iterable[bytes], query: Mapping[str, str]) -> bytes:
    """Return the JSON of the page that a query selects: the last item first unless `order` is "asc".

    Raises InvalidRequest.
    """
    limit = number(query, "limit", _PAGE_ITEMS, least=1, most=_LARGEST_PAGE)
    pairs = [pair for part in parts for pair in _pairs(part)]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order is asc or desc", param="order")
    if order == "desc":
        pairs.reverse()
    if (after := query.get("after")) is not None:
        place = next((place for place, (id, _) in enumerate(pairs) if id == after), None)
        if place is None:
            raise InvalidRequest("after names no item", param="after")
        pairs = pairs[place + 1 :]
    return listing(pairs[:limit], has_more=len(pairs) > limit)


def whole(part: bytes) -> bytes:
    """Return the JSON of a page that contains all items of a part."""
    return listing(_pairs(part), has_more=False)


def listing(pairs: Sequence[tuple[str, Raw]], *, has_more: bool) -> bytes:
    first, last = (pairs[0][0], pairs[-1][0]) if pairs else (None, None)
    page = ItemList(data=[raw for _, raw in pairs], first_id=first, last_id=last, has_more=has_more)
    return msgspec.json.encode(page)


def _pairs(part: bytes) -> list[tuple[str, Raw]]:
    """Return the id and the JSON of each item of a part."""
    return [(listed.id, raw) for listed, raw in zip(_IDS.decode(part), _RAW.decode(part), strict=True)]


def _listed(item: InputItem, id: str) -> dict[str, Any]:
    """Return an input item as OpenAI's API lists items: with an id and a status, and a message's text as parts."""
    fields = _present(item)
    for name in ("content", "summary", "output"):
        if isinstance(parts := getattr(item, name), list):
            fields[name] = [_present(part) for part in parts]
    if item.type == "message":
        if isinstance(item.content, str):
            fields["content"] = [{"text": item.content}]
        kind = {"type": "output_text", "annotations": []} if item.role == "assistant" else {"type": "input_text"}
        fields["content"] = [part if "refusal" in part else part | kind for part in fields.get("content", ())]
    elif item.type == "reasoning":
        fields.setdefault("summary", [])
    return {"status": "completed", **fields, "id": id}


def _present(fields: InputItem | ItemPart) -> dict[str, Any]:
    return {
        name: value
        for name, value in msgspec.structs.asdict(fields).items()
        if value is not None and value is not ABSENT
    }
