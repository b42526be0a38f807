"""A minimal streaming server, aiohttp and uvloop only: the lower bound of a streaming server's cost.

GET /stream?bytes=N writes a chunk of N bytes on every tick until the client disconnects. All streams wake on the same
tick, as an inference server's streams do at the end of a step.

    python bench/bare_sse.py PORT TICK_MS
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from aiohttp import web


class Ticker:
    """Wakes all waiting tasks, once per tick."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._waiters: list[asyncio.Future[None]] = []

    def wait(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


async def serve(port: int, tick_s: float) -> None:
    ticker = Ticker(tick_s)

    async def stream(request: web.Request) -> web.StreamResponse:
        event = b"data: " + b"x" * (int(request.query["bytes"]) - 8) + b"\n\n"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await ticker.wait()
            await response.write(event)

    async def ready(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/stream", stream)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await ticker.run()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
