"""The routes of OpenAI's Responses API.

A response in the background is a task that the store owns: it generates events whether or not a client reads them.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from infd.errors import InvalidRequest
from infd.http import failure, send
from infd.http.apis.responses import conversation, generation, input_items
from infd.http.body import read
from infd.http.exchange import Exchange
from infd.http.formats.responses import RESPONSES_ERRORS, Draft, ResponsesFormat
from infd.http.generate import generate
from infd.http.prompt import render
from infd.http.responses_store import Stored
from infd.http.routes.generating import stream
from infd.http.schema.responses import Deleted, InputItem, InputTokens, InputTokensRequest, ItemList, ResponsesRequest
from infd.http.service import EXCHANGE, SERVICE

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.generation import Generation
    from infd.http.pieces import Pieces
    from infd.http.service import Service

_CREATE: Final = msgspec.json.Decoder(ResponsesRequest)
_COUNT: Final = msgspec.json.Decoder(InputTokensRequest)
_PAGE_ITEMS: Final = 20
_LARGEST_PAGE: Final = 100


async def create(request: web.Request) -> web.StreamResponse:
    """Generate a response: whole, as events, or in the background."""
    service, exchange = request.app[SERVICE], request[EXCHANGE]
    body, size = await read(request, _CREATE)
    if body.background and body.store is False:
        raise InvalidRequest("a response in the background is stored: leave store out", param="background")
    history = _history(body.previous_response_id, exchange.tenant, service)
    asked = generation(body, history, size, service.config)
    draft = Draft.of(body, f"resp_{secrets.token_hex(24)}", service.model().name(body.model))
    format_of = partial(ResponsesFormat, body, draft)
    items = [*history, *input_items(body)]
    kept = Stored(exchange.tenant, draft, items, len(history), size, service.responses.now())
    if body.background:
        service.responses.add(kept)
        kept.task = asyncio.create_task(_run(kept, asked, format_of, exchange, service))
        if body.stream:
            return await _replay(request, kept, 0)
        return send.json(msgspec.json.encode(draft.response))
    if body.stream:
        answer = await stream(request, asked, format_of, exchange, service)
        _keep(kept, service)
        return answer
    pieces = await generate(asked, format_of, exchange, service)
    kept.size += sum(map(len, pieces))
    _keep(kept, service)
    return send.body(pieces)


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Return a stored response, or the events of a response in the background from `starting_after` on."""
    kept = _stored(request)
    if request.query.get("stream") not in ("true", "1"):
        return send.json(msgspec.json.encode(kept.draft.response))
    if not kept.draft.response.background:
        raise InvalidRequest("only a response in the background can be streamed again", param="stream")
    return await _replay(request, kept, 1 + _number(request, "starting_after", -1, 2**31))


async def cancel(request: web.Request) -> web.StreamResponse:
    """End a response in the background; a response that has ended stays as it is."""
    kept = _stored(request)
    if not kept.draft.response.background:
        raise InvalidRequest("only a response in the background can be cancelled", param="response_id")
    if kept.task is not None:
        kept.task.cancel()
        await asyncio.wait([kept.task])
        kept.end_cancelled()
    return send.json(msgspec.json.encode(kept.draft.response))


async def delete(request: web.Request) -> web.StreamResponse:
    """Forget a stored response."""
    id = request.match_info["id"]
    request.app[SERVICE].responses.delete(id, request[EXCHANGE].tenant)
    return send.json(msgspec.json.encode(Deleted(id=id)))


async def list_input(request: web.Request) -> web.StreamResponse:
    """Return a page of the items that a response answers, the latest first."""
    kept = _stored(request)
    items = [_listed(item, f"in_{number}") for number, item in enumerate(kept.items)]
    if request.query.get("order", "desc") != "asc":
        items.reverse()
    if (after := request.query.get("after")) is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest("after names no item", param="after")
        items = items[places[0] + 1 :]
    page = items[: _number(request, "limit", _PAGE_ITEMS, _LARGEST_PAGE)]
    listed = ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(page) < len(items),
    )
    return send.json(msgspec.json.encode(listed))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Return the number of tokens of a conversation's prompt, which may be longer than the context."""
    service = request.app[SERVICE]
    body, size = await read(request, _COUNT)
    served = service.model()
    served.name(body.model)
    history = _history(body.previous_response_id, request[EXCHANGE].tenant, service)
    prompt = await render(
        conversation(body, history, size),
        served,
        service.offload,
        add_special_tokens=body.add_special_tokens,
        must_fit=False,
        param="input",
    )
    return send.json(msgspec.json.encode(InputTokens(input_tokens=len(prompt.ids))))


class _Recorder:
    """The `Events` of a response in the background: keeps each event."""

    begun = True
    writable = True

    def __init__(self, kept: Stored, service: Service) -> None:
        self._kept = kept
        self._store = service.responses

    def write(self, events: bytes) -> None:
        self._kept.events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self._store.grow(self._kept, len(events))
        self._kept.notify()

    async def send(self, events: bytes) -> None:
        self.write(events)

    async def send_pieces(self, events: Pieces) -> None:
        self.write(b"".join(events))


async def _run(kept: Stored, asked: Generation, format_of: Any, client: Exchange, service: Service) -> None:
    """Generate a response in the background."""
    exchange = Exchange(client_id=client.client_id, key=client.key, errors=RESPONSES_ERRORS)
    recorder = _Recorder(kept, service)
    try:
        await generate(asked, format_of, exchange, service, recorder)
    except asyncio.CancelledError:
        kept.end_cancelled()
    except Exception as error:
        recorder.write(kept.draft.fail(failure.translate(error, exchange)))
    finally:
        kept.task = None
        kept.notify()


async def _replay(request: web.Request, kept: Stored, start: int) -> web.StreamResponse:
    """Send the events from number `start` on, until the response has ended."""
    with request.app[SERVICE].streams.open(request) as events:
        while True:
            changed, ended = kept.changed, kept.task is None
            if waiting := kept.events[start:]:
                start += len(waiting)
                await events.send_pieces(waiting)
            if ended and start >= len(kept.events):
                break
            if not waiting:
                await changed.wait()
        if not events.begun:
            await events.send(b": no further events\n\n")
        await events.close()
        return events.response


def _keep(kept: Stored, service: Service) -> None:
    if kept.draft.response.store:
        kept.stored = service.responses.now()
        service.responses.add(kept)


def _history(id: str | None, tenant: str, service: Service) -> list[InputItem]:
    """Return the items of an earlier response and its output. Raises ResponseNotFound, InvalidRequest."""
    if id is None:
        return []
    kept = service.responses.get(id, tenant)
    if not kept.ended:
        raise InvalidRequest("the previous response has not ended", param="previous_response_id")
    output = [msgspec.convert(msgspec.to_builtins(item), InputItem) for item in kept.draft.response.output]
    return [*kept.items, *output]


def _stored(request: web.Request) -> Stored:
    return request.app[SERVICE].responses.get(request.match_info["id"], request[EXCHANGE].tenant)


def _listed(item: InputItem, id: str) -> dict[str, Any]:
    fields: dict[str, Any] = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": item.content}]
    return {**fields, "id": item.id or id}


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or int(text[:12]) > most:
        raise InvalidRequest(f"{name} is a number, at most {most}", param=name)
    return int(text)
