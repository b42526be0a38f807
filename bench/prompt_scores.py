"""Measure a large answer of log-probabilities: memory, and the delay of probes meanwhile.

    python bench/prompt_scores.py                     one prompt of 2,030 ids, n 128, 20 log-probabilities a token
    python bench/prompt_scores.py --choices 8 --stream --echo
    python bench/prompt_scores.py --ids 10 --generated 500    log-probabilities of generated tokens instead

Starts a daemon with the embedded model. One client reads and discards the answer; another
requests /readyz every 10 ms.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import click
import uvloop
from server_process import ServerProcess, free_port

PROBE_S = 0.01


async def measure(said: dict[str, Any], path: str, device: str, settings: tuple[str, ...]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "infd", "start", "--device", device, "--port", str(port), "--log-level", "warning"]
    for setting in settings:
        command += ["--set", setting]
    async with (
        ServerProcess("infd", command, port) as server,
        aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(600)) as session,
    ):
        await _read(session, path, {**said, "n": 1})  # warm-up
        before = _resident(server, "VmRSS")
        cpu = server.cpu_s()
        probing = asyncio.create_task(_probe(session))
        started = time.perf_counter()
        status, received = await _read(session, path, said)
        took = time.perf_counter() - started
        probing.cancel()
        waits = await probing or [0.0]
        click.echo(
            f"{status}  {received / 1e6:.1f} MB in {took:.2f} s, {server.cpu_s() - cpu:.2f} s of CPU;"
            f" resident {before / 2**20:.0f} MiB, at most {_resident(server, 'VmHWM') / 2**20:.0f} MiB;"
            f" /readyz at most {1000 * max(waits):.0f} ms, median {1000 * sorted(waits)[len(waits) // 2]:.1f} ms"
            f" of {len(waits)}"
        )


async def _read(session: aiohttp.ClientSession, path: str, said: dict[str, Any]) -> tuple[int, int]:
    received = 0
    async with session.post(path, json=said) as response:
        async for chunk in response.content.iter_any():
            received += len(chunk)
            if response.status != 200:
                click.echo(chunk.decode())
        return response.status, received


async def _probe(session: aiohttp.ClientSession) -> list[float]:
    waits: list[float] = []
    try:
        while True:
            started = time.perf_counter()
            async with session.get("/readyz") as response:
                await response.read()
            waits.append(time.perf_counter() - started)
            await asyncio.sleep(PROBE_S)
    except asyncio.CancelledError:
        return waits


def _resident(server: ServerProcess, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--ids", default=2030, show_default=True, help="tokens of the prompt")
@click.option("--choices", default=128, show_default=True, help="n")
@click.option("--likely", default=20, show_default=True, help="log-probabilities a token")
@click.option("--stream", is_flag=True)
@click.option("--echo", is_flag=True, help="echo with logprobs instead of prompt_logprobs")
@click.option("--generated", type=int, help="tokens of each choice, with logprobs instead of prompt_logprobs")
@click.option("--chat", is_flag=True)
@click.option("--device", default="cpu", show_default=True, help="as in infd start")
@click.option("--set", "settings", multiple=True, help="of the daemon, as in infd start")
def main(
    ids: int,
    choices: int,
    likely: int,
    stream: bool,
    echo: bool,
    generated: int | None,
    chat: bool,
    device: str,
    settings: tuple[str, ...],
) -> None:
    said: dict[str, Any] = {"n": choices, "max_tokens": generated or 2, "stream": stream, "temperature": 1}
    if generated:
        said |= {"logprobs": True, "top_logprobs": likely} if chat else {"logprobs": likely}
        said["ignore_eos"] = True
    elif echo:
        said |= {"echo": True, "logprobs": likely}
    else:
        said["prompt_logprobs"] = likely
    if chat:
        said["messages"] = [{"role": "user", "content": "a " * (ids // 2)}]
    else:
        said["prompt"] = [300 + i % 200 for i in range(ids)]
    path = "/v1/chat/completions" if chat else "/v1/completions"
    uvloop.run(measure(said, path, device, settings))


if __name__ == "__main__":
    main()
