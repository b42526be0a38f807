"""Cross-origin requests: which pages a browser lets send requests here and read the answers.

Only browsers obey this: it protects their users, not the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Iterable

ANY: Final = "*"
MAX_AGE_S: Final = 7200  # the longest that every browser honours
READABLE: Final = "X-Request-Id, Retry-After"


class Origins:
    """The origins allowed by the settings: exact ones, or any."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)

    def preflight(self, request: web.Request) -> web.Response | None:
        """Answer a preflight request; None for other requests and for origins that are not allowed.

        A preflight carries no key, because browsers send none with it.
        """
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or method is None or not self._allows(request.headers.get("Origin")):
            return None
        headers = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        # Named one by one: for browsers `*` does not mean Authorization.
        if asked := request.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=headers)

    def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page behind a request read its answer, if it may."""
        if not self._allowed:
            return
        if ANY in self._allowed:
            response.headers["Access-Control-Allow-Origin"] = ANY
        else:
            response.headers.add("Vary", "Origin")  # a cache must not give one page's permission to another
            origin = request.headers.get("Origin")
            if not self._allows(origin):
                return
            response.headers["Access-Control-Allow-Origin"] = str(origin)
        response.headers["Access-Control-Expose-Headers"] = READABLE

    def _allows(self, origin: str | None) -> bool:
        return origin is not None and (ANY in self._allowed or origin in self._allowed)
