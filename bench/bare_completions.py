"""A minimal HTTP server around an in-process pipeline, for compare.py.

Answers /v1/completions with one token an event, and supports only `prompt` and `max_tokens`, so that the figures are
the pipeline's. Uses only the standard library, because pipelines run in environments without infd.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {}\r\nConnection: close\r\n\r\n"


@dataclass
class Answer:
    """A request in progress: its prompt and remaining tokens."""

    prompt: str
    tokens: int
    _said: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def say(self, text: str) -> None:
        """Pass on the next token. Callable from any thread."""
        self.tokens -= 1
        self._loop.call_soon_threadsafe(self._said.put_nowait, text)

    async def texts(self, tokens: int) -> AsyncIterator[str]:
        for _ in range(tokens):
            yield await self._said.get()


class Pipeline(Protocol):
    def run(self, asked: SimpleQueue[Answer]) -> None:
        """Process requests forever; runs on its own thread."""

    def prompt_tokens(self, prompt: str) -> int: ...


def serve(pipeline: Pipeline, port: int) -> None:
    asyncio.run(_serve(pipeline, port))


async def _serve(pipeline: Pipeline, port: int) -> None:
    asked: SimpleQueue[Answer] = SimpleQueue()
    threading.Thread(target=pipeline.run, args=(asked,), daemon=True).start()
    server = await asyncio.start_server(
        lambda reader, writer: _respond(pipeline, asked, reader, writer), "127.0.0.1", port, limit=2**20
    )
    await server.serve_forever()


async def _respond(
    pipeline: Pipeline, asked: SimpleQueue[Answer], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    body = json.loads(await reader.readexactly(int(fields.get("content-length", "0"))) or "{}")
    writer.write(HEAD.format("text/event-stream" if body.get("stream") else "application/json").encode())
    if head.startswith("POST"):
        prompt, tokens = body["prompt"], body["max_tokens"]
        answer = Answer(prompt, tokens)
        asked.put(answer)
        if body.get("stream"):
            async for text in answer.texts(tokens):
                writer.write(f"data: {json.dumps(_completion(text, None))}\n\n".encode())
            end = _completion("", "length") | {"usage": _usage(pipeline, prompt, tokens)}
            writer.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
        else:
            text = "".join([text async for text in answer.texts(tokens)])
            completion = _completion(text, "length") | {"usage": _usage(pipeline, prompt, tokens)}
            writer.write(json.dumps(completion).encode())
    else:
        writer.write(json.dumps({"object": "list", "data": [{"id": "pipeline", "object": "model"}]}).encode())
    await writer.drain()
    writer.close()


def _completion(text: str, reason: str | None) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def _usage(pipeline: Pipeline, prompt: str, tokens: int) -> dict[str, int]:
    read = pipeline.prompt_tokens(prompt)
    return {"prompt_tokens": read, "completion_tokens": tokens, "total_tokens": read + tokens}
