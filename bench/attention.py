"""Compare attention over a paged cache: infd's native kernel, its reference, and torch's on contiguous keys.

"int8" is the native kernel over an int8 cache; its GB/s count int8 bytes.

Calls alternate between the caches of several layers, so that keys and values are read from memory as in a model. Torch
reads a contiguous tensor of equal size, which no server has. A round runs each implementation once; ratios are within a
round.

    python bench/attention.py --threads 2
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from infd.kernels.cpu.attention import PagedAttention as Native
from infd.kernels.cpu.library import Library
from infd.kernels.families.attention import AttentionBatch, KeyValuePages
from infd.kernels.reference import int8
from infd.kernels.reference.attention import PagedAttention as Reference

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 16
HEAD = 128


class Steps(NamedTuple):
    """Return spans of `count` tokens from position `start`."""

    spans: int
    start: int
    count: int


CASES = {
    "decode 1 x 4k": Steps(1, 4095, 1),
    "decode 8 x 1k": Steps(8, 1023, 1),
    "decode 32 x 1k": Steps(32, 1023, 1),
    "prompt 512": Steps(1, 0, 512),
    "chunks 4 x 128 at 512": Steps(4, 512, 128),
}


def batch(steps: Steps) -> AttentionBatch:
    pages = -(-(steps.start + steps.count) // PAGE)
    ids = list(range(1, steps.spans * pages + 1))
    random.Random(0).shuffle(ids)  # noqa: S311 -- the same pages every time
    table = torch.tensor(ids, dtype=torch.int32).view(steps.spans, pages)
    position = torch.arange(steps.start, steps.start + steps.count)
    return AttentionBatch(
        page_tokens=PAGE,
        window=None,
        starts=[steps.start] * steps.spans,
        counts=[steps.count] * steps.spans,
        offsets=list(range(0, (steps.spans + 1) * steps.count, steps.count)),
        start=torch.full((steps.spans,), steps.start, dtype=torch.int32),
        table=table,
        slots=(table.long()[:, position // PAGE] * PAGE + position % PAGE).flatten(),
    )


def implementations(
    steps: Steps, heads: int, kv_heads: int, dtype: torch.dtype, layers: int, isa: str | None
) -> dict[str, Callable[[int], object]]:
    """Return, by name, a function that computes the attention of the i-th layer."""
    described = batch(steps)
    length, tokens = steps.start + steps.count, steps.spans * steps.count
    paged = (steps.spans * described.table.shape[1] + 1, kv_heads, PAGE, HEAD)
    caches = [KeyValuePages(*(torch.randn(paged).to(dtype) for _ in range(2))) for _ in range(layers)]
    narrow = [KeyValuePages(*map(int8.pack, cache[:2])) for cache in caches]
    whole = [tuple(torch.randn(steps.spans, kv_heads, length, HEAD).to(dtype) for _ in range(2)) for _ in range(layers)]
    q = torch.randn(tokens, heads, HEAD).to(dtype)
    native, reference = Native(Library(isa)).prepare(described), Reference().prepare(described)
    grouped = q.view(steps.spans, steps.count, kv_heads, -1, HEAD).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen = torch.arange(length) <= torch.arange(steps.start, length)[:, None]
    mask = seen.repeat(heads // kv_heads, 1) if steps.count > 1 else None
    return {
        "native": lambda i: native.run(q, caches[i], scale=HEAD**-0.5),
        "int8": lambda i: native.run(q, narrow[i], scale=HEAD**-0.5),
        "reference": lambda i: reference.run(q, caches[i], scale=HEAD**-0.5),
        "torch": lambda i: functional.scaled_dot_product_attention(grouped, *whole[i], attn_mask=mask),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--mib", type=int, default=256, help="of cache")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", help="another instruction set than the best")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: bears with a busy machine better")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    print("case                    form       ms a layer   GB/s of cache   GFLOP/s   native is faster by")
    for name, steps in CASES.items():
        read = steps.spans * (steps.start + steps.count) * arguments.kv_heads * HEAD * 2 * dtype.itemsize
        pairs = steps.spans * (steps.start * steps.count + steps.count * (steps.count + 1) // 2)
        layers = max(2, min(64, arguments.mib * 2**20 // read))
        computes = implementations(steps, arguments.heads, arguments.kv_heads, dtype, layers, arguments.isa)
        taken: dict[str, list[float]] = {form: [] for form in computes}
        with torch.inference_mode():
            for _ in range(arguments.rounds + 1):
                for form, compute in computes.items():
                    started = clock()
                    for i in range(layers):
                        compute(i)
                    taken[form].append((clock() - started) / layers)
        for form, times in taken.items():
            median = statistics.median(times[1:])
            own = read * int8.row_bytes(HEAD) / HEAD / dtype.itemsize if form == "int8" else read
            line = f"{name:23} {form:9} {median * 1e3:9.3f} {own / median / 1e9:15.1f}"
            line += f" {4 * pairs * arguments.heads * HEAD / median / 1e9:13.0f}"
            if form != "native":
                ratios = sorted(theirs / ours for ours, theirs in zip(taken["native"][1:], times[1:], strict=True))
                line += f"   {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(line, flush=True)


if __name__ == "__main__":
    main()
