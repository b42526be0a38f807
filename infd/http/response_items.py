"""Convert the items of the Responses API to the messages that chat templates expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from infd.errors import InvalidRequest, Unsupported, shorten
from infd.http.constraints import is_set
from infd.http.conversation import json_dict
from infd.http.remote_tools import NO_REMOTE_TOOLS
from infd.http.schema.responses import McpError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infd.http.remote_tools import RemoteTools
    from infd.http.schema.responses import InputItem, ItemPart

_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_CALLS: Final = ("function_call", "custom_tool_call", "mcp_call", "mcp_approval_request")


def template_messages(
    instructions: str | None, items: Sequence[InputItem], earlier: int, remote: RemoteTools
) -> list[dict[str, Any]]:
    """Return the items as messages for a chat template. Raises InvalidRequest, Unsupported, naming the item.

    Adjacent thoughts, texts and calls of the assistant become one message.

    earlier  number of `items` that precede the request's own; error messages count from the request's first item
    remote   tools of MCP servers, by whose names the model calls them
    """
    written = _Messages(items, remote)
    if instructions is not None:
        written.messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items, -earlier):
        written.append(item, f"input[{number}]")
    written.flush()
    return written.messages


def check_items(items: Sequence[InputItem]) -> None:
    """Raise InvalidRequest or Unsupported, naming the item, unless a conversation may contain `items`."""
    written = _Messages(items, NO_REMOTE_TOOLS)
    for number, item in enumerate(items):
        written.append(item, f"items[{number}]")


class Approvals:
    """What the items say of calls that need an approval, by the id of the request for it.

    answers   the client's answers
    executed  ids of the requests whose call has been made
    """

    def __init__(self, items: Iterable[InputItem]) -> None:
        self.answers: dict[str, InputItem] = {}
        self.executed: set[str] = set()
        for item in items:
            if item.type == "mcp_approval_response" and item.approval_request_id is not None:
                self.answers[item.approval_request_id] = item
            elif item.type == "mcp_call" and item.approval_request_id is not None:
                self.executed.add(item.approval_request_id)


class _Messages:
    """Messages to which items are appended."""

    def __init__(self, items: Sequence[InputItem], remote: RemoteTools) -> None:
        self.messages: list[dict[str, Any]] = []
        self._remote = remote
        self._approvals = Approvals(items)
        self._outputs: list[dict[str, Any]] = []  # of calls of MCP servers; they follow all calls of a message

    def append(self, item: InputItem, at: str) -> None:
        if item.type not in _CALLS:
            self.flush()
        match item.type:
            case "message":
                self._message(item, at)
            case "reasoning":
                turn = self._assistant()
                thought = _text(item.content or item.summary or [], at)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case "function_call" | "custom_tool_call":
                self._call(item, at)
            case "function_call_output" | "custom_tool_call_output":
                if item.call_id is None or item.output is None:
                    raise InvalidRequest("an output has a call_id and an output", param=at)
                output = _text(item.output, f"{at}.output")
                self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case "mcp_call":
                self._remote_call(item, _result(item, at), at)
            case "mcp_approval_request":
                self._unapproved(item, at)
            case "mcp_list_tools" | "mcp_approval_response":
                pass  # tools are listed anew; an approved call is an item of its own
            case _:
                raise Unsupported(f"an item of type {shorten(item.type)!r}", param=f"{at}.type")

    def flush(self) -> None:
        """Append the outputs of the calls so far."""
        self.messages += self._outputs
        self._outputs = []

    def _message(self, item: InputItem, at: str) -> None:
        if item.role is None or item.content is None:
            raise InvalidRequest("a message has a role and content", param=at)
        text = _text(item.content, f"{at}.content")
        if item.role == "assistant":
            turn = self._assistant()
            turn["content"] = turn.get("content", "") + text
        else:
            self.messages.append({"role": "system" if item.role == "developer" else item.role, "content": text})

    def _call(self, item: InputItem, at: str) -> None:
        if item.call_id is None or item.name is None:
            raise InvalidRequest("a call has a call_id and a name", param=at)
        if item.type == "function_call":
            written = (item.arguments or "{}").encode("utf-8", "surrogatepass")
            arguments = json_dict(written, f"{at}.arguments")
        else:
            arguments = {"input": item.input or ""}
        self._add_call(item.call_id, item.name, arguments)

    def _unapproved(self, item: InputItem, at: str) -> None:
        if item.id in self._approvals.executed:
            return
        answer = self._approvals.answers.get(item.id or "")
        if answer is not None and answer.approve:
            return  # the call follows, made by the server
        reason = "" if answer is None or not answer.reason else f": {answer.reason}"
        self._remote_call(item, f"The user did not approve this call{reason}.", at)

    def _remote_call(self, item: InputItem, output: str, at: str) -> None:
        if item.name is None or item.server_label is None:
            raise InvalidRequest("a call of an MCP server has a server_label and a name", param=at)
        tool = self._remote.find(item.server_label, item.name)
        id = item.id or f"mcp_{len(self.messages)}_{len(self._outputs)}"
        try:
            arguments = json_dict((item.arguments or "{}").encode("utf-8", "surrogatepass"), f"{at}.arguments")
        except InvalidRequest:
            if not is_set(item.error):
                raise
            arguments = {}  # the error says that they are malformed
        self._add_call(id, item.name if tool is None else tool.name, arguments)
        self._outputs.append({"role": "tool", "tool_call_id": id, "content": output})

    def _add_call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        turn = self._assistant()
        turn.setdefault("content", "")
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})

    def _assistant(self) -> dict[str, Any]:
        """Return the last message if it is the assistant's; else append an empty one of the assistant and return it."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _result(item: InputItem, at: str) -> str:
    """Return the text that the model reads as the result of a call of an MCP server."""
    if is_set(item.error):
        try:
            error = msgspec.json.decode(item.error, type=McpError)
        except (msgspec.MsgspecError, ValueError, RecursionError) as malformed:
            raise InvalidRequest(f"{at}.error: {shorten(str(malformed))}", param=f"{at}.error") from None
        if isinstance(error.content, list):
            return _text(error.content, f"{at}.error.content")
        return f"Error: {error.message or 'the call failed'}"
    return "" if item.output is None else _text(item.output, f"{at}.output")


def _text(content: str | Sequence[ItemPart], at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal"):
            raise Unsupported(f"content of type {shorten(part.type)!r}", param=f"{at}[{number}].type")
        if text is None:
            raise InvalidRequest(f"a part of type {part.type!r} has a text", param=f"{at}[{number}].text")
        texts.append(text)
    return "".join(texts)
