"""Time each way of sampling for many rows of a large vocabulary, beside the matrix products of a forward step.

Sampler, rows and kernels are the daemon's on a CPU. The products are those of Qwen3-0.6B in int8, without attention, so
a forward step takes longer. Rounds alternate between the ways; the median of each is printed, with its ratio to
sampling by top-p.

    python bench/samplers.py --threads 2
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from kernels import SHAPES, forms

from infd.kernels.cpu.draw import Draw
from infd.request import Breakers, Chain, Dry, Generate, Mirostat, SamplingParams
from infd.runner.arenas.arena import CPU
from infd.runner.rows import Rows
from infd.runner.sampled import SampledPositions
from infd.runner.sampler import Sampler
from infd.runner.staging import staging
from infd.scheduler.plan import Join

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 28  # of Qwen3-0.6B
BREAKERS = Breakers((np.array([10, 25, 34], np.int32).tobytes(),))
_DRY = partial(Dry, 0.8, 1.75, 2, None, BREAKERS)
# llama.cpp's defaults where it has them, else values in common use.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k, top_p, min_p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "repetition_penalty": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
    "typical_p": {"temperature": 0.8, "chain": Chain(typical_p=0.95)},
    "top_n_sigma": {"temperature": 0.8, "chain": Chain(top_n_sigma=1.0)},
    "XTC": {"temperature": 0.8, "chain": Chain(xtc_probability=1.0)},
    "dynamic temperature": {"temperature": 0.8, "chain": Chain(dynatemp_range=0.5)},
    "all of these": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "chain": Chain(top_n_sigma=1.0, typical_p=0.95, xtc_probability=1.0, dynatemp_range=0.5),
    },
    "DRY": {"temperature": 0.8, "top_p": 0.95, "dry": _DRY()},
    "mirostat 1": {"temperature": 0.8, "mirostat": Mirostat(1, 5.0, 0.1)},
    "mirostat 2": {"temperature": 0.8, "mirostat": Mirostat(2, 5.0, 0.1)},
}
BESIDE = "top_p"


def histories(rows: int, length: int, vocabulary: int) -> dict[str, list[list[int]]]:
    """Return the known tokens of each row: words of a natural frequency, and one token for ever, the worst for DRY."""
    draw = random.Random(1)  # noqa: S311 - not secrets
    words = range(1, vocabulary)
    weights = [1 / word for word in words]
    return {
        "words": [draw.choices(words, weights, k=length) for _ in range(rows)],
        "one token": [[5] * length for _ in range(rows)],
    }


def ready(known: list[list[int]], settings: dict[str, Any], vocabulary: int) -> Callable[[torch.Tensor], Any]:
    """Return a function that samples a token of each row from logits, which it may overwrite."""
    length = len(known[0])
    rows = Rows(
        rows=len(known), max_len=length + 8, page_tokens=(length + 8,), vocab_size=vocabulary, staging=staging(CPU)
    )
    wants = (Generate(SamplingParams(max_tokens=8, **settings)),)
    rows.stage([Join(row, each, length // 2, wants, [[1]], 100 + row) for row, each in enumerate(known)], [])
    ids, ends = np.arange(len(known)), np.full(len(known), length)
    at = SampledPositions(torch.from_numpy(ids), torch.from_numpy(ends), ids, ends)
    sampler = Sampler(rows, Draw())
    return lambda logits: sampler(logits, at, None)


def products(rows: int, rounds: int) -> float:
    """Return milliseconds of a forward step's matrix products."""
    taken = 0.0
    for shape, count in (("0.6b", LAYERS), ("head", 1)):
        product = forms(SHAPES[shape], 1, None, ("int8",))["int8"]
        for index, (_, width) in enumerate(SHAPES[shape]):
            given = torch.randn(rows, width).bfloat16()
            taken += count * timed(rounds, lambda given: product(given, index), lambda: given)  # noqa: B023
    return taken


def timed(rounds: int, work: Callable[[Any], Any], prepare: Callable[[], Any]) -> float:
    """Return the median milliseconds of `work`, called with what `prepare` returns."""
    spent = []
    for _ in range(rounds + 1):
        given = prepare()
        started = time.perf_counter()
        work(given)
        spent.append(1000 * (time.perf_counter() - started))
    return statistics.median(spent[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--history", type=int, default=2048, help="known tokens of each row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, vocabulary = arguments.rows, arguments.vocabulary
    # Uneven as a model's: in some rows the likeliest token has most of the probability, in others little.
    logits = (
        torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * torch.linspace(1, 4, rows)[:, None]
    )
    known = histories(rows, arguments.history, vocabulary)
    with torch.inference_mode():
        forward = products(rows, arguments.rounds)
        ways = {name: ready(known["words"], settings, vocabulary) for name, settings in WAYS.items()}
        ways["DRY, one token for ever"] = ready(known["one token"], WAYS["DRY"], vocabulary)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.rounds + 1):
            for name, way in ways.items():
                given = logits.clone()
                started = time.perf_counter()
                way(given)
                if number:
                    taken[name].append(1000 * (time.perf_counter() - started))
    median = {name: statistics.median(each) for name, each in taken.items()}
    print(f"{rows} rows of {vocabulary} tokens, {arguments.history} known, {arguments.threads} threads")
    print(f"matrix products of a forward step of Qwen3-0.6B in int8: {forward:.1f} ms")
    for name, each in median.items():
        print(
            f"{name:<26}{each:8.2f} ms a step {1000 * each / rows:8.1f} us a row"
            f"  {each / median[BESIDE]:6.2f} x {BESIDE}  {100 * each / forward:6.1f} % of the products"
        )


if __name__ == "__main__":
    main()
