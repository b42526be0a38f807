"""Measure the memory released by sleep, and the time of wake beside a plain read of the weights' file.

    python bench/sleep.py --mib 512                  a random llama in bfloat16 of this size
    python bench/sleep.py --model DIRECTORY          an existing checkpoint
    python bench/sleep.py --device cuda              GPU memory; level 1 moves weights to the host

Each round fills the cache with a long prompt, sleeps at level 1, wakes, sleeps at level 2, wakes. Before each wake the
file is read into existing memory, so that both reads find it in the same state of the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from infd.config import CacheConfig, Config, DeviceConfig, LiveConfig, ModelConfig, SchedulerConfig
from infd.engine.engine import Engine
from infd.executors.local import LocalExecutor
from infd.request import Generate, Request, SamplingParams
from infd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIB = 2**20
HIDDEN, INNER, HEADS, VOCAB = 1024, 4096, 16, 8192
PROMPT = 1000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def write(directory: Path, mib: int) -> None:
    """Write a checkpoint of about the given size."""
    square = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    wide = {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    shapes = square | wide
    layers = max(1, (mib * MIB - VOCAB * HIDDEN * 2) // sum(a * b * 2 for a, b in shapes.values()))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN).bfloat16()}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


def stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def read(directory: Path, buffer: bytearray) -> float:
    """Read all weights once into existing memory; return the seconds."""
    began = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            view = memoryview(buffer)
            while count := file.readinto(view[: 16 * MIB]):
                view = view[count:]
    return time.perf_counter() - began


async def measure(
    directory: Path, rounds: int, device: str, threads: int | None, note: Callable[[dict[str, float]], object]
) -> list[dict[str, float]]:
    """Run the rounds. `note` receives each round's figures."""
    config = Config(
        model=ModelConfig(path=str(directory)),
        device=DeviceConfig(kind=device, threads=threads),
        scheduler=SchedulerConfig(max_num_seqs=8, step_tokens=256),
        cache=CacheConfig(bytes=512 * MIB),
    )
    engine = Engine(LiveConfig(config), LocalExecutor(config), Metrics())
    await engine.load()
    if engine.executor.sleep_refusal:
        raise SystemExit(engine.executor.sleep_refusal)
    running = asyncio.ensure_future(engine.run())
    await asyncio.sleep(0)
    buffer = bytearray(stored_bytes(directory))
    facts, figures = engine.describe(), []
    for number in range(rounds):
        figure: dict[str, float] = {"weights_mib": facts["weights_bytes"] / MIB}
        for level in (1, 2):
            prompt = tuple(1 + (number * 7 + i * 13) % 500 for i in range(PROMPT))
            async with engine.admit(1, 0) as ticket:
                asked = Request(id="bench", prompt=prompt, wants=(Generate(SamplingParams(max_tokens=1)),))
                async for _ in await ticket.submit(asked):
                    pass
            asleep = engine.control.sleep("wait", level)
            await asleep.result()
            figure[f"freed_{level}_mib"] = asleep.freed_bytes / MIB
            figure[f"sleep_{level}_s"] = asleep.took_s or 0.0
            stays = engine.describe()["resident"]
            figure |= {f"stays_{name}_mib": size / MIB for name, size in stays.items()}
            figure["read_s"] = read(directory, buffer)
            awake = engine.control.wake()
            await awake.result()
            figure[f"wake_{level}_s"] = awake.took_s or 0.0
        figures.append(figure)
        note(figure)
    await engine.close()
    await asyncio.gather(running, return_exceptions=True)
    return figures


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint that is made")
    parser.add_argument("--model", type=Path, help="a checkpoint directory instead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="that compute (default: cores)")
    parser.add_argument("--json", type=Path, help="where each round is written, a line each")
    return parser.parse_args(argv)


def main() -> None:
    asked = parse()

    def note(figure: dict[str, float]) -> None:
        if asked.json is not None:
            with asked.json.open("a") as file:
                file.write(json.dumps({"name": "a round", **figure}) + "\n")

    with tempfile.TemporaryDirectory() as made:
        directory = asked.model or Path(made)
        if asked.model is None:
            write(directory, asked.mib)
        figures = asyncio.run(measure(directory, asked.rounds, asked.device, asked.threads, note))
    middle = {name: statistics.median(figure[name] for figure in figures) for name in figures[0]}
    for name, value in middle.items():
        print(f"{name:<14} {value:10.3f}")
    print(f"a wake from level 2 takes {middle['wake_2_s'] / middle['read_s']:.2f} times one read of the file")


if __name__ == "__main__":
    main()
