"""Encode an answer as a response of OpenAI's Responses API, whole or as events.

The output is a list of items: thoughts, messages and calls, in the order in which the model generated them. The same
code builds the items of a stream and of a whole answer, so that a stream's last event contains the same object as a
whole answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from infd.http.apis.responses import LOGPROBS
from infd.http.formats.base import TEXT_PLACEHOLDER, name_by_text, named_event, token_logprobs
from infd.http.formats.inputs import InputText
from infd.http.formats.openai import OpenAIErrors, detail
from infd.http.formats.ordered import CallPart, ContentPart, ThoughtPart, parts
from infd.http.schema.responses import (
    ConversationId,
    CustomCallItem,
    FunctionCallItem,
    InputTokensDetails,
    McpApprovalItem,
    McpCallItem,
    McpListItem,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    TextFormat,
    TextOptions,
)
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infd.errors import RequestError
    from infd.http.answer import ChoiceDelta
    from infd.http.formats.base import Accepted
    from infd.http.formats.ordered import Part
    from infd.http.gathering import WholeChoice
    from infd.http.pieces import Pieces
    from infd.http.remote_tools import RemoteTools
    from infd.http.schema.logprobs import TokenLogprob
    from infd.http.schema.responses import ResponsesRequest, ResponseTool

_STATUSES = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
    FinishReason.ERROR: "failed",
}
_END = "completed"
CallItem = FunctionCallItem | CustomCallItem | McpCallItem | McpApprovalItem
_LAST = {"completed": "response.completed", "failed": "response.failed"}


def last_event(status: str, number: int, response: ResponseObject | Raw) -> bytes:
    """Return the last event of a response. It is response.incomplete for "cancelled", for which OpenAI has no event."""
    kind = _LAST.get(status, "response.incomplete")
    return _framed(kind, number, {"response": response})


def _framed(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    return named_event(kind, msgspec.json.encode({"type": kind, "sequence_number": number, **fields}))


class Draft(Struct):
    """A response as far as it is generated.

    response  the object
    number    number of the next event
    settle    stores the collected text of an open item in the item; None before generation, and after the response
              has ended, so that a stored response does not keep the request's objects alive
    waiting   calls of MCP servers' tools that the model has made and infd has not; the response goes on after them
    """

    response: ResponseObject
    number: int = 0
    settle: Callable[[], None] | None = None
    waiting: list[McpCallItem] = field(default_factory=list)

    @classmethod
    def of(cls, request: ResponsesRequest, id: str, model: str) -> Draft:
        """Return the draft of a response of which nothing is generated yet."""
        reasoning, choice, named = request.reasoning, request.tool_choice, request.conversation
        return cls(
            ResponseObject(
                id=id,
                created_at=int(time.time()),
                status="queued",
                background=bool(request.background),
                conversation=ConversationId(id=named) if isinstance(named, str) else named,
                instructions=request.instructions,
                max_output_tokens=request.max_output_tokens,
                max_tool_calls=request.max_tool_calls,
                model=model,
                output=[],
                parallel_tool_calls=request.parallel_tool_calls is not False,
                previous_response_id=request.previous_response_id,
                prompt_cache_key=request.prompt_cache_key,
                reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": None},
                safety_identifier=request.safety_identifier,
                store=request.store is not False,
                temperature=request.temperature,
                text=_text_options(request.text),
                tool_choice="auto" if choice is None else choice,
                tools=[_echoed(tool) for tool in request.tools or ()],
                top_logprobs=request.top_logprobs or 0,
                top_p=request.top_p,
                truncation=request.truncation or "disabled",
                usage=None,
                user=request.user,
                metadata=request.metadata or {},
            )
        )

    def new_id(self, kind: str) -> str:
        """Return an id for the next item of the output."""
        return f"{kind}_{self.response.id.removeprefix('resp_')}_{len(self.response.output)}"

    def begin(self) -> list[bytes]:
        """Return the events with which the response begins, once; then an empty list."""
        if self.response.status != "queued":
            return []
        self.response.status = "in_progress"
        kinds = ["response.in_progress"] if self.number else ["response.created", "response.in_progress"]
        return [self.event(kind, response=self.response) for kind in kinds]

    def add(self, item: OutputItem) -> bytes:
        """Add an item to the output; return its first event."""
        self.response.output.append(item)
        return self.item_event("response.output_item.added", item, item=item)

    def item_event(self, kind: str, of: OutputItem, **fields: Any) -> bytes:
        """Return the next event, about an item of the output, framed."""
        output = self.response.output
        place = next(place for place in range(len(output) - 1, -1, -1) if output[place] is of)
        if "item" not in fields:
            fields = {"item_id": of.id, **fields}
        return self.event(kind, output_index=place, **fields)

    def end(self, finish: FinishReason) -> None:
        """End the response because its last answer has ended."""
        self.settle = None
        self.response.status = _STATUSES[finish]
        if self.response.status == "completed":
            self.response.completed_at = int(time.time())
        if finish is FinishReason.LENGTH:
            self.response.incomplete_details = {"reason": "max_output_tokens"}

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event, framed."""
        self.number += 1
        return _framed(kind, self.number - 1, fields)

    def last_event(self) -> bytes:
        self.number += 1
        return last_event(self.response.status, self.number - 1, self.response)

    def fail(self, error: RequestError) -> None:
        """End the response because of an error."""
        self.response.error = ResponseFailure(code=error.code or error.type, message=str(error))
        self.break_off("failed")

    def break_off(self, status: str) -> None:
        """End the response with `status`; the open item is incomplete."""
        if self.settle is not None:
            self.settle()
            self.settle = None
        self.response.status = status
        self.response.completed_at = None
        for item in self.response.output:
            if not isinstance(item, McpListItem | McpApprovalItem) and item.status == "in_progress":
                item.status = "incomplete"


def _text_options(given: TextOptions | None) -> TextOptions:
    format = (given and given.format) or TextFormat()
    verbosity = (given and given.verbosity) or "medium"
    return TextOptions(format=replace(format, schema=_one_line(format.schema)), verbosity=verbosity)


def _echoed(tool: ResponseTool) -> ResponseTool:
    return replace(tool, parameters=_one_line(tool.parameters))


def _one_line(json: Raw) -> Raw:
    """Return JSON without the client's line breaks, which would end an event's data."""
    return Raw(msgspec.json.format(bytes(json), indent=-1))


class ResponsesErrors(OpenAIErrors):
    """OpenAI's errors. The event of an error is a flat object of type "error", unlike the body of an error response."""

    def error_events(self, error: RequestError) -> bytes:
        found = detail(error)
        fields = {"code": found.code or found.type, "message": found.message, "param": found.param}
        data = msgspec.json.encode({"type": "error", "sequence_number": 0, **fields})
        return named_event("error", data)


RESPONSES_ERRORS: Final = ResponsesErrors()


class DraftErrors(ResponsesErrors):
    """The errors of a response that has begun: it ends as failed."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def error_events(self, error: RequestError) -> bytes:
        self._draft.fail(error)
        return self._draft.last_event()


class ResponsesFormat(DraftErrors):
    """The format of POST /v1/responses: of one answer of the model, of which a response has several if it calls tools
    of MCP servers.
    """

    def __init__(self, request: ResponsesRequest, draft: Draft, remote: RemoteTools, accepted: Accepted) -> None:
        super().__init__(draft)
        self._remote = remote
        self._response = draft.response
        self._response.model = accepted.model
        self._ticket = accepted.ticket
        self._tokenizer = accepted.tokenizer
        self._wants_logprobs = self.folds = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
        self._logprobs: list[TokenLogprob] = []  # of tokens whose log-probabilities no event contains yet
        self._newest = 0  # number of the newest delta's tokens
        self._sent: list[TokenLogprob] = []  # of the open message's tokens in earlier events
        self._text_start = 0  # bytes of the first token in `_sent` that precede the message's text
        self._custom = {tool.name for tool in request.tools or () if tool.type == "custom"}
        self._item: OutputItem | None = None
        self._calls: list[McpCallItem] = []  # complete calls of MCP servers' tools
        self._arguments: list[str] = []  # parts of the open call's arguments
        self._texts: list[str] = []  # parts of the open item's text, or of the input of a custom tool's call
        self._input = InputText()  # of the open call of a custom tool
        self._blank = ""  # leading white space of a message, held back; dropped if no text follows
        self._frame: list[bytes] = []  # the open item's delta event, split where its values vary
        self._thought_tokens = 0
        draft.settle = self._settle_texts

    def events(self, delta: ChoiceDelta) -> Pieces:
        if delta.aside is None and delta.finish is None and delta.text and type(self._item) is MessageItem:
            self._add_logprobs(delta)
            return [self._delta(delta.text, self._take_logprobs())]
        events: Pieces = self._draft.begin()
        self._add_logprobs(delta)
        if delta.aside is not None:
            self._thought_tokens += delta.aside.thought_tokens
            del self._logprobs[: delta.aside.thought_tokens]
        for part in parts(delta):
            events += self._part_events(part)
        if delta.finish is not None:
            events += self._end_item("incomplete" if delta.finish is not FinishReason.STOP else _END)
            events += self._finish(delta.finish)
        return events

    def last_events(self) -> bytes:
        return b"" if self._draft.waiting else self._draft.last_event()

    def encode_logprobs(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        return {}

    def whole(self, choices: Sequence[WholeChoice]) -> Pieces:
        for choice in choices:
            self.events(choice.delta)
        return [] if self._draft.waiting else [msgspec.json.encode(self._response)]

    def _part_events(self, part: Part) -> Iterator[bytes]:
        match part:
            case ThoughtPart(text=text):
                if not isinstance(self._item, ReasoningItem):
                    yield from self._open(ReasoningItem(id=self._draft.new_id("rs"), status="in_progress", content=[]))
                yield self._delta(text, b"[]")
            case ContentPart(text=text):
                if not isinstance(self._item, MessageItem):
                    text, self._blank = self._blank + text, ""
                    if text.isspace():
                        self._blank = text
                        return
                    yield from self._open(MessageItem(id=self._draft.new_id("msg"), status="in_progress", content=[]))
                    self._begin_logprobs(text)
                yield self._delta(text, self._take_logprobs())
            case CallPart(begun=begun, arguments=arguments):
                del self._logprobs[: max(0, len(self._logprobs) - self._newest)]  # no later message begins before
                if begun is not None:
                    yield from self._open(self._call(begun.id or "", begun.name or ""))
                if arguments and self._item is not None:
                    self._arguments.append(arguments)
                    if isinstance(self._item, FunctionCallItem):
                        yield self._event("response.function_call_arguments.delta", delta=arguments)
                    elif isinstance(self._item, McpCallItem):
                        yield self._event("response.mcp_call_arguments.delta", delta=arguments)
                    elif isinstance(self._item, CustomCallItem) and (given := self._input.feed(arguments)):
                        self._texts.append(given)
                        yield self._event("response.custom_tool_call_input.delta", delta=given)

    def _call(self, call_id: str, name: str) -> CallItem:
        if (tool := self._remote.called(name)) is not None:
            label, remote_name = tool.label, tool.tool.name
            if tool.approval:
                # Its id, which counts the items before it, is set when the item is complete.
                return McpApprovalItem(id="", server_label=label, name=remote_name, arguments="")
            id = self._draft.new_id("mcp")
            return McpCallItem(id=id, status="in_progress", server_label=label, name=remote_name, arguments="")
        if name in self._custom:
            return CustomCallItem(
                id=self._draft.new_id("ctc"), status="in_progress", call_id=call_id, name=name, input=""
            )
        return FunctionCallItem(
            id=self._draft.new_id("fc"), status="in_progress", call_id=call_id, name=name, arguments=""
        )

    def _open(self, item: OutputItem) -> Iterator[bytes]:
        yield from self._end_item(_END)
        self._blank = ""
        self._item = item
        if isinstance(item, McpApprovalItem):
            return  # it begins and ends with all its arguments
        yield self._draft.add(item)
        if isinstance(item, McpCallItem):
            yield self._event("response.mcp_call.in_progress")
        if isinstance(item, MessageItem | ReasoningItem):
            part = OutputText(text="") if isinstance(item, MessageItem) else ReasoningText(text="")
            yield self._event("response.content_part.added", item_id=item.id, content_index=0, part=part)
            kind = "output_text" if isinstance(item, MessageItem) else "reasoning_text"
            fields: dict[str, Any] = {"type": f"response.{kind}.delta", "sequence_number": TEXT_PLACEHOLDER}
            fields |= {"item_id": item.id, "output_index": self._index, "content_index": 0, "delta": TEXT_PLACEHOLDER}
            if isinstance(item, MessageItem):
                fields["logprobs"] = TEXT_PLACEHOLDER
            self._frame = named_event(fields["type"], msgspec.json.encode(fields)).split(
                msgspec.json.encode(TEXT_PLACEHOLDER)
            )

    def _delta(self, text: str, logprobs: bytes) -> bytes:
        self._texts.append(text)
        head, middle, *tail = self._frame
        number = self._draft.number
        self._draft.number = number + 1
        return b"".join((head, b"%d" % number, middle, msgspec.json.encode(text), logprobs.join(tail)))

    def _settle_texts(self) -> None:
        """Store the collected text or arguments of the open item in the item."""
        item, text = self._item, "".join(self._texts)
        if isinstance(item, MessageItem) and not item.content:
            item.content.append(OutputText(text=text, logprobs=self._logprobs_of(text)))
        elif isinstance(item, ReasoningItem) and not item.content:
            item.content.append(ReasoningText(text=text))
        elif isinstance(item, FunctionCallItem | McpCallItem | McpApprovalItem):
            item.arguments = "".join(self._arguments)
        elif isinstance(item, CustomCallItem):
            item.input = text

    def _end_item(self, status: str) -> Iterator[bytes]:
        item = self._item
        if item is None:
            return
        if isinstance(item, CustomCallItem) and (rest := self._input.finish()):
            self._texts.append(rest)
            yield self._event("response.custom_tool_call_input.delta", delta=rest)
        self._settle_texts()
        if isinstance(item, McpApprovalItem):
            yield from self._request_approval(item, status)
            return
        if not isinstance(item, McpListItem):
            item.status = status
        match item:
            case MessageItem(content=[part]):
                logprobs = part.logprobs
                yield self._event(
                    "response.output_text.done", item_id=item.id, content_index=0, text=part.text, logprobs=logprobs
                )
                yield self._event("response.content_part.done", item_id=item.id, content_index=0, part=part)
            case ReasoningItem(content=[part]):
                yield self._event("response.reasoning_text.done", item_id=item.id, content_index=0, text=part.text)
                yield self._event("response.content_part.done", item_id=item.id, content_index=0, part=part)
            case FunctionCallItem():
                yield self._event("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
            case McpCallItem():
                yield self._event("response.mcp_call_arguments.done", arguments=item.arguments)
                if status == _END:
                    item.status = "in_progress"
                    self._calls.append(item)
            case CustomCallItem():
                yield self._event("response.custom_tool_call_input.done", input=item.input)
        if item not in self._calls:
            yield self._event("response.output_item.done", item=item)
        self._item, self._texts, self._arguments, self._input = None, [], [], InputText()

    def _request_approval(self, item: McpApprovalItem, status: str) -> Iterator[bytes]:
        """Ask the client for its approval of a call; omit a call whose arguments are incomplete."""
        if status == _END:
            item.id = self._draft.new_id("mcpr")
            yield self._draft.add(item)
            yield self._event("response.output_item.done", item=item)
        self._item, self._texts, self._arguments = None, [], []

    def _finish(self, finish: FinishReason) -> Iterator[bytes]:
        self._count_tokens()
        self._draft.settle = None
        if self._calls and finish is FinishReason.STOP:
            self._draft.waiting = self._calls
            return
        for item in self._calls:
            item.status = "incomplete"
            yield self._draft.item_event("response.output_item.done", item, item=item)
        self._draft.end(finish)

    def _count_tokens(self) -> None:
        """Add the answer's tokens to those of the response's earlier answers."""
        ticket, before = self._ticket, self._response.usage
        usage = ResponseUsage(
            input_tokens=ticket.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=ticket.cached_tokens),
            output_tokens=ticket.generated_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._thought_tokens),
            total_tokens=ticket.prompt_tokens + ticket.generated_tokens,
        )
        if before is not None:
            usage.input_tokens += before.input_tokens
            usage.input_tokens_details.cached_tokens += before.input_tokens_details.cached_tokens
            usage.output_tokens += before.output_tokens
            usage.output_tokens_details.reasoning_tokens += before.output_tokens_details.reasoning_tokens
            usage.total_tokens += before.total_tokens
        self._response.usage = usage

    @property
    def _index(self) -> int:
        return len(self._response.output) - 1

    def _event(self, kind: str, **fields: Any) -> bytes:
        if "item" not in fields and "item_id" not in fields and self._item is not None:
            fields = {"item_id": self._item.id, **fields}
        return self._draft.event(kind, output_index=self._index, **fields)

    def _add_logprobs(self, delta: ChoiceDelta) -> None:
        if self._wants_logprobs:
            self._logprobs += token_logprobs(delta, self._tokenizer, name_by_text)
            self._newest = len(delta.token_ids)

    def _begin_logprobs(self, text: str) -> None:
        """Drop the log-probabilities of tokens before `text`, with which a message begins."""
        first = b"".join(bytes(entry.bytes) for entry in self._logprobs).rfind(text.encode())
        if first < 0:  # tokens that are not UTF-8 are replaced in the text
            return
        place = count = 0
        while count < len(self._logprobs) and place + len(self._logprobs[count].bytes) <= first:
            place += len(self._logprobs[count].bytes)
            count += 1
        del self._logprobs[:count]
        self._text_start = first - place

    def _take_logprobs(self) -> bytes:
        if not self._logprobs:
            return b"[]"
        self._sent += self._logprobs
        encoded = msgspec.json.encode(self._logprobs)
        self._logprobs = []
        return encoded

    def _logprobs_of(self, text: str) -> list[TokenLogprob]:
        """Return the log-probabilities of the open message's tokens, without tokens after its end."""
        entries, end, place = self._sent, self._text_start + len(text.encode()), 0
        self._sent, self._text_start = [], 0
        for number, entry in enumerate(entries):
            if place >= end:
                return entries[:number]
            place += len(entry.bytes)
        return entries
