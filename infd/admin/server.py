"""The admin server: HTTP/1.1 over a Unix socket, for `infdctl` and curl.

Authorizes peers, decodes arguments and encodes refusals; commands.py defines the verbs.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11

from infd.admin import connection
from infd.admin.answers import problem, reply
from infd.admin.commands import FEEDS, VERBS, AdminContext, Feed, Refused, Verb
from infd.admin.feed import Feeds
from infd.admin.peers import ADMINS, READERS, Access, HasOptions, Peer, peer_of
from infd.sockets.unix import UnixListener

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aiohttp.typedefs import Handler


log = logging.getLogger("infd.admin")

_LARGEST_BODY = 64 * 2**10
_UNKNOWN = "elsewhere"
_CONTINUE = "100-continue"


class AdminServer:
    """The server of the admin verbs and feeds.

    connections  all open connections, oldest first
    feeds        sends feeds, and counts their subscribers
    """

    def __init__(
        self,
        context: AdminContext,
        *,
        access: Access | None = None,
        identify: Callable[[HasOptions], Peer] = peer_of,
    ) -> None:
        """Create the server without listening; see `start`.

        access    permitted users and groups; None: root, this process's user, and the groups infd and infd-admin
        identify  reads a connection's credentials; tests substitute another user's
        """
        self.connections: dict[connection.Connection, None] = {}
        self.feeds = Feeds()
        self._context = context
        self._access = access if access is not None else Access.of_this_process()
        self._identify = identify
        self._listener: UnixListener | None = None
        self._server: asyncio.AbstractServer | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, path: str | Path, *, private: bool = False, make_directory: bool = True) -> None:
        """Listen on `path`; `private` and `make_directory` are those of UnixListener.

        Raises SocketTaken, or ConfigError if the socket cannot be bound.
        """
        app = web.Application(
            client_max_size=_LARGEST_BODY, middlewares=[_mark_busy, _answer_problems, _refuse_browsers]
        )
        for verb in VERBS:
            app.router.add_route(verb.method, verb.path, partial(self._serve, verb), expect_handler=_answer_expectation)
        for feed in FEEDS:
            app.router.add_route(feed.method, feed.path, partial(self._feed, feed), expect_handler=_answer_expectation)
        app.router.add_route("*", "/{elsewhere:.*}", _refuse_unknown, name=_UNKNOWN, expect_handler=_answer_expectation)
        self._listener = UnixListener(path, group=self._access.readers, private=private, make_directory=make_directory)
        # No handler_cancellation: a mutation is finished even if its client disconnects.
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: connection.Connection(server, self.connections, loop), sock=self._listener.socket
        )

    async def close(self) -> None:
        """Stop listening, end feeds, finish other answers (at most a second), remove the socket. Idempotent."""
        self._context.engine.events.close()
        self._context.logs.end()
        self._context.closing.set()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _serve(self, verb: Verb, request: web.Request) -> web.Response:
        peer = self._peer(request)
        if not verb.mutates:
            self._require_access(peer, verb)
            return reply(await verb.handler(self._context, await _arguments(verb, request)))
        result, asked = "failed", "{}"
        try:
            self._require_access(peer, verb)
            arguments = await _arguments(verb, request)
            asked = msgspec.json.encode(arguments).decode()
            answer = await verb.handler(self._context, arguments)
            result = "done"
        except Refused as refusal:
            result = refusal.code
            raise
        finally:
            done = {"uid": peer.uid, "pid": peer.pid, "result": result, "asked": asked}
            extra = {"verb": verb.name, **done, "path": request.rel_url.raw_path}
            log.info("admin verb %s", verb.name, extra=extra)
            self._context.engine.events.publish("verb", verb.name, **done)
        return reply(answer)

    async def _feed(self, feed: Feed, request: web.Request) -> web.StreamResponse:
        self._require_access(self._peer(request), feed)
        return await self.feeds.send(request, feed.handler(self._context, await _arguments(feed, request)))

    def _peer(self, request: web.Request) -> Peer:
        """Return the peer's credentials. Raises Refused if the peer has disconnected."""
        client = request.get_extra_info("socket")
        if client is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "gone", "the client disconnected before its credentials were read")
        return self._identify(client)

    def _require_access(self, peer: Peer, verb: Verb | Feed) -> None:
        if not self._access.allows(peer, mutation=verb.mutates):
            group = ADMINS if verb.mutates else READERS
            raise Refused(
                HTTPStatus.FORBIDDEN,
                "forbidden",
                f"{verb.name} is for the daemon's owner, root and group {group}, and uid {peer.uid} is none of these;"
                f" use sudo, or join the group (`usermod -aG {group} USER`) and log in again",
            )


async def _arguments(verb: Verb | Feed, request: web.Request) -> msgspec.Struct:
    """Decode the arguments of a verb or feed from JSON body, query and path. Raises Refused."""
    try:
        fields = msgspec.json.decode(await request.read() or b"{}", type=dict[str, Any])
        merged = {**fields, **request.query, **request.match_info}
        return msgspec.convert(merged, verb.arguments, strict=not request.query)  # query values are strings
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        known = ", ".join(field for field in verb.arguments.__struct_fields__ if field not in request.match_info)
        takes = f"takes a JSON object of {known}, or them in the query" if known else "takes nothing"
        raise Refused(HTTPStatus.BAD_REQUEST, "bad_request", f"{verb.name} {takes}: {error}") from None


async def _refuse_unknown(request: web.Request) -> web.Response:
    """Refuse with 405 or 404. As this is a route, the middlewares apply to unknown paths too."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        if resource.name != _UNKNOWN:
            methods |= (await resource.resolve(request))[1]
    raise web.HTTPMethodNotAllowed(request.method, methods) if methods else web.HTTPNotFound


async def _answer_expectation(request: web.Request) -> web.Response | None:
    """Answer an Expect header: 100 Continue, or 417. HTTP/1.0 does not define Expect."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() != _CONTINUE:
        return problem(417, "unknown_expectation", f"the only expectation known here is {_CONTINUE}")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # `100 Continue` is not part of the response
    return None


@web.middleware
async def _mark_busy(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Mark the connection busy while its request is answered, so that the connection is not dropped as idle."""
    client = connection.of(request)
    client.request_begun()
    try:
        return await handler(request)
    finally:
        client.busy = False


@web.middleware
async def _answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every refusal and error into a problem document."""
    try:
        return await handler(request)
    except Refused as refusal:
        return problem(refusal.status, refusal.code, str(refusal))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return problem(error.status, "wrong_method", f"{request.path} takes {allowed}", {"Allow": allowed})
    except web.HTTPNotFound as error:
        known = ", ".join(f"{verb.method} {verb.path}" for verb in (*VERBS, *FEEDS))
        return problem(error.status, "unknown_path", f"nothing is at {request.path}; there is {known}")
    except web.HTTPException as error:
        return problem(error.status, "bad_request", error.text or error.reason)
    except Exception:
        log.exception("an answer failed", extra={"method": request.method, "path": request.rel_url.raw_path})
        return problem(500, "internal_error", "this is a bug in infd; its log has the traceback")


@web.middleware
async def _refuse_browsers(request: web.Request, handler: Handler) -> web.StreamResponse:
    # Only browsers send Origin; a web page that reaches a proxy to this socket must not command the daemon.
    if "Origin" in request.headers:
        raise Refused(HTTPStatus.FORBIDDEN, "origin", "requests with an Origin header are refused; use infdctl or curl")
    return await handler(request)
