"""Find the items that a response continues, and store the response and its conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec
from msgspec import Struct

from infd.errors import ConversationNotFound, InvalidRequest, ResponseNotFound
from infd.http.body import SMALL_BYTES
from infd.http.schema.responses import ConversationId, InputItem
from infd.http.store import items
from infd.http.store.entry import Entry, failed, is_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.http.background import Running
    from infd.http.formats.responses import Draft
    from infd.http.schema.responses import OutputItem, ResponsesFields
    from infd.http.service import Service

P = ParamSpec("P")
R = TypeVar("R")


class Turn(Struct, frozen=True, kw_only=True):
    """A response being generated.

    parts         items before its output, as parts (see store/items.py); the last part is the request's input
    conversation  id of the conversation to which its input and output are added; None: none
    """

    tenant: str
    draft: Draft
    parts: tuple[bytes, ...]
    conversation: str | None
    service: Service

    def entry(self, *, unfinished: bool = False) -> Entry:
        head = msgspec.json.encode(self.draft.response)
        id = self.draft.response.id
        return Entry(id=id, tenant=self.tenant, head=head, items=self.parts, unfinished=unfinished)

    async def keep(self) -> None:
        """Add the response to its conversation, and store it unless its `store` is false. Raises NotStored."""
        await self.join()
        if self.draft.response.store:
            await self.service.store.add(self.entry())

    async def join(self) -> None:
        """Add input and output to the conversation, unless the response failed or was cancelled. Raises NotStored.

        A conversation that was deleted meanwhile is not created again.
        """
        response = self.draft.response
        if self.conversation is None or response.status not in ("completed", "incomplete"):
            return
        output = items.encode(output_items(response.output))
        await self.service.store.change(self.conversation, self.tenant, adding(self.parts[-1], output))


def output_items(output: Sequence[OutputItem]) -> list[InputItem]:
    """Return items of an output as items of a later input."""
    return msgspec.json.decode(msgspec.json.encode(output), type=list[InputItem])


def adding(*parts: bytes) -> Callable[[Entry], Entry]:
    """Return the change that adds items to an entry."""
    return lambda entry: msgspec.structs.replace(entry, items=(*entry.items, *parts))


async def earlier(
    request: ResponsesFields, size: int, tenant: str, service: Service
) -> tuple[tuple[bytes, ...], str | None, int]:
    """Return the parts that precede a request's input, the id of the conversation that contains them, and their bytes
    plus `size`, the bytes of the request.

    These bytes are bounded like those of a body. Raises ResponseNotFound, ConversationNotFound, InvalidRequest,
    NotStored.
    """
    previous, conversation = request.previous_response_id, conversation_id(request)
    parts: tuple[bytes, ...] = ()
    if conversation is not None:
        if previous is not None:
            raise InvalidRequest("previous_response_id excludes conversation", param="previous_response_id")
        parts = (await conversation_entry(conversation, tenant, service)).items
    elif previous is not None:
        entry, _ = await response_entry(previous, tenant, service)
        answered = await off_the_loop(service, len(entry.head), items.output, entry.head)
        if answered.status in ("queued", "in_progress"):
            raise InvalidRequest("the previous response has not ended", param="previous_response_id")
        parts = *entry.items, items.encode(answered.output)
    total, most = size + sum(map(len, parts)), service.largest_body_bytes
    if parts and total > most:
        raise InvalidRequest(
            f"the request and the conversation that it continues are {total} bytes; at most {most} are read",
            param="conversation" if previous is None else "previous_response_id",
            code="context_length_exceeded",
        )
    return parts, conversation, total


async def off_the_loop(service: Service, size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return `work(*args)`, run on a thread if `size`, the bytes of its JSON, would block the event loop."""
    return work(*args, **kwargs) if size <= SMALL_BYTES else await service.offload(work, *args, **kwargs)


def conversation_id(request: ResponsesFields) -> str | None:
    named = request.conversation
    return named.id if isinstance(named, ConversationId) else named


async def response_entry(id: str, tenant: str, service: Service) -> tuple[Entry, Running | None]:
    """Return a response as far as it is generated; and, if `Background` contains it, its `Running`.

    Raises ResponseNotFound, NotStored.
    """
    if not is_id(id, "resp"):
        raise ResponseNotFound(id)
    if (running := service.background.get(id, tenant)) is not None:
        head = msgspec.json.encode(running.draft.response)
        return msgspec.structs.replace(running.entry, head=head), running
    if (entry := await service.store.get(id, tenant)) is None:
        raise ResponseNotFound(id)
    return failed(entry) if entry.unfinished else entry, None


async def conversation_entry(id: str, tenant: str, service: Service) -> Entry:
    """Return a conversation. Raises ConversationNotFound, NotStored."""
    entry = await service.store.get(id, tenant) if is_id(id, "conv") else None
    if entry is None:
        raise ConversationNotFound(id)
    return entry
