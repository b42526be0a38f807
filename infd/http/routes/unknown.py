"""Every path and method that no other route serves.

This is a route too, so that the middlewares surround it, whatever the request's headers say.
"""

from __future__ import annotations

from typing import Final, NoReturn

from aiohttp import web

PATH: Final = "/{path:.*}"
NAME: Final = "none"  # clients choose these paths: metrics know them all by this one word


async def refuse(request: web.Request) -> NoReturn:
    """Raise HTTPMethodNotAllowed if another method of the path is served, else HTTPNotFound."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        if resource.name != NAME:
            methods |= (await resource.resolve(request))[1]
    raise web.HTTPMethodNotAllowed(request.method, methods) if methods else web.HTTPNotFound
