"""The MCP servers that the settings list, and their tools.

A server's list of tools is kept for a while. Calls are made in sessions, one for each response and server, so that what
a server remembers of one response cannot reach another.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.errors import ConfigError, ToolServerFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    import aiohttp

    from infd.config import McpConfig
    from infd.mcp.messages import CallResult, Tool
    from infd.mcp.session import Session

TOOLS: Final = 256  # most tools of one server
END_S: Final = 1.0  # longest time in which a server may end a session
_TIMED_OUT: Final = 504
# Names that a chat template can render and a tool syntax can contain; see ToolName in http/schema/tools.py.
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}\Z")
_HEADER: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([ -~]*)\Z")


class Server(Struct, frozen=True, kw_only=True):
    """One server of the settings.

    headers  sent with every request
    allowed  names of the tools that may be called; None: all
    """

    label: str
    url: str
    headers: dict[str, str] = {}
    allowed: frozenset[str] | None = None

    def permits(self, name: str) -> bool:
        return _NAME.match(name) is not None and (self.allowed is None or name in self.allowed)


class Servers:
    """All servers of the settings. `close` after use."""

    def __init__(self, config: McpConfig, headers: Mapping[str, dict[str, str]]) -> None:
        """headers: by label, the headers sent to a server."""
        self._config = config
        self._servers = {
            label: Server(
                label=label,
                url=url,
                headers=headers.get(label, {}),
                allowed=frozenset(config.tools[label].split()) if label in config.tools else None,
            )
            for label, url in config.servers.items()
        }
        self._lists: dict[str, tuple[float, list[Tool]]] = {}
        self._listing: dict[str, asyncio.Task[list[Tool]]] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None

    @classmethod
    def read(cls, config: McpConfig) -> Servers:
        """Read the files of headers. Raises ConfigError."""
        for name, table in (("tools", config.tools), ("header_files", config.header_files)):
            for label in table:
                if label not in config.servers:
                    raise ConfigError(f"mcp.{name}: {label} is no server of mcp.servers")
        return cls(config, {label: _headers(path) for label, path in config.header_files.items()})

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self._servers)

    def by_label(self, label: str) -> Server | None:
        return self._servers.get(label)

    def by_url(self, url: str) -> Server | None:
        return next((server for server in self._servers.values() if server.url == url), None)

    async def tools(self, server: Server) -> list[Tool]:
        """Return the tools of a server that may be called. Concurrent callers share one request.

        Raises ToolServerFailed.
        """
        kept = self._lists.get(server.label)
        if kept is not None and time.monotonic() - kept[0] < self._config.list_age_s:
            return kept[1]
        task = self._listing.get(server.label)
        if task is None:
            task = self._listing[server.label] = asyncio.create_task(self._list(server))
            task.add_done_callback(partial(self._listed, server.label))
        return await asyncio.shield(task)

    def calls(self) -> Calls:
        """Return the sessions of one response."""
        return Calls(self, self._config.timeout_s)

    def session(self, server: Server) -> Session:
        # Imported here: `infd config check` reads the settings of servers without aiohttp.
        import aiohttp

        from infd.mcp.session import Session

        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        return Session(
            self._http,
            self._slots.setdefault(server.label, asyncio.Semaphore(self._config.connections)),
            server.url,
            server.headers,
            answer_bytes=self._config.answer_bytes,
        )

    def end(self, sessions: Iterable[Session]) -> None:
        """End sessions at their servers, while the caller goes on: a response does not wait for a slow server."""
        for session in sessions:
            task = asyncio.create_task(_end(session))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        for task in list(self._listing.values()):
            task.cancel()
        if self._ending:
            await asyncio.wait(self._ending)
        if self._http is not None:
            await self._http.close()

    async def _list(self, server: Server) -> list[Tool]:
        async with self.calls() as calls:
            found = {tool.name: tool for tool in await calls.tools(server, TOOLS)}
        tools = [tool for name, tool in found.items() if server.permits(name) and tool.is_sound]
        self._lists[server.label] = time.monotonic(), tools
        return tools

    def _listed(self, label: str, task: asyncio.Task[list[Tool]]) -> None:
        del self._listing[label]
        if not task.cancelled():
            task.exception()  # each caller gets it; there may be none left


class Calls:
    """Sessions with servers, opened with the first call of each server. Leaving the context ends them."""

    def __init__(self, servers: Servers, timeout_s: float) -> None:
        self._servers = servers
        self._timeout_s = timeout_s
        self._sessions: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def __aenter__(self) -> Calls:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._servers.end(self._sessions.values())

    async def tools(self, server: Server, most: int) -> list[Tool]:
        """Return the tools of a server. Raises ToolServerFailed."""
        async with self._time():
            return await (await self._session(server)).tools(most)

    async def call(self, server: Server, name: str, arguments: dict[str, Any]) -> CallResult:
        """Call a tool. Raises ToolServerFailed."""
        async with self._time():
            return await (await self._session(server)).call(name, arguments)

    @asynccontextmanager
    async def _time(self) -> AsyncIterator[None]:
        """Bound the time that the block takes. Raises ToolServerFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise ToolServerFailed(
                f"the server took longer than {self._timeout_s:g} s (mcp.timeout_s)",
                kind="http_error",
                number=_TIMED_OUT,
            ) from None

    async def _session(self, server: Server) -> Session:
        async with self._opening.setdefault(server.label, asyncio.Lock()):
            if server.label not in self._sessions:
                session = self._servers.session(server)
                await session.open()
                self._sessions[server.label] = session
            return self._sessions[server.label]


async def _end(session: Session) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await session.close()


def _headers(path: str) -> dict[str, str]:
    """Read lines `Name: value`; skip blank lines and `#` comments. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"mcp.header_files: {path} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        if (match := _HEADER.match(line)) is None:
            raise ConfigError(f"mcp.header_files: {path}:{number}: expected `Name: value` in ASCII")
        found[match[1]] = match[2]
    return found
