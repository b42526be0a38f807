"""Read many completions at once, and report the token rate while all of them decode.

    python bench/streams.py URL --batch 32 --prompt 768 --tokens 512 --vocabulary 151936

A separate program, so that it can run on its own cores. Prompts are random token ids, so that they share no pages.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

import aiohttp
import uvloop

FIRST = 256  # tokens below are bytes


class Stream:
    """One answer: arrival times of its events, and number of tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens = 0

    async def read(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                if b'"usage":{' in line.replace(b" ", b""):
                    usage = json.loads(line[6:])["usage"]
                    if usage is not None:
                        self.tokens = usage["completion_tokens"]
                        continue
                self.times.append(time.perf_counter())


async def measure(arguments: argparse.Namespace) -> dict[str, float]:
    chance = random.Random(arguments.seed)  # noqa: S311 - prompts, not secrets
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        async with session.get(f"{arguments.url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        streams = [Stream() for _ in range(arguments.batch)]
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                body = {
                    "model": model,
                    "prompt": [chance.randrange(FIRST, arguments.vocabulary - 3) for _ in range(arguments.prompt)],
                    "max_tokens": arguments.tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                group.create_task(stream.read(session, arguments.url, body))
    told = {stream.tokens for stream in streams}
    if told != {arguments.tokens}:
        raise RuntimeError(f"asked for {arguments.tokens} tokens each, got {sorted(told)}")
    first, last = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    events = sum(len(stream.times) for stream in streams)
    within = sum(first < at <= last for stream in streams for at in stream.times)
    tokens_an_event = arguments.tokens * arguments.batch / events
    return {
        "tokens_s": within * tokens_an_event / (last - first),
        "window_s": last - first,
        "tokens_an_event": tokens_an_event,
        "first_s": first - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(arguments))))


if __name__ == "__main__":
    main()
