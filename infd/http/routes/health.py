"""Liveness, readiness and load: /livez /readyz /health /ping /version /load.

| state    | /livez | /health, /ping | /readyz |
|----------|--------|----------------|---------|
| starting | 200    | 503            | 503     |
| ready    | 200    | 200            | 200     |
| draining, paused, sleeping | 200 | 200 | 503; sleeping: 200 if a request would wake the server |
| failed, or a step is stuck | 503 | 503 | 503 |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.engine.lifecycle.state import State
from infd.http import send
from infd.version import __version__

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.routing import Request

_NOT_LIVE: Final = frozenset({State.FAILED})
_NOT_HEALTHY: Final = frozenset({State.STARTING, State.FAILED})
_NOT_READY: Final = frozenset(State) - {State.READY}


async def live(request: Request) -> web.StreamResponse:
    """Return 503 only if the process must be restarted."""
    return _state(request, _NOT_LIVE)


async def healthy(request: Request) -> web.StreamResponse:
    """Return 503 while the model loads, after a failure of the engine, and while a step is stuck; else 200."""
    return _state(request, _NOT_HEALTHY)


async def ready(request: Request) -> web.StreamResponse:
    """Return 200 if the engine is ready or a request would wake it, else 503. `?verbose` adds the reason and times."""
    wakes = request.service.engine.control.wakes_on_request
    return _state(request, _NOT_READY - {State.SLEEPING} if wakes else _NOT_READY, verbose="verbose" in request.query)


async def version(request: Request) -> web.StreamResponse:
    return send.json(msgspec.json.encode({"version": __version__}))


async def load(request: Request) -> web.StreamResponse:
    """Return the number of running choices, of waiting choices, and of both."""
    status = request.service.engine.status()
    counts = {"server_load": status.running + status.waiting, "running": status.running, "waiting": status.waiting}
    return send.json(msgspec.json.encode(counts))


def _state(request: Request, bad: frozenset[State], *, verbose: bool = False) -> web.StreamResponse:
    engine = request.service.engine
    lifecycle = engine.lifecycle
    body: dict[str, object] = {"state": lifecycle.state.value}
    if verbose:
        body |= {
            "reason": "a step is stuck" if engine.stuck else lifecycle.reason,
            "since": lifecycle.since,
            "last_step_age_s": engine.status().last_step_age_s,
        }
    return send.json(msgspec.json.encode(body), status=503 if engine.stuck or lifecycle.state in bad else 200)
