"""Every path, and every method, that no other route has.

A route like the others, so that the middlewares surround it, whatever the request's headers ask.
"""

from __future__ import annotations

from typing import Final, NoReturn

from aiohttp import web

PATH: Final = "/{elsewhere:.*}"
NAME: Final = "none"  # clients choose these paths: metrics know them all by this one word


async def nothing(request: web.Request) -> NoReturn:
    """Tell a wrong method from an unknown path."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        if resource.name != NAME:
            methods |= (await resource.resolve(request))[1]
    raise web.HTTPMethodNotAllowed(request.method, methods) if methods else web.HTTPNotFound
