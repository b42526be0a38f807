"""The admin door: HTTP/1.1 over a Unix socket, so that curl works as well as `infdctl`.

It decides who may ask and how refusals look; what can be asked stands in commands.py.
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
from infd.admin.commands import FEEDS, VERBS, Desk, Feed, Refused, Verb
from infd.admin.feed import Feeds
from infd.admin.peers import ADMINS, READERS, Access, HasOptions, Peer, peer_of
from infd.sockets.unix import UnixListener

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from aiohttp.typedefs import Handler

    from infd.config import Config
    from infd.engine.engine import Engine

log = logging.getLogger("infd.admin")

_LARGEST_BODY = 64 * 2**10
_ELSEWHERE = "elsewhere"
_CONTINUE = "100-continue"


class AdminServer:
    """Answers operators.

    model        the name to report; by default the model's path
    lora_root    the directory that holds what may be loaded as an adapter; empty: nothing may
    drain        do what TERM does, without waiting for the end of it
    access       who may ask; by default this process's owner, root and infd's groups
    apart        which of the checkpoint's texts run in a process of their own, and why
    identify     reads a connection's credentials; a test may claim to be somebody else
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        *,
        model: str = "",
        lora_root: str = "",
        drain: Callable[[], None],
        access: Access | None = None,
        apart: Mapping[str, str] | None = None,
        identify: Callable[[HasOptions], Peer] = peer_of,
    ) -> None:
        self._desk = Desk(engine, model or config.model.path, drain, lora_root, {} if apart is None else apart)
        self._access = access if access is not None else Access.of_this_process()
        self._identify = identify
        self._listener: UnixListener | None = None
        self._server: asyncio.AbstractServer | None = None
        self._runner: web.AppRunner | None = None
        self._connections: dict[connection.Connection, None] = {}
        self._feeds = Feeds()

    async def start(self, path: str | Path, *, private: bool = False) -> None:
        """Listen on `path`, in a directory that is this user's alone if `private`.

        Raises SocketTaken, or ConfigError if it cannot be made.
        """
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[_keep, _answer_problems, _refuse_browsers])
        for verb in VERBS:
            app.router.add_route(verb.method, verb.path, partial(self._serve, verb), expect_handler=_expected)
        for feed in FEEDS:
            app.router.add_route(feed.method, feed.path, partial(self._feed, feed), expect_handler=_expected)
        app.router.add_route("*", "/{elsewhere:.*}", _nothing, name=_ELSEWHERE, expect_handler=_expected)
        self._listener = UnixListener(path, group=self._access.readers, private=private)
        # A mutation once begun is finished even if the asker leaves: no handler_cancellation here.
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: connection.Connection(server, self._connections, loop), sock=self._listener.socket
        )

    async def close(self) -> None:
        """Stop listening, let answers under way finish, remove the socket. Idempotent."""
        self._desk.engine.events.close()
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
            return reply(await verb.handler(self._desk, await _asked(verb, request)))
        result, told = "failed", "{}"
        try:
            self._require_access(peer, verb)
            asked = await _asked(verb, request)
            told = msgspec.json.encode(asked).decode()
            answer = await verb.handler(self._desk, asked)
            result = "done"
        except Refused as refusal:
            result = refusal.code
            raise
        finally:
            done = {"uid": peer.uid, "pid": peer.pid, "result": result, "asked": told}
            extra = {"verb": verb.name, **done, "path": request.rel_url.raw_path}
            log.info("asked to %s", verb.name, extra=extra)
            self._desk.engine.events.tell("verb", verb.name, **done)
        return reply(answer)

    async def _feed(self, feed: Feed, request: web.Request) -> web.StreamResponse:
        self._require_access(self._peer(request), feed)
        return await self._feeds.send(request, feed.handler(self._desk, await _asked(feed, request)))

    def _peer(self, request: web.Request) -> Peer:
        """Return who asks. Raises Refused."""
        asking = request.get_extra_info("socket")
        if asking is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "gone", "the asker left before the kernel could say who it was")
        return self._identify(asking)

    def _require_access(self, peer: Peer, verb: Verb | Feed) -> None:
        if not self._access.allows(peer, mutation=verb.mutates):
            group = ADMINS if verb.mutates else READERS
            raise Refused(
                HTTPStatus.FORBIDDEN,
                "forbidden",
                f"{verb.name} is for the daemon's owner, root and group {group}, and uid {peer.uid} is none of these;"
                f" use sudo, or join the group (`usermod -aG {group} USER`) and log in again",
            )


async def _asked(verb: Verb | Feed, request: web.Request) -> msgspec.Struct:
    """Return what a verb is told, in its body or in the query. Raises Refused."""
    try:
        fields = msgspec.json.decode(await request.read() or b"{}", type=dict[str, Any])
        told = {**fields, **request.query, **request.match_info}
        return msgspec.convert(told, verb.asks, strict=not request.query)  # a query has words only
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        known = ", ".join(field for field in verb.asks.__struct_fields__ if field not in request.match_info)
        takes = f"takes a JSON object of {known}, or them in the query" if known else "takes nothing"
        raise Refused(HTTPStatus.BAD_REQUEST, "bad_request", f"{verb.name} {takes}: {error}") from None


async def _nothing(request: web.Request) -> web.Response:
    """Tell a wrong method from an unknown path: a route like the others, so that it refuses like them."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        if resource.name != _ELSEWHERE:
            methods |= (await resource.resolve(request))[1]
    raise web.HTTPMethodNotAllowed(request.method, methods) if methods else web.HTTPNotFound


async def _expected(request: web.Request) -> web.Response | None:
    """Meet what an Expect header asks, or refuse it. HTTP/1.0 has none."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() != _CONTINUE:
        return problem(417, "unknown_expectation", f"the only expectation known here is {_CONTINUE}")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer has been sent
    return None


@web.middleware
async def _keep(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let no connection be closed for idleness while it is answered."""
    asking = connection.of(request)
    asking.asked()
    try:
        return await handler(request)
    finally:
        asking.busy = False


@web.middleware
async def _answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let every refusal leave as a problem document."""
    try:
        return await handler(request)
    except Refused as refusal:
        return problem(refusal.status, refusal.code, str(refusal))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return problem(error.status, "wrong_method", f"{request.path} is asked with {allowed}", {"Allow": allowed})
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
    # Only a browser sends Origin: a page that found a proxy to this socket must not command the daemon.
    if "Origin" in request.headers:
        raise Refused(HTTPStatus.FORBIDDEN, "origin", "requests with an Origin header are refused; use infdctl or curl")
    return await handler(request)
