"""Answer a responses request in rounds: the model answers, infd makes the answer's calls of MCP servers' tools, and the
model answers again, until an answer makes none.

Between two rounds the request holds no place in the queue, so that a slow server holds up no other request. Each round
is queued anew. If the queue is full or the engine is paused by then, the response fails with the error of a refused
request (429 or 503), as an event if its stream has begun. A drain admits the rounds of responses that it waits for.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from infd.errors import InvalidRequest, ToolServerFailed, shorten
from infd.http.apis.responses import generation, input_items
from infd.http.conversation import json_dict
from infd.http.formats.responses import DraftErrors, ResponsesFormat
from infd.http.generate import generate
from infd.http.remote_tools import NO_REMOTE_TOOLS, RemoteTools
from infd.http.response_items import Approvals
from infd.http.schema.responses import (
    ItemPart,
    ListedTool,
    McpCallItem,
    McpError,
    McpListItem,
    MessageItem,
    ReasoningItem,
    ResponseToolChoice,
)
from infd.http.tool_servers import offered, wanted
from infd.http.turn import output_items
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from infd.engine.admission.ticket import Ticket
    from infd.http.exchange import Events, Exchange
    from infd.http.formats.responses import Draft
    from infd.http.generation import Generation
    from infd.http.pieces import Pieces
    from infd.http.schema.responses import InputItem, ResponsesRequest
    from infd.http.service import Service
    from infd.http.tool_servers import Wanted
    from infd.mcp.messages import Tool
    from infd.mcp.servers import Calls

_INVALID_PARAMS = -32602  # JSON-RPC


class Asked(Struct, frozen=True, kw_only=True):
    """A checked request.

    items       items before the model's first answer
    size        bytes of the request's body and of `items`
    wanted      the MCP servers whose tools it offers
    approved    calls that the client approves with it, which are made first
    generation  the first answer; None: it depends on the servers' tools
    """

    request: ResponsesRequest
    items: list[InputItem]
    size: int
    wanted: list[Wanted]
    approved: list[InputItem]
    generation: Generation | None

    @classmethod
    def check(cls, request: ResponsesRequest, history: list[InputItem], size: int, service: Service) -> Asked:
        """Check a request. Raises InvalidRequest, Unsupported.

        history  items that precede the request's input
        """
        servers = wanted(request, service.tool_servers)
        if not servers:
            first = generation(request, history, size, service.config)
            return cls(request=request, items=history, size=size, wanted=[], approved=[], generation=first)
        others = [tool for tool in request.tools or () if tool.type != "mcp"]
        generation(replace(request, tools=others, tool_choice=None), history, size, service.config)
        items = [*history, *input_items(request)]
        approved = _approved(items, len(history), {one.label for one in servers})
        configured = service.config.mcp.calls
        most = configured if request.max_tool_calls is None else min(configured, request.max_tool_calls)
        if len(approved) > most:
            raise InvalidRequest(
                f"{len(approved)} calls are approved, and one response makes at most {most}", param="input"
            )
        return cls(request=request, items=items, size=size, wanted=servers, approved=approved, generation=None)

    async def answer(
        self,
        draft: Draft,
        exchange: Exchange,
        service: Service,
        events: Events | None = None,
        *,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> Pieces:
        """Answer the request; see `generate`. Raises RequestError."""
        if self.generation is not None:
            format_of = partial(ResponsesFormat, self.request, draft, NO_REMOTE_TOOLS)
            return await generate(self.generation, format_of, exchange, service, events, before_end=before_end)
        engine, tenant = service.engine, exchange.account.tenant
        async with engine.admit_rounds(tenant) as ticket, service.tool_servers.calls() as calls:
            return await _Rounds(self, draft, exchange, service, events, before_end, ticket, calls).answer()


def _approved(items: Sequence[InputItem], earlier: int, labels: set[str]) -> list[InputItem]:
    """Return the calls that the client has approved and that are not made yet. Raises InvalidRequest.

    earlier  number of `items` that precede the request's input
    labels   labels of the servers that the request names
    """
    approvals = Approvals(items)
    asked: dict[str, InputItem] = {}
    for number, item in enumerate(items, -earlier):
        if item.type == "mcp_approval_request":
            if item.id is None or item.id in asked:
                raise InvalidRequest("an mcp_approval_request has an id of its own", param=f"input[{number}]")
            asked[item.id] = item
        if item.type != "mcp_approval_response":
            continue
        if item.approval_request_id not in asked or item.approve is None:
            raise InvalidRequest(
                "an approval has `approve`, and as approval_request_id the id of an item of type mcp_approval_request"
                " before it",
                param=f"input[{number}]",
            )
    calls = [asked[id] for id, answer in approvals.answers.items() if answer.approve and id not in approvals.executed]
    for call in calls:
        if call.server_label not in labels:
            raise InvalidRequest(
                f"the approved call needs the MCP server {shorten(call.server_label or '')!r} among the tools",
                param="tools",
            )
    return calls


class _Rounds:
    """A request while its rounds are answered."""

    def __init__(
        self,
        asked: Asked,
        draft: Draft,
        exchange: Exchange,
        service: Service,
        events: Events | None,
        before_end: Callable[[], Awaitable[None]] | None,
        ticket: Ticket,
        calls: Calls,
    ) -> None:
        self._asked = asked
        self._draft = draft
        self._exchange = exchange
        self._service = service
        self._events = events
        self._before_end = before_end
        self._ticket = ticket
        self._calls = calls
        self._remote = NO_REMOTE_TOOLS
        most, wished = service.config.mcp.calls, asked.request.max_tool_calls
        self._calls_left = most if wished is None else min(most, wished)

    async def answer(self) -> Pieces:
        draft = self._draft
        self._exchange.errors = DraftErrors(draft)
        await self._send(*draft.begin())
        self._remote = await self._list()
        await self._make([await self._begin(call) for call in self._asked.approved])
        while True:
            first = len(draft.response.output)
            pieces = await self._generate()
            if not draft.waiting:
                return pieces
            waiting, draft.waiting = draft.waiting, []
            await self._make(waiting)
            new = draft.response.output[first:]
            if not all(isinstance(item, McpCallItem | MessageItem | ReasoningItem) for item in new):
                return await self._end(FinishReason.STOP)  # the client's turn: to call a function, or to approve
            if self._tokens_left == 0:
                return await self._end(FinishReason.LENGTH)

    async def _generate(self) -> Pieces:
        """Generate the next of the model's answers."""
        asked, draft = self._asked, self._draft
        output = [item for item in draft.response.output if not isinstance(item, McpListItem)]
        made = output_items(output)
        request = replace(
            asked.request,
            input=[],
            tool_choice=_after(asked.request, made),
            max_tool_calls=self._calls_left,
            max_output_tokens=self._tokens_left,
        )
        size = asked.size + (len(msgspec.json.encode(output)) if output else 0)
        following = generation(request, [*asked.items, *made], size, self._service.config, self._remote)
        format_of = partial(ResponsesFormat, asked.request, draft, self._remote)
        return await generate(
            following,
            format_of,
            self._exchange,
            self._service,
            self._events,
            before_end=self._before_last,
            within=self._ticket,
        )

    @property
    def _tokens_left(self) -> int | None:
        """Tokens that the model may still generate; None: no limit."""
        most, used = self._asked.request.max_output_tokens, self._draft.response.usage
        return most if most is None or used is None else max(0, most - used.output_tokens)

    async def _before_last(self) -> None:
        if not self._draft.waiting and self._before_end is not None:
            await self._before_end()

    async def _end(self, finish: FinishReason) -> Pieces:
        """End the response after calls."""
        self._draft.end(finish)
        if self._events is None:
            return [msgspec.json.encode(self._draft.response)]
        await self._before_last()
        await self._send(self._draft.last_event())
        return []

    async def _send(self, *events: bytes) -> None:
        if self._events is not None and events:
            await self._events.send(b"".join(events))

    async def _list(self) -> RemoteTools:
        """List the servers' tools; servers whose list the conversation has are listed without an item."""
        draft, known = self._draft, {item.server_label for item in self._asked.items if item.type == "mcp_list_tools"}
        items: dict[str, McpListItem] = {}
        for one in self._asked.wanted:
            if one.label not in known:
                item = items[one.label] = McpListItem(id=draft.new_id("mcpl"), server_label=one.label)
                await self._send(draft.add(item), draft.item_event("response.mcp_list_tools.in_progress", item))
        lists = []
        for one in self._asked.wanted:
            shown = items.get(one.label)
            try:
                async with self._ticket.interrupt_if_expired():
                    tools = await self._service.tool_servers.tools(one.server)
            except ToolServerFailed as error:
                if shown is not None:
                    shown.error = str(error)
                    await self._send(
                        draft.item_event("response.mcp_list_tools.failed", shown),
                        draft.item_event("response.output_item.done", shown, item=shown),
                    )
                raise
            lists.append(tools)
            if shown is not None:
                shown.tools = [_listed(tool) for tool in tools if one.offers(tool)]
                await self._send(
                    draft.item_event("response.mcp_list_tools.completed", shown),
                    draft.item_event("response.output_item.done", shown, item=shown),
                )
        return offered(self._asked.wanted, lists, self._asked.request)

    async def _begin(self, approved: InputItem) -> McpCallItem:
        """Add a call that the client has approved to the output."""
        draft, arguments = self._draft, approved.arguments or "{}"
        item = McpCallItem(
            id=draft.new_id("mcp"),
            status="in_progress",
            server_label=approved.server_label or "",
            name=approved.name or "",
            arguments="",
            approval_request_id=approved.id,
        )
        events = [draft.add(item), draft.item_event("response.mcp_call.in_progress", item)]
        item.arguments = arguments
        await self._send(
            *events,
            draft.item_event("response.mcp_call_arguments.delta", item, delta=arguments),
            draft.item_event("response.mcp_call_arguments.done", item, arguments=arguments),
        )
        return item

    async def _make(self, calls: Sequence[McpCallItem]) -> None:
        """Make calls, all at once, and send their results as they come."""
        self._calls_left = max(0, self._calls_left - len(calls))
        tasks = [asyncio.create_task(self._call(item)) for item in calls]
        try:
            for ended in asyncio.as_completed(tasks):
                async with self._ticket.interrupt_if_expired():
                    item = await ended
                await self._send(
                    self._draft.item_event(f"response.mcp_call.{item.status}", item),
                    self._draft.item_event("response.output_item.done", item, item=item),
                )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, item: McpCallItem) -> McpCallItem:
        """Make a call; return its item, with the result."""
        try:
            item.output, item.error = await self._result(item)
        except ToolServerFailed as error:
            item.error = McpError(type=error.kind, code=error.number, message=str(error))
        item.status = "completed" if item.error is None else "failed"
        return item

    async def _result(self, item: McpCallItem) -> tuple[str | None, McpError | None]:
        server = next((one.server for one in self._asked.wanted if one.label == item.server_label), None)
        if server is None or self._remote.find(item.server_label, item.name) is None:
            raise ToolServerFailed(
                f"the request offers no tool {item.name} of {item.server_label}",
                kind="mcp_protocol_error",
                number=_INVALID_PARAMS,
            )
        try:
            arguments = json_dict((item.arguments or "{}").encode("utf-8", "surrogatepass"), "arguments")
        except InvalidRequest as error:
            raise ToolServerFailed(str(error), kind="mcp_protocol_error", number=_INVALID_PARAMS) from None
        result = await self._calls.call(server, item.name, arguments)
        if not result.is_error:
            return result.text, None
        content = [ItemPart(type="text", text=result.text)]
        return None, McpError(type="mcp_tool_execution_error", content=content)


def _listed(tool: Tool) -> ListedTool:
    return ListedTool(
        name=tool.name, description=tool.description, input_schema=tool.input_schema, annotations=tool.annotations
    )


def _after(request: ResponsesRequest, made: Sequence[InputItem]) -> Any:
    """Return the tool_choice of an answer after the items `made`: once a call is made, no further is required."""
    choice = request.tool_choice
    if not any(item.type == "mcp_call" for item in made):
        return choice
    if isinstance(choice, ResponseToolChoice) and choice.type == "allowed_tools":
        return replace(choice, mode="auto")
    return choice if choice == "none" else "auto"
