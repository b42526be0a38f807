"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import InvalidRequest, NotStored, ResponseNotFound
from infd.http import failure, send
from infd.http.apis.responses import conversation, input_items
from infd.http.body import read
from infd.http.exchange import Exchange
from infd.http.formats.responses import RESPONSES_ERRORS, Draft, last_event
from infd.http.prompt import render
from infd.http.query import flag, number
from infd.http.rounds import Asked
from infd.http.routes.generating import stream
from infd.http.schema.responses import Deleted, InputTokens, InputTokensRequest, ResponsesRequest
from infd.http.store import items
from infd.http.store.entry import new_id
from infd.http.tool_servers import remote_tools
from infd.http.turn import Turn, earlier, off_the_loop, response_entry

if TYPE_CHECKING:
    from aiohttp import web

    from infd.errors import RequestError
    from infd.http.background import Running
    from infd.http.routing import Request
    from infd.http.store.entry import Entry

_CREATE: Final = msgspec.json.Decoder(ResponsesRequest)
_COUNT: Final = msgspec.json.Decoder(InputTokensRequest)


async def create(request: Request) -> web.StreamResponse:
    """Generate a response, and return it whole or as events.

    With `background` and without `stream`, return the response at once, before it is generated.
    """
    service, exchange = request.service, request.exchange
    body, size = await read(request, _CREATE)
    service.model().require_generation()
    if body.background and body.store is False:
        raise InvalidRequest("a response in the background is stored: leave store out", param="background")
    parts, conversation_id, total = await earlier(body, size, exchange.tenant, service)
    history, own = await off_the_loop(service, total, items.recode, parts, input_items(body))
    asked = Asked.check(body, history, total, service)
    draft = Draft.of(body, new_id("resp"), service.model().name(body.model))
    turn = Turn(tenant=exchange.tenant, draft=draft, parts=(*parts, own), conversation=conversation_id, service=service)
    if body.background:
        running = await _begin(turn, asked, exchange)
        return await _follow(request, running, 0) if body.stream else send.json(msgspec.json.encode(draft.response))
    work = partial(asked.answer, draft, exchange, service)
    if body.stream:
        answer = await stream(request, partial(work, before_end=turn.keep))
        if draft.response.status == "failed":  # an event has told the client the id
            with suppress(NotStored):
                await turn.keep()
        return answer
    pieces = await work()
    await turn.keep()
    return send.body(pieces)


async def retrieve(request: Request) -> web.StreamResponse:
    """Return a stored response; with `stream`, a background response's events that follow event `starting_after`."""
    streamed = flag(request.query, "stream")
    entry, running = await _stored(request)
    if not streamed:
        return send.body([entry.head])
    if not items.output(entry.head).background:
        raise InvalidRequest("only a response in the background can be streamed again", param="stream")
    start = 1 + number(request.query, "starting_after", -1, least=0, most=2**31)
    return await (_repeat(request, entry, start) if running is None else _follow(request, running, start))


async def cancel(request: Request) -> web.StreamResponse:
    """Cancel a background response; a response that has ended does not change."""
    entry, running = await _stored(request)
    if not items.output(entry.head).background:
        raise InvalidRequest("only a response in the background can be cancelled", param="response_id")
    if running is None:
        return send.body([entry.head])
    await running.cancel()
    return send.json(msgspec.json.encode(running.draft.response))


async def delete(request: Request) -> web.StreamResponse:
    """Delete a stored response, and end its generation."""
    service, entry = request.service, (await _stored(request))[0]
    deleted = await service.store.delete(entry.id, entry.tenant)
    running = service.background.drop(entry.id)
    if not deleted and running is None:  # another request has deleted the response meanwhile
        raise ResponseNotFound(entry.id)
    return send.json(msgspec.json.encode(Deleted(id=entry.id)))


async def list_input(request: Request) -> web.StreamResponse:
    """Return a page of the items that precede a response's output."""
    entry, _ = await _stored(request)
    return await send_page(request, entry)


async def send_page(request: Request, entry: Entry) -> web.StreamResponse:
    """Return the page of an entry's items that the query asks for."""
    page = await off_the_loop(request.service, entry.bytes, items.page, entry.items, dict(request.query))
    return send.body([page])


async def count_tokens(request: Request) -> web.StreamResponse:
    """Return the number of tokens of a conversation's prompt, which may be longer than the context."""
    service = request.service
    body, size = await read(request, _COUNT)
    served = service.model()
    served.name(body.model)
    parts, _, total = await earlier(body, size, request.exchange.tenant, service)
    history = await off_the_loop(service, total, items.decode, parts)
    prompt = await render(
        conversation(body, history, total, await remote_tools(body, service.tool_servers)),
        served,
        service.offload,
        add_special_tokens=body.add_special_tokens,
        must_fit=False,
        param="input",
    )
    return send.json(msgspec.json.encode(InputTokens(input_tokens=len(prompt.ids))))


async def _begin(turn: Turn, asked: Asked, client: Exchange) -> Running:
    """Start a response in the background. Raises InvalidRequest, NotStored."""
    service, entry = turn.service, turn.entry(unfinished=True)
    if entry.bytes > service.config.store.bytes:
        raise InvalidRequest("the conversation is too large to be stored", param="input")
    exchange = Exchange(client_id=client.client_id, key=client.key, account=client.account, errors=RESPONSES_ERRORS)

    async def work(running: Running) -> None:
        async def before_end() -> None:
            await turn.join()
            await service.background.settle(running)

        await asked.answer(turn.draft, exchange, service, running, before_end=before_end)

    def translate(error: Exception) -> RequestError:
        failed = failure.translate(error, exchange)
        if not exchange.queued:
            failure.count(failed, service.metrics)
        return failed

    place = client.place.pop_all()
    return await service.background.start(entry, turn.draft, work, translate=translate, leave=place.close)


async def _follow(request: Request, running: Running, start: int) -> web.StreamResponse:
    """Send a background response's events from number `start` on; return after the last event of the response."""
    with request.service.streams.open(request) as events:
        while True:
            changed, ended = running.changed, running.ended
            if waiting := running.events[start:]:
                start += len(waiting)
                await events.send_pieces(waiting)
            elif ended:
                break
            else:
                await changed.wait()
        if not events.begun:
            await events.send(b": no further events\n\n")
        await events.close()
        return events.response


async def _repeat(request: Request, entry: Entry, start: int) -> web.StreamResponse:
    """Send a stored response's events from number `start` on.

    The last event is not stored; it is made from the response. If the process was killed, the other events are lost;
    the last event is then sent alone, with the number that the client expects next.
    """
    recorded = [event + b"\n\n" for event in entry.events.split(b"\n\n") if event]
    last = last_event(items.output(entry.head).status, len(recorded) or start, msgspec.Raw(entry.head))
    waiting = [*recorded, last][start:] if recorded else [last]
    with request.service.streams.open(request) as events:
        await events.send_pieces(waiting or [b": no further events\n\n"])
        await events.close()
        return events.response


async def _stored(request: Request) -> tuple[Entry, Running | None]:
    return await response_entry(request.variables["id"], request.exchange.tenant, request.service)
