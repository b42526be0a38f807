"""One session with an MCP server, over streamable HTTP.

Each message is a POST. The server answers with one JSON message, or with a stream of events that ends with the answer;
a stream that breaks off before is resumed from its last event. Neither redirects nor compressed bodies are accepted, no
cookies are kept, and no proxy of the environment is used.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from infd.errors import ToolServerFailed
from infd.mcp import messages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infd.mcp.messages import CallResult, Message, Request, Tool

SESSION: Final = "Mcp-Session-Id"
PAGES: Final = 64  # most pages of a list of tools
REQUESTS: Final = 16  # most requests of the server that are answered during one request of ours
RESUMES: Final = 16  # most times that one answer's stream is resumed
RETRY_S: Final = 1.0  # time before a stream is resumed, unless the server says another
_UNKNOWN_REVISION: Final = -32022
_INVALID: Final = -32600
_BAD_GATEWAY: Final = 502
_TOO_LARGE: Final = 413


class Session:
    """A session with one server. Concurrent calls are allowed once `open` has returned.

    slots         held by each request of ours while its answer is read. Replies to the server's own requests take none:
                  a server may send its answer only after the reply
    headers       sent with every request
    answer_bytes  most bytes read of the answer to one request
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        slots: asyncio.Semaphore,
        url: str,
        headers: dict[str, str],
        *,
        answer_bytes: int,
    ) -> None:
        self._http = http
        self._slots = slots
        self._url = url
        self._headers = {
            **headers,
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        self._answer_bytes = answer_bytes
        self._last_id = 0

    async def open(self) -> None:
        """Begin the session. Raises ToolServerFailed."""
        answer = await self._ask(messages.initialize(self._next_id()), opening=True)
        revision = messages.result(answer, messages.Initialized).protocol_version
        if revision not in messages.REVISIONS:
            raise ToolServerFailed(
                f"the server speaks revision {revision[:32]!r} of the protocol",
                kind="mcp_protocol_error",
                number=_UNKNOWN_REVISION,
            )
        self._headers["MCP-Protocol-Version"] = revision
        await self._tell(msgspec.json.encode(messages.INITIALIZED))

    async def tools(self, most: int) -> list[Tool]:
        """Return the server's tools, at most `most`. Raises ToolServerFailed."""
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(PAGES):
            answer = await self._ask(messages.list_tools(self._next_id(), cursor))
            page = messages.result(answer, messages.ToolPage)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None or len(found) >= most:
                break
        return found[:most]

    async def call(self, name: str, arguments: dict[str, Any]) -> CallResult:
        """Call a tool. Raises ToolServerFailed."""
        answer = await self._ask(messages.call_tool(self._next_id(), name, arguments))
        found: CallResult = messages.result(answer, messages.CallResult)
        return found

    async def close(self) -> None:
        """End the session at the server, if it has one. Errors are ignored: the server ends sessions by itself too."""
        if SESSION in self._headers:
            try:
                async with (
                    self._slots,
                    self._http.delete(self._url, headers=self._headers, allow_redirects=False),
                ):
                    pass
            except (aiohttp.ClientError, OSError):
                pass

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def _ask(self, request: Request, *, opening: bool = False) -> Message:
        """Send a request; return its answer. Raises ToolServerFailed."""
        reader = _Reader(self, str(request.id).encode(), self._answer_bytes)
        method, data = "POST", msgspec.json.encode(request)
        try:
            for _ in range(RESUMES):
                headers = self._headers if method == "POST" else {**self._headers, "Last-Event-ID": reader.last_event}
                async with (
                    self._slots,
                    self._http.request(
                        method, self._url, data=data, headers=headers, allow_redirects=False
                    ) as response,
                ):
                    _check(response)
                    if opening and (session := response.headers.get(SESSION)) is not None:
                        self._headers[SESSION] = session
                    if (answer := await reader.read(response)) is not None:
                        return answer
                if not reader.last_event:
                    break
                await asyncio.sleep(reader.retry_s)
                method, data = "GET", b""
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _unreached(error) from None
        raise ToolServerFailed("the server ended its stream without an answer", kind="http_error", number=_BAD_GATEWAY)

    async def _tell(self, data: bytes) -> None:
        """Send a message that has no answer. Raises ToolServerFailed."""
        try:
            async with self._http.post(self._url, data=data, headers=self._headers, allow_redirects=False) as response:
                _check(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _unreached(error) from None


class _Reader:
    """Reads the answer to one request from one or more responses.

    last_event  id of the last event read, from which a stream is resumed; empty: none
    """

    def __init__(self, session: Session, id: bytes, most: int) -> None:
        self._session = session
        self._id = id
        self._bytes_left = most
        self._requests_left = REQUESTS
        self.last_event = ""
        self.retry_s = RETRY_S

    async def read(self, response: aiohttp.ClientResponse) -> Message | None:
        """Return the answer; None if the response is a stream that ended before it. Raises ToolServerFailed."""
        if response.content_type != "text/event-stream":
            body = b"".join([piece async for piece in self._pieces(response)])
            answer = messages.message(body)
            if bytes(answer.id) != self._id:
                raise ToolServerFailed(
                    "the answer has another id than the request", kind="mcp_protocol_error", number=_INVALID
                )
            return answer
        async for data in self._events(response):
            message = messages.message(data)
            if message.method is None:
                if bytes(message.id) == self._id:
                    return message
            elif bytes(message.id) != b"null":
                await self._reply(message)
        return None

    async def _reply(self, request: Message) -> None:
        self._requests_left -= 1
        if self._requests_left < 0:
            raise ToolServerFailed(
                f"the server sent more than {REQUESTS} requests of its own", kind="mcp_protocol_error", number=_INVALID
            )
        await self._session._tell(messages.reply(request))

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yield the data of each event of a stream that has data."""
        data: list[bytes] = []
        async for line in self._lines(response):
            if not line:
                if data:
                    yield b"\n".join(data)
                data = []
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                data.append(value)
            elif name == b"id" and b"\0" not in value:
                self.last_event = value.decode("latin-1")
            elif name == b"retry" and value.isdigit() and len(value) < 10:
                self.retry_s = int(value) / 1000

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        begun = bytearray()  # a line that arrives a byte at a time is not copied each time
        async for piece in self._pieces(response):
            begun += piece
            if b"\n" not in piece:
                continue
            *lines, rest = bytes(begun).split(b"\n")
            begun = bytearray(rest)
            for line in lines:
                yield line.removesuffix(b"\r")

    async def _pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        async for piece in response.content.iter_any():
            self._bytes_left -= len(piece)
            if self._bytes_left < 0:
                raise ToolServerFailed(
                    "the answer is larger than mcp.answer_bytes", kind="http_error", number=_TOO_LARGE
                )
            yield piece


def _unreached(error: Exception) -> ToolServerFailed:
    # aiohttp's messages name the URL, whose query may hold a key, and hosts of the operator's network.
    reason = "no valid HTTP answer" if isinstance(error, aiohttp.ClientResponseError) else type(error).__name__
    return ToolServerFailed(f"the server is not reached: {reason}", kind="http_error", number=_BAD_GATEWAY)


def _check(response: aiohttp.ClientResponse) -> None:
    """Raise ToolServerFailed unless the response is a success that can be read."""
    if not 200 <= response.status < 300:
        raise ToolServerFailed(
            f"the server answered with HTTP status {response.status}", kind="http_error", number=response.status
        )
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ToolServerFailed("the server compressed its answer", kind="http_error", number=_BAD_GATEWAY)
