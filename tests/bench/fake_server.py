"""A small OpenAI endpoint with known behaviour: a prompt has 10 tokens plus 2 per word.

As a program its argument is a port.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence


class FakeOpenAI:
    """Answers with `max_tokens` text chunks.

    fail  returns, for the number of a streamed request (from 0), how it ends: "" (normally), "refuse", "error", "cut",
          "vanish", "short" (one token less), "reason" (with a finish reason, without [DONE]), "hang" (never),
          "odd" (after an event that is not of OpenAI's shape)
    tokenize  returns the token ids of a text, to which a chat's template adds 7; None: no such route
    metrics   scrapes of /metrics, one after another; empty: no such route
    text      of every chunk
    pause_s   time between two chunks
    """

    def __init__(
        self,
        *,
        usage: bool = True,
        fail: Callable[[int], str] = lambda number: "",
        tokenize: Callable[[str], list[int]] | None = None,
        metrics: Sequence[str] = (),
        text: str = '"content": "x" "usage": {} data: [DONE]',  # contains the generator's search patterns
        pause_s: float = 0.0,
    ) -> None:
        self.usage = usage
        self.fail = fail
        self.tokenizer = tokenize
        self.scrapes = list(metrics)
        self.text = text
        self.pause_s = pause_s
        self.hanging = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []  # of streamed requests
        self.headers: list[dict[str, str]] = []
        self.running = 0
        self.most_running = 0
        self.url = ""

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeOpenAI]:
        app = web.Application()
        app.router.add_get("/health", self.models)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/embeddings", self.embeddings)
        if self.tokenizer is not None:
            app.router.add_post("/tokenize", self.tokenize)
        if self.scrapes:
            app.router.add_get("/metrics", self.metrics)
        runner = web.AppRunner(app, handler_cancellation=True)  # of handlers that hang
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}, {"id": "other"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        assert self.tokenizer is not None
        body = await request.json()
        if "messages" in body:
            return web.json_response({"tokens": [0] * 7 + self.tokenizer(body["messages"][0]["content"])})
        return web.json_response({"tokens": self.tokenizer(body["prompt"])})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.scrapes.pop(0))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self.answer(request, body, body["messages"][0]["content"], chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self.answer(request, body, body["prompt"], chat=False)

    async def embeddings(self, request: web.Request) -> web.Response:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        tokens = sum(10 + 2 * len(text.split()) for text in body["input"])
        await asyncio.sleep(self.pause_s)
        if self.fail(number) == "refuse":
            return web.json_response({"error": {"message": "full", "code": "queue_full"}}, status=429)
        return web.json_response({"data": [], "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    async def answer(
        self, request: web.Request, body: dict[str, Any], prompt: str | list[int], *, chat: bool
    ) -> web.StreamResponse:
        count = body["max_tokens"]
        tokens = len(prompt) if isinstance(prompt, list) else 10 + 2 * len(prompt.split())
        if isinstance(prompt, str) and self.tokenizer is not None:
            tokens = len(self.tokenizer(prompt)) + 7 * chat
        usage = {"prompt_tokens": tokens, "completion_tokens": count}
        if not body.get("stream"):
            return web.json_response({"choices": [], **({"usage": usage} if self.usage else {})})
        fate = self.fail(len(self.bodies))
        if fate == "short":
            count = usage["completion_tokens"] = count - 1
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if fate == "refuse":
            return web.json_response({"error": {"message": "full", "code": "queue_full"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await response.prepare(request)
            if chat:
                await self.send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for _ in range(count):
                text = self.text
                await self.send(response, {"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
                await asyncio.sleep(self.pause_s)
            if fate == "odd":
                await self.send(response, {"choices": [{"text": "x"}, None]})
            if fate == "hang":
                self.hanging.set()
                await asyncio.Event().wait()
            if fate == "error":
                await self.send(response, {"error": {"message": "broke", "type": "internal_error", "code": None}})
            if fate == "vanish":
                assert request.transport is not None
                request.transport.abort()
                return response
            if self.usage:
                await self.send(response, {"choices": [], "usage": usage})
            if fate == "reason":
                await self.send(response, {"choices": [{"delta": {}, "finish_reason": "length"}]})
            elif fate != "cut":
                await response.write(b"data: [DONE]\n\n")
        finally:
            self.running -= 1
        return response

    async def send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")


async def main(port: int) -> None:
    async with FakeOpenAI().serving(port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
