"""OpenVINO's continuous batching behind as little HTTP as there can be, so that compare.py can take turns with it.

Needs `openvino-genai` and nothing else: it runs in an environment without infd. It answers /v1/completions, streamed
with one token an event, and knows `prompt`, `max_tokens` and nothing further: what is measured is the pipeline.

    python bench/openvino_server.py MODEL.gguf --port 8000 --cache-gib 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import openvino_genai

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {}\r\nConnection: close\r\n\r\n"


@dataclass
class Answer:
    """One that is being computed: where its tokens go, and how many are still to come."""

    tokens: int
    out: asyncio.Queue[str | None]
    loop: asyncio.AbstractEventLoop
    handle: Any = None

    def put(self, text: str | None) -> None:
        self.loop.call_soon_threadsafe(self.out.put_nowait, text)


class Pipeline:
    """Steps on a thread of its own while anything is asked for."""

    def __init__(self, model: Path, cache_gib: int, streams: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.max_num_seqs = streams
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._asked: SimpleQueue[tuple[str, Answer]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def ask(self, prompt: str, tokens: int) -> AsyncIterator[str]:
        """Yield the tokens of an answer, as texts."""
        answer = Answer(tokens, asyncio.Queue(), asyncio.get_running_loop())
        self._asked.put((prompt, answer))
        while (text := await answer.out.get()) is not None:
            yield text

    def usage(self, asked: dict[str, Any]) -> dict[str, int]:
        prompt, tokens = self._tokenizer.encode(asked["prompt"]).input_ids.shape[1], asked["max_tokens"]
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _run(self) -> None:
        numbers = count()
        running: list[Answer] = []
        while True:
            while not running or not self._asked.empty():
                prompt, answer = self._asked.get()
                settings = openvino_genai.GenerationConfig(
                    max_new_tokens=answer.tokens, ignore_eos=True, do_sample=False
                )
                answer.handle = self._pipeline.add_request(next(numbers), prompt, settings)
                running.append(answer)
            self._pipeline.step()
            for answer in running:
                while answer.tokens and answer.handle.can_read():
                    for output in answer.handle.read().values():
                        for token in output.generated_ids:
                            answer.put(self._tokenizer.decode([token]))
                            answer.tokens -= 1
                if not answer.tokens:
                    answer.put(None)
            running = [answer for answer in running if answer.tokens]


async def respond(pipeline: Pipeline, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    asked = json.loads(await reader.readexactly(int(fields.get("content-length", "0"))) or "{}")
    writer.write(HEAD.format("text/event-stream" if asked.get("stream") else "application/json").encode())
    if not head.startswith("POST"):
        writer.write(json.dumps({"object": "list", "data": [{"id": "openvino", "object": "model"}]}).encode())
    elif asked.get("stream"):
        async for text in pipeline.ask(asked["prompt"], asked["max_tokens"]):
            writer.write(f"data: {json.dumps(completion(text, None))}\n\n".encode())
        end = completion("", "length") | {"usage": pipeline.usage(asked)}
        writer.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
    else:
        text = "".join([text async for text in pipeline.ask(asked["prompt"], asked["max_tokens"])])
        writer.write(json.dumps(completion(text, "length") | {"usage": pipeline.usage(asked)}).encode())
    await writer.drain()
    writer.close()


def completion(text: str, reason: str | None) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    arguments = parser.parse_args()
    pipeline = Pipeline(arguments.model, arguments.cache_gib, arguments.streams)
    server = await asyncio.start_server(
        lambda reader, writer: respond(pipeline, reader, writer), "127.0.0.1", arguments.port, limit=2**20
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
