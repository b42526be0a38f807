"""Requests, and the routes that answer them.

aiohttp parses requests and writes responses. Its applications are not used: their router, middlewares and look-ups are
some 60 calls for each request.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from msgspec import Struct

from infd.errors import MethodNotAllowed, UnknownPath, shorten
from infd.http import headers
from infd.http.exchange import Exchange

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Iterator

    from infd.http.formats.base import Errors
    from infd.http.service import Service

    Handler = Callable[["Request"], Awaitable[web.StreamResponse]]

UNKNOWN: Final = "none"  # one label in metrics for all unknown paths, because clients can send any number of them

# A variable of a path: a segment, or what the expression after its name matches.
_VARIABLE: Final = re.compile(r"\{(?P<name>\w+)(?::(?P<expression>[^}]+))?\}")
_SEGMENT: Final = "[^{}/]+"


class Route(Struct, frozen=True):
    """The answer to a method at a path.

    path     as documented, its variables in braces: a label in metrics
    errors   encodes errors in the API's format; None: the request decides
    """

    path: str
    handler: Handler
    errors: Errors | None = None


class Request(web.BaseRequest):
    """One HTTP request.

    exchange   the request's key, ids and ticket; deleted once the request is answered, because aiohttp keeps the last
               request of an idle connection
    route      the route of path and method
    variables  the values of the path's variables
    """

    def __init__(self, service: Service, routes: Routes, loop: asyncio.AbstractEventLoop, *parsed: Any) -> None:
        """parsed: the arguments with which aiohttp makes a request."""
        super().__init__(*(*parsed, loop))
        self.service = service
        self.exchange = Exchange()
        self.route, self.variables = routes.find(self._method, self._rel_url.path_safe)

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        headers.finish(self, response, self.service, self.exchange)


class Routes:
    """The routes by path and method. Every GET also answers HEAD."""

    def __init__(self) -> None:
        self._plain: dict[str, dict[str, Route]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, Route]] = {}
        self._none = Route(UNKNOWN, self._refuse)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Iterate over the methods and paths, without HEAD."""
        for routes in (*self._plain.values(), *self._patterns.values()):
            yield from ((method, route.path) for method, route in routes.items() if method != "HEAD")

    def add(self, method: str, path: str, handler: Handler, errors: Errors | None = None) -> None:
        """Add a route. path: `{name}` matches one segment, `{name:expression}` what the regular expression matches."""
        route = Route(_VARIABLE.sub(r"{\g<name>}", path), handler, errors)
        routes = self._routes_at(path)
        routes[method] = route
        if method == "GET":
            routes["HEAD"] = route

    def _routes_at(self, path: str) -> dict[str, Route]:
        if "{" not in path:
            return self._plain.setdefault(path, {})
        literals = _VARIABLE.split(path)[::3]
        variables = [f"(?P<{each['name']}>{each['expression'] or _SEGMENT})" for each in _VARIABLE.finditer(path)]
        parts = zip(map(re.escape, literals), [*variables, ""], strict=True)
        return self._patterns.setdefault(re.compile("".join(chain.from_iterable(parts))), {})

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """Return the route and the values of the path's variables. Every other path, and method, has a route that
        refuses, so that what is done around routes is done around refusals too.

        path  decoded, but for %2F and %25, so that a variable may contain a slash
        """
        if (routes := self._plain.get(path)) is not None:
            return routes.get(method) or Route(UNKNOWN, self._refuse, next(iter(routes.values())).errors), {}
        for pattern, routes in self._patterns.items():
            if (match := pattern.fullmatch(path)) is not None and (route := routes.get(method)) is not None:
                return route, {name: _decoded(value) for name, value in match.groupdict().items()}
        return self._none, {}

    def methods(self, path: str) -> set[str]:
        """Return the methods with which a path is served."""
        matching = (routes for pattern, routes in self._patterns.items() if pattern.fullmatch(path))
        return set().union(self._plain.get(path, ()), *matching)

    async def _refuse(self, request: Request) -> web.StreamResponse:
        """Raise MethodNotAllowed if the path is served with another method, else UnknownPath."""
        if methods := self.methods(request.rel_url.path_safe):
            raise MethodNotAllowed(request.method, request.path, methods)
        raise UnknownPath(f"there is no {shorten(request.path)} here")


def _decoded(value: str) -> str:
    return value.replace("%2F", "/").replace("%25", "%")
