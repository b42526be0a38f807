"""Compare a step's layers computed in few native calls with the same kernels called one by one from Python.

Weights are random, in the shape of a real model; steps decode, where Python's share is largest.

    python bench/layers.py --shape 110m --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from native_kernels import require_native_kernels

from infd.kernels.families.attention import AttentionBatch, KeyValuePages
from infd.kernels.reference.dense import Stack
from infd.kernels.select import select
from infd.models import registry
from infd.models.base import Batch

SHAPES = {
    "0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "110m": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
COMMON = {"vocab_size": 1024, "max_position_embeddings": 4096, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
PAGE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--length", type=int, default=256, help="of every sequence")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: bears with a busy machine better")
    arguments = parser.parse_args()
    require_native_kernels()
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)

    cpu, dtype, config = torch.device("cpu"), torch.bfloat16, {**SHAPES[arguments.shape], **COMMON}
    ops = select(cpu, dtype)
    models = {}
    for name, kernels in {"stacked": ops, "one by one": ops.replace(stack=Stack())}.items():
        model = registry.build(config, kernels, dtype=dtype, device=cpu, max_len=4096, stored={})
        for parameter in model.parameters:
            parameter.tensor = (torch.randn(parameter.shape) / 32).to(parameter.dtype)
        models[name] = model
    pages = -(-arguments.length // PAGE)
    with torch.inference_mode():
        for rows in arguments.rows:
            cache = [
                KeyValuePages(
                    *(torch.zeros(rows * pages + 1, *t.shape, dtype=t.dtype) for t in model.page_tensors(PAGE))
                )
                for _ in range(config["num_hidden_layers"])
            ]
            table = torch.arange(1, rows * pages + 1, dtype=torch.int32).view(rows, pages)
            last = arguments.length - 1
            positions = torch.full((rows,), last)
            described = AttentionBatch(
                page_tokens=PAGE,
                window=None,
                starts=[last] * rows,
                counts=[1] * rows,
                offsets=list(range(rows + 1)),
                start=positions.to(torch.int32),
                table=table,
                slots=table[:, -1].long() * PAGE + last % PAGE,
            )
            tokens = torch.zeros(rows, dtype=torch.int64)
            taken: dict[str, list[float]] = {name: [] for name in models}
            for _ in range(arguments.rounds + 1):
                for name, each in models.items():
                    started = clock()
                    plan = ops.attention.prepare(described)
                    each.forward(Batch(tokens=tokens, positions=positions, attention=[plan], cache=cache))
                    taken[name].append(clock() - started)
            ratios = sorted(b / a for a, b in zip(*(times[1:] for times in taken.values()), strict=True))
            line = "   ".join(f"{name} {statistics.median(times[1:]) * 1e3:.2f} ms" for name, times in taken.items())
            print(
                f"{rows:3} rows   {line}   ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            )


if __name__ == "__main__":
    main()
