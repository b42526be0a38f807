"""Cross-origin requests (CORS): tell browsers which origins' pages may send requests here and read the responses.

Only browsers enforce CORS; CORS protects browsers' users, not the server.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from aiohttp import web

from infd.errors import OriginNotAllowed
from infd.http.rates import UNITS

if TYPE_CHECKING:
    from infd.config import LiveConfig

ANY: Final = "*"
LOCALHOST: Final = "localhost"
_LOCAL: Final = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
MAX_AGE_S: Final = 7200  # the maximum that every browser supports
READABLE: Final = ", ".join(
    (
        "X-Request-Id",
        "Retry-After",
        *(f"x-ratelimit-{kind}-{unit}" for unit in UNITS for kind in ("limit", "remaining", "reset")),
        *(f"anthropic-ratelimit-{unit}-{kind}" for unit in UNITS for kind in ("limit", "remaining", "reset")),
    )
)


class Origins:
    """The origins that the settings allow: exact origins, those of this machine, or all."""

    def __init__(self, live: LiveConfig) -> None:
        self._live = live

    @property
    def _allowed(self) -> tuple[str, ...]:
        return self._live.now.server.cors_origins

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """Return the response to a preflight request; None for other requests. Raises OriginNotAllowed.

        A preflight request needs no API key, because browsers send preflight requests without credentials.
        """
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        if (origin := request.headers.get("Origin")) is None:
            return None
        if not self._allows(origin):
            raise OriginNotAllowed(origin)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        # The response repeats the requested names, because to browsers `*` would exclude Authorization.
        if asked := request.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=headers)

    def set_headers(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Set the CORS headers that allow the requesting page to read the response, if its origin is allowed."""
        if not self._allowed:
            return
        if ANY in self._allowed:
            response.headers["Access-Control-Allow-Origin"] = ANY
        else:
            response.headers.add("Vary", "Origin")  # a cache must not reuse the response for another origin
            origin = request.headers.get("Origin")
            if not self._allows(origin):
                return
            response.headers["Access-Control-Allow-Origin"] = str(origin)
        response.headers["Access-Control-Expose-Headers"] = READABLE

    def _allows(self, origin: str | None) -> bool:
        if origin is None:
            return False
        allowed = self._allowed
        return ANY in allowed or origin in allowed or (LOCALHOST in allowed and _LOCAL.fullmatch(origin) is not None)
