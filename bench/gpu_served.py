"""`served` of bench/gpu.py: `infd start` over HTTP, and transformers' continuous batching.

Both read a checkpoint with the bare engine's random weights. Rates cover the time in which all sequences decode, so
they exclude prompts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from random_checkpoint import vocabulary
from safetensors.torch import save_file
from server_process import ServerProcess, free_port
from streams import FIRST
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from infd.admin import protocol
from infd.admin.ctl.client import AdminClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from infd.models.base import Model

SHARD_BYTES = 4 * 2**30
START_S = 300.0
CAPTURE_S = 120.0  # longest time for an idle server to capture all sizes of steps
FEW = 16  # tokens per answer of warm-up runs
BLOCK = 256  # tokens of transformers' pages, its default
SPECIAL = 3  # tokens at the end of the vocabulary


class Asked(NamedTuple):
    """Lengths of each sequence in a batch: random prompt tokens, then generated tokens."""

    prompt: int
    tokens: int


class Cores(NamedTuple):
    """Cores of server and client; on a single-core machine both share it."""

    server: list[int]
    reader: list[int]

    @classmethod
    def here(cls) -> Cores:
        cores = sorted(os.sched_getaffinity(0))
        most = max(1, len(cores) // 4)
        return cls(cores[:-most] or cores, cores[-most:])


def weight(name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the values of one tensor, deterministic on a device.

    Greedy sampling never yields a special token: ordinary tokens have logits above 0.
    """
    numbers = torch.randn(
        *shape, generator=torch.Generator(device).manual_seed(zlib.crc32(name.encode())), device=device
    )
    if len(shape) == 1:
        return 1 + 0.02 * numbers
    numbers *= shape[-1] ** -0.5
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        numbers[:FIRST] = numbers[-SPECIAL:] = 0
    return numbers


def write(model: Model, config: dict[str, Any], directory: Path, device: torch.device) -> None:
    """Write a checkpoint of random weights for `model`; nearly every token of its vocabulary is a word."""
    size: int = config["vocab_size"]
    places: dict[str, str] = {}
    end = size - SPECIAL
    for number, shard in enumerate(_shards(model, device)):
        name = f"model-{number}.safetensors"
        save_file(shard, directory / name)
        places |= dict.fromkeys(shard, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    described = {**config, "torch_dtype": "bfloat16", "bos_token_id": end, "eos_token_id": end + 2}
    (directory / "config.json").write_text(json.dumps(described))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary(size)).save_pretrained(directory)


def _shards(model: Model, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    for parameter in model.parameters:
        for source in parameter.sources:
            shard[source.name] = weight(source.name, source.shape, device).to(torch.bfloat16).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


async def over_http(
    checkpoint: Path,
    device: str,
    batches: Sequence[int],
    asked: Asked,
    size: int,
    cores: Cores,
    settings: Mapping[str, bool],
) -> dict[int, dict[str, float]]:
    """Return the measurements of clients on other cores, by batch; see streams.py.

    settings  infd settings by name
    """
    port, found = free_port(), {}
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["--model", str(checkpoint), "--device", device, "--dtype", "bfloat16", "--port", str(port)]
        arguments += ["--admin-socket", f"{scratch}/admin.sock", "--no-banner", "--log-level", "warning"]
        arguments += ["--max-num-seqs", str(max(batches)), "--max-model-len", str(asked.prompt + asked.tokens + 16)]
        for name, value in settings.items():
            arguments += ["--set", f"{name}={str(value).lower()}"]
        command = [sys.executable, "-m", "infd", "start", *arguments]
        server = ServerProcess("infd", command, port, start_s=START_S, cores=cores.server)
        async with server:
            await _captured(f"{scratch}/admin.sock")
            for batch in batches:
                await _read(server.url, batch, Asked(asked.prompt, FEW), size, cores, seed=1)
                found[batch] = await _read(server.url, batch, asked, size, cores, seed=2)
    return found


async def _captured(admin: str) -> None:
    """Wait until an idle server has captured all sizes of steps."""
    client, until = AdminClient([admin]), time.monotonic() + CAPTURE_S
    while (graphs := client.get("/v1/status", protocol.Status).graphs) is not None and graphs.to_come:
        if time.monotonic() > until:
            print(f"after {CAPTURE_S:.0f} s {graphs.to_come} sizes of steps are not captured")
            return
        await asyncio.sleep(0.1)


async def _read(url: str, batch: int, asked: Asked, size: int, cores: Cores, *, seed: int) -> dict[str, float]:
    program = str(Path(__file__).with_name("streams.py"))
    given = {"batch": batch, "prompt": asked.prompt, "tokens": asked.tokens, "vocabulary": size, "seed": seed}
    options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    reader = await asyncio.create_subprocess_exec(
        *("taskset", "--cpu-list", ",".join(map(str, cores.reader)), sys.executable, program, url, *options),
        stdout=subprocess.PIPE,
    )
    said, _ = await reader.communicate()
    if reader.returncode:
        raise RuntimeError(f"the reader of {batch} streams ended with {reader.returncode}")
    found: dict[str, float] = json.loads(said)
    return found


def by_transformers(
    checkpoint: Path, device: torch.device, batches: Sequence[int], asked: Asked, size: int
) -> dict[int, float] | str:
    """Return transformers' tokens per second by batch, or the reason for failure."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model = model.to(device)
    if not hasattr(model, "generate_batch"):
        return "this transformers has no continuous batching"
    settings = {setting.name for setting in fields(ContinuousBatchingConfig)}
    size_of_page = "page_size" if "page_size" in settings else "block_size"  # the name up to transformers 5.17
    found = {}
    chance = random.Random(3)  # noqa: S311 - prompts, not secrets
    try:
        for batch in batches:
            for tokens in (FEW, asked.tokens):  # the first run is the warm-up
                generation = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
                prompts = [[chance.randrange(FIRST, size - SPECIAL) for _ in range(asked.prompt)] for _ in range(batch)]
                # On a CPU the default would take most of the machine's memory.
                held = None if device.type == "cuda" else batch * (2 + (asked.prompt + tokens) // BLOCK)
                pages: dict[str, Any] = {"num_blocks": held, size_of_page: BLOCK}
                answers = model.generate_batch(
                    prompts,
                    generation_config=generation,
                    continuous_batching_config=ContinuousBatchingConfig(**pages),
                    record_timestamps=True,
                )
            times = [answer.timestamps for answer in answers.values()]
            if [len(each or ()) for each in times] != [asked.tokens] * batch:
                return f"of {batch} sequences not all had {asked.tokens} tokens"
            first, last = max(each[0] for each in times), min(each[-1] for each in times)
            found[batch] = sum(first < at <= last for each in times for at in each) / (last - first)
    except Exception as error:  # any error loses this figure only
        return repr(error)
    return found
