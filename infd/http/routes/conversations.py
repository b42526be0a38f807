"""The routes of OpenAI's Conversations API."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import ConversationNotFound, InvalidRequest, ItemNotFound
from infd.http import send
from infd.http.body import read
from infd.http.response_items import check_items
from infd.http.routes.responses import send_page
from infd.http.schema.responses import (
    ConversationDeleted,
    ConversationObject,
    ConversationRequest,
    ConversationUpdate,
    NewItems,
)
from infd.http.store import items
from infd.http.store.entry import Entry, is_id, new_id
from infd.http.turn import conversation_entry, off_the_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from infd.http.routing import Request
    from infd.http.schema.responses import InputItem
    from infd.http.service import Service

_CREATE: Final = msgspec.json.Decoder(ConversationRequest)
_UPDATE: Final = msgspec.json.Decoder(ConversationUpdate)
_ITEMS: Final = msgspec.json.Decoder(NewItems)


async def create(request: Request) -> web.StreamResponse:
    service = request.service
    body, size = await read(request, _CREATE)
    parts = (await _part(body.items, size, (), service),) if body.items else ()
    conversation = ConversationObject(id=new_id("conv"), created_at=int(time.time()), metadata=body.metadata or {})
    head = msgspec.json.encode(conversation)
    entry = Entry(id=conversation.id, tenant=request.exchange.tenant, head=head, items=parts)
    if entry.bytes > service.config.store.bytes:
        raise InvalidRequest("the conversation is too large to be stored", param="items")
    await service.store.add(entry)
    return send.json(head)


async def retrieve(request: Request) -> web.StreamResponse:
    return send.json((await _entry(request)).head)


async def update(request: Request) -> web.StreamResponse:
    """Replace a conversation's metadata."""
    body, _ = await read(request, _UPDATE)

    def updated(entry: Entry) -> Entry:
        conversation = msgspec.json.decode(entry.head, type=ConversationObject)
        conversation.metadata = body.metadata or {}
        return msgspec.structs.replace(entry, head=msgspec.json.encode(conversation))

    return send.json((await _change(request, updated)).head)


async def delete(request: Request) -> web.StreamResponse:
    """Delete a conversation. Responses that continued it remain."""
    id, tenant = request.variables["id"], request.exchange.tenant
    if not is_id(id, "conv") or not await request.service.store.delete(id, tenant):
        raise ConversationNotFound(id)
    return send.json(msgspec.json.encode(ConversationDeleted(id=id)))


async def add_items(request: Request) -> web.StreamResponse:
    """Add items at a conversation's end; return them."""
    service = request.service
    body, size = await read(request, _ITEMS)
    entry = await _entry(request)
    part = await _part(body.items, size, entry.items, service)
    most = min(service.largest_body_bytes, service.config.store.bytes)

    def added(entry: Entry) -> Entry:
        longer = msgspec.structs.replace(entry, items=(*entry.items, part))
        if longer.bytes > most:
            raise InvalidRequest(
                f"a conversation's items take at most {most} bytes", param="items", code="context_length_exceeded"
            )
        return longer

    await _change(request, added)
    return send.body([items.whole(part)])


async def list_items(request: Request) -> web.StreamResponse:
    return await send_page(request, await _entry(request))


async def retrieve_item(request: Request) -> web.StreamResponse:
    entry, id = await _entry(request), request.variables["item"]
    found = await off_the_loop(request.service, entry.bytes, items.find, entry.items, id)
    if found is None:
        raise ItemNotFound(id)
    return send.body([found])


async def delete_item(request: Request) -> web.StreamResponse:
    """Delete an item; return its conversation."""
    id = request.variables["item"]

    def deleted(entry: Entry) -> Entry:
        if items.find(entry.items, id) is None:
            raise ItemNotFound(id)
        return msgspec.structs.replace(entry, items=items.without(entry.items, id))

    return send.json((await _change(request, deleted)).head)


async def _part(new: list[InputItem], size: int, earlier: tuple[bytes, ...], service: Service) -> bytes:
    """Check new items, and encode them as a part; see store/items.py. Raises InvalidRequest, Unsupported.

    size     bytes of the new items
    earlier  parts of the conversation
    """

    def encode() -> bytes:
        check_items(new)
        return items.encode(new, items.ids(earlier))

    return await off_the_loop(service, size + sum(map(len, earlier)), encode)


async def _entry(request: Request) -> Entry:
    return await conversation_entry(request.variables["id"], request.exchange.tenant, request.service)


async def _change(request: Request, change: Callable[[Entry], Entry]) -> Entry:
    """Change a conversation. Raises ConversationNotFound, NotStored, and the errors of `change`."""
    id, tenant = request.variables["id"], request.exchange.tenant
    entry = await request.service.store.change(id, tenant, change) if is_id(id, "conv") else None
    if entry is None:
        raise ConversationNotFound(id)
    return entry
