"""The catch-all route: refuse paths and methods that no other route serves.

Because unknown paths have a route, all middlewares apply to them too.
"""

from __future__ import annotations

from typing import Final, NoReturn

from aiohttp import web

PATH: Final = "/{path:.*}"
NAME: Final = "none"  # one label in metrics for all unknown paths, because clients can send any number of them


async def refuse(request: web.Request) -> NoReturn:
    """Raise HTTPMethodNotAllowed if the path is served with another method, else HTTPNotFound."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        if resource.name != NAME:
            methods |= (await resource.resolve(request))[1]
    raise web.HTTPMethodNotAllowed(request.method, methods) if methods else web.HTTPNotFound
