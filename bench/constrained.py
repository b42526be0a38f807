"""Compare constrained with unconstrained answers of one server: token rate, and time to the first token.

    python bench/random_checkpoint.py 0.6b DIR
    python bench/constrained.py DIR --streams 8 32 --pairs 5

Token rates are compared in pairs, one after the other: some streams that each ask again as soon as an answer ends, for
a fixed time. A constrained stream's schemas are ten of tests/grammar's real-world schemas of 0.2 to 8 KB. Their answers
end early; the unconstrained stream of a pair repeats their lengths, so that both have as many prompts per token. The
first token is timed for one stream: unconstrained, with a schema that the server has compiled, and with a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import lzma
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.server_process import ServerProcess, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMAS = Path(__file__).parents[1] / "tests" / "grammar" / "schemas.json.xz"
SMALLEST, LARGEST = 200, 8192  # bytes
PROMPT_TOKENS = 64
FIRST, VOCABULARY = 256, 32_000  # ids of prompts
Body = dict[str, Any]
Turn = tuple[Any, int]  # a schema or None, and the most tokens of an answer


def candidates() -> list[dict[str, Any]]:
    """Return the real-world schemas between SMALLEST and LARGEST bytes, by size."""
    found = [each for each in json.loads(lzma.decompress(SCHEMAS.read_bytes())) if SMALLEST <= each["bytes"] <= LARGEST]
    return [each["schema"] for each in sorted(found, key=lambda each: each["bytes"])]


class Client:
    """Sends requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._random = random.Random(1)  # noqa: S311 - prompts, not secrets

    def body(self, schema: Any, **fields: Any) -> Body:
        prompt = [self._random.randrange(FIRST, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        constraint = {} if schema is None else {"structured_outputs": {"json": schema}}
        return {"prompt": prompt, "temperature": 0, "stream": True, "return_token_ids": True, **constraint, **fields}

    async def events(self, body: Body) -> Any:
        """Yield the number of tokens of each event. Raises RuntimeError for an answer that is not 200."""
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    yield len(choice["token_ids"])

    async def accepted(self, schemas: list[Any], count: int) -> list[Any]:
        """Return `count` schemas of evenly spread sizes that the server accepts."""
        chosen: list[Any] = []
        for share in range(count):
            for schema in schemas[share * len(schemas) // count :]:
                try:
                    async for _ in self.events(self.body(schema, max_tokens=1)):
                        pass
                except RuntimeError:
                    continue
                chosen.append(schema)
                break
        return chosen

    async def rate(self, turns: list[Iterator[Turn]], seconds: float) -> tuple[float, list[list[int]]]:
        """Return tokens a second, from the time when every stream has its first token, and the lengths of answers.

        turns  of each stream
        """
        started: set[int] = set()
        begun = until = 0.0
        counted = 0
        lengths: list[list[int]] = [[] for _ in turns]

        async def stream(number: int) -> None:
            nonlocal begun, until, counted
            for schema, tokens in turns[number]:
                length = 0
                async for count in self.events(self.body(schema, max_tokens=tokens, ignore_eos=schema is None)):
                    now = time.perf_counter()
                    length += count
                    started.add(number)
                    if not until and len(started) == len(turns):
                        begun, until = now, now + seconds
                    if until and now >= until:
                        return
                    if until:
                        counted += count
                lengths[number].append(length)

        async with asyncio.TaskGroup() as group:
            for number in range(len(turns)):
                group.create_task(stream(number))
        return counted / (until - begun), lengths

    async def first_token_ms(self, schema: Any) -> float:
        begun, took = time.perf_counter(), 0.0
        async for _ in self.events(self.body(schema, max_tokens=2)):
            took = took or time.perf_counter() - begun
        return took * 1e3


async def measure(client: Client, arguments: argparse.Namespace) -> None:
    schemas = await client.accepted(candidates(), 10)
    print("schemas of", [len(json.dumps(schema)) for schema in schemas], "bytes")
    for streams in arguments.streams:
        ratios = []
        for _ in range(arguments.pairs):
            limited = [(schema, arguments.tokens) for schema in schemas]
            bound, lengths = await client.rate(
                [itertools.cycle(limited[n % 10 :] + limited[: n % 10]) for n in range(streams)], arguments.seconds
            )
            free, _ = await client.rate(
                [((None, n) for n in itertools.chain(own, itertools.repeat(arguments.tokens))) for own in lengths],
                arguments.seconds,
            )
            ratios.append(bound / free)
            print(f"{streams} streams: {bound:.1f} constrained, {free:.1f} unconstrained tokens/s: {bound / free:.3f}")
        print(f"{streams} streams: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    (schema,) = sorted(schemas, key=lambda schema: abs(len(json.dumps(schema)) - 2048))[:1]
    times: dict[str, list[float]] = {"unconstrained": [], "cached": [], "new": []}
    for number in range(arguments.first_tokens):
        times["unconstrained"].append(await client.first_token_ms(None))
        times["cached"].append(await client.first_token_ms(schema))
        times["new"].append(await client.first_token_ms({**schema, "$comment": f"new {number}"}))
    print(f"first token, schema of {len(json.dumps(schema))} bytes, medians of {arguments.first_tokens}:")
    for kind, values in times.items():
        print(f"  {kind:13} {statistics.median(values):7.1f} ms ({min(values):.1f} to {max(values):.1f})")


async def main(arguments: argparse.Namespace) -> None:
    port = free_port()
    command = [sys.executable, "-m", "infd", "start", "--model", str(arguments.checkpoint), "--port", str(port)]
    command += ["--log-level", "warning"]
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        ServerProcess("infd", command, port, start_s=600.0) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
    ):
        await measure(Client(session, server.url), arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one measurement")
    parser.add_argument("--first-tokens", type=int, default=30)
    uvloop.run(main(parser.parse_args()))
