"""The HTTP server: all routes, and the listeners."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from aiohttp import web

from infd.http.admission import guarded
from infd.http.apis.chat import CHAT
from infd.http.apis.completions import COMPLETIONS
from infd.http.apis.embeddings import CLASSIFY, EMBEDDINGS, POOLING
from infd.http.apis.infill import INFILL
from infd.http.apis.messages import MESSAGES
from infd.http.apis.score import RERANK, SCORE
from infd.http.apis.tei import EMBED, EMBED_ALL, EMBED_SPARSE, PREDICT, SIMILARITY
from infd.http.connection import STALL_S, Connection
from infd.http.connections import Connections
from infd.http.formats.responses import RESPONSES_ERRORS
from infd.http.handling import handle
from infd.http.handshakes import Handshakes, TlsListener
from infd.http.routes import (
    conversations,
    description,
    documents,
    health,
    messages,
    metrics,
    models,
    pooling,
    responses,
    tokens,
)
from infd.http.routes.generating import answering
from infd.http.routes.render import rendering
from infd.http.routing import Request, Routes
from infd.http.service import Service

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from infd.config import LiveConfig
    from infd.engine.engine import Engine
    from infd.http.apis.api import Api, PoolingApi
    from infd.http.auth import Keys
    from infd.http.served_model import ServedModel
    from infd.http.store.entry import Store
    from infd.mcp.servers import Servers
    from infd.offload import Offload
    from infd.telemetry.metrics import Metrics

# Linux doubles this size. For a slow reader this process buffers further bytes: see PENDING_BYTES in
# engine/streams/stream.py and HIGH_WATER in sse.py.
SEND_BUFFER_BYTES: Final = 64 * 2**10
BACKLOG: Final = 1024
# At shutdown the engine has ended every request, so handlers only write the rest of their answers. A handler exceeds
# this time only if its client reads slowly.
SHUTDOWN_S: Final = 0.5
# At a stop, the time in which newly accepted clients may send their first requests, and the interval at which
# `await_first_requests` checks whether all have.
FIRST_REQUEST_S: Final = 0.2
CHECK_S: Final = 0.005

RESPONSES: Final = "/v1/responses"
CONVERSATIONS: Final = "/v1/conversations"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
# The APIs by path. The server accepts each path without the prefix /v1 too, as llama.cpp's clients expect.
APIS: Final[dict[str, Api[Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
}
# The APIs that reduce prompts to numbers, by path.
POOLING_APIS: Final[dict[str, PoolingApi[Any]]] = {
    "/v1/embeddings": EMBEDDINGS,
    "/embeddings": EMBEDDINGS,
    "/pooling": POOLING,
    "/classify": CLASSIFY,
    "/score": SCORE,
    "/v1/score": SCORE,
    "/rerank": RERANK,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/embed": EMBED,
    "/embed_all": EMBED_ALL,
    "/embed_sparse": EMBED_SPARSE,
    "/predict": PREDICT,
    "/similarity": SIMILARITY,
}


def routes() -> Routes:
    """Return all routes."""
    found = Routes()
    for long, api in APIS.items():
        for path in (long, long.removeprefix("/v1")):
            found.add("POST", path, answering(api), api.errors)
        found.add("POST", f"{long}/render", rendering(api))
    found.add("POST", "/infill", answering(INFILL))
    for path, pooled in POOLING_APIS.items():
        found.add("POST", path, pooling.pooling(pooled), pooled.errors)
    found.add("POST", COUNT_TOKENS, messages.count_tokens, MESSAGES.errors)
    found.add("POST", RESPONSES, guarded(responses.create), RESPONSES_ERRORS)
    for method, path, handler in (
        ("GET", "/info", pooling.info),
        ("POST", f"{RESPONSES}/input_tokens", responses.count_tokens),
        ("GET", f"{RESPONSES}/{{id}}", responses.retrieve),
        ("DELETE", f"{RESPONSES}/{{id}}", responses.delete),
        ("POST", f"{RESPONSES}/{{id}}/cancel", responses.cancel),
        ("GET", f"{RESPONSES}/{{id}}/input_items", responses.list_input),
        ("POST", CONVERSATIONS, conversations.create),
        ("GET", f"{CONVERSATIONS}/{{id}}", conversations.retrieve),
        ("POST", f"{CONVERSATIONS}/{{id}}", conversations.update),
        ("DELETE", f"{CONVERSATIONS}/{{id}}", conversations.delete),
        ("POST", f"{CONVERSATIONS}/{{id}}/items", conversations.add_items),
        ("GET", f"{CONVERSATIONS}/{{id}}/items", conversations.list_items),
        ("GET", f"{CONVERSATIONS}/{{id}}/items/{{item}}", conversations.retrieve_item),
        ("DELETE", f"{CONVERSATIONS}/{{id}}/items/{{item}}", conversations.delete_item),
        ("GET", "/v1/models", models.list_models),
        ("GET", "/v1/models/{id:.+}", models.show_model),
        ("GET", "/models", models.list_models),
        ("GET", "/props", description.props),
        ("GET", "/tokenizer_info", description.tokenizer_info),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("GET", "/livez", health.live),
        ("GET", "/readyz", health.ready),
        ("GET", "/health", health.healthy),
        ("GET", "/ping", health.healthy),
        ("POST", "/ping", health.healthy),
        ("GET", "/version", health.version),
        ("GET", "/load", health.load),
        ("GET", "/metrics", metrics.scrape),
        ("GET", "/openapi.json", documents.openapi),
        ("GET", "/docs", documents.docs),
    ):
        found.add(method, path, handler)
    return found


class _Listener(Protocol):
    def close(self) -> None: ...


class HttpServer:
    """The HTTP endpoint. `start` may be called before a model is loaded; set `served` after loading."""

    def __init__(
        self,
        engine: Engine,
        live: LiveConfig,
        metrics: Metrics,
        keys: Keys,
        offload: Offload,
        store: Store,
        tool_servers: Servers,
    ) -> None:
        self.service = Service(engine, live, metrics, keys, offload, store, tool_servers)
        self._server: web.Server | None = None
        self._connections = Connections(live, metrics)
        self._sockets: list[socket.socket] = []
        self._listeners: list[_Listener] = []
        self._handshakes = Handshakes(metrics)
        self._heart: asyncio.Task[None] | None = None

    @property
    def served(self) -> ServedModel | None:
        return self.service.served

    @served.setter
    def served(self, model: ServedModel) -> None:
        self.service.served = model

    @property
    def keys(self) -> Keys:
        return self.service.keys

    @keys.setter
    def keys(self, keys: Keys) -> None:
        self.service.keys = keys
        self.service.accounts.keep_only(keys)

    async def start(self, sockets: Iterable[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        """Accept connections on `sockets`, which are already bound. The server closes the sockets.

        tls  context of connections at TCP sockets; None: plain HTTP
        """
        loop = asyncio.get_running_loop()
        answer, make = cast("Any", handle), partial(Request, self.service, routes(), loop)
        self._server = web.Server(answer, request_factory=make, handler_cancellation=True, loop=loop)
        self._sockets = list(sockets)
        for listening in self._sockets:
            # Accepted sockets inherit their listener's options.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            if listening.family != socket.AF_UNIX:
                # Bounds the time to send a response's last bytes after the server has closed the connection.
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
        await self._listen(tls)
        self._heart = loop.create_task(self.service.streams.keep_alive(), name="http-keep-alive")

    async def replace_tls(self, tls: ssl.SSLContext | None) -> None:
        """Accept further connections with another context; open connections keep theirs."""
        if self._listeners:
            await self._listen(tls)

    async def _listen(self, tls: ssl.SSLContext | None) -> None:
        made: list[_Listener] = []
        try:
            for bound in self._sockets:
                made.append(await self._listen_at(bound, tls))  # noqa: PERF401 (those made are closed on an error)
        except BaseException:
            for listener in made:
                listener.close()
            raise
        replaced, self._listeners = self._listeners, made
        for listener in replaced:
            listener.close()

    async def _listen_at(self, bound: socket.socket, tls: ssl.SSLContext | None) -> _Listener:
        server, loop, service = self._server, asyncio.get_running_loop(), self.service
        assert server is not None

        def accept() -> Connection:
            return Connection(server, self._connections, service.config.server, service.proxies, service.metrics, loop)

        # A duplicate, because a listener closes its socket, and another context takes another listener.
        if bound.family == socket.AF_UNIX:
            return await loop.create_unix_server(accept, sock=bound.dup(), backlog=BACKLOG)
        if tls is None:
            return await loop.create_server(accept, sock=bound.dup(), backlog=BACKLOG)
        handshake_s = service.config.server.header_timeout_s
        return TlsListener(
            bound.dup(), BACKLOG, lambda client, peer: self._handshakes.begin(client, peer, accept, tls, handshake_s)
        )

    def close_listeners(self) -> None:
        """Accept no more connections; keep open connections."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for bound in self._sockets:
            bound.close()
        self._sockets.clear()

    async def await_first_requests(self) -> None:
        """Wait, up to FIRST_REQUEST_S, for first requests of connections accepted just before the listeners closed."""
        loop = asyncio.get_running_loop()
        late = loop.time() + FIRST_REQUEST_S
        while True:
            await asyncio.sleep(CHECK_S)
            if not self._connections.without_request or loop.time() > late:
                return

    async def close(self) -> None:
        """Close listeners, connections and store. Background responses fail; other requests may take SHUTDOWN_S."""
        self.close_listeners()
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait([self._heart])
        await self.service.background.close()
        await self._handshakes.close()
        if self._server is not None:
            await asyncio.sleep(0)  # requests that have arrived begin to be answered
            self._server.pre_shutdown()
            await self._server.shutdown(SHUTDOWN_S)
        await self.service.tool_servers.close()
        await self.service.store.close()
