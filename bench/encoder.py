"""Where the time of an encoder's step goes, in one process: the matrix products alone, attention, all the rest.

A step is computed whole; then its matrix products alone, with the same weights and as many rows; then its attention
alone, of which two products are a part. The rest is the difference: embeddings, activations, norms, additions. If the
model pools one token of each text, the last layer computes these tokens alone, as in the daemon.

    python bench/encoder.py DIR --dtype bfloat16 --lengths 504 --lengths 504,504,504,504
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from native_kernels import require_native_kernels

from infd.kernels.cpu.product import described
from infd.kernels.families.span_attention import SpanBatch
from infd.kernels.select import select
from infd.models import registry
from infd.models.base import Batch, SampledBatch
from infd.models.encoder import Encoder
from infd.pooling import read
from infd.runner.readouts.pooling import ONE
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

CPU = torch.device("cpu")


class Heap:
    """Memory for weights."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--lengths", action="append", metavar="N,N", help="of a step's texts. Repeatable.")
    parser.add_argument("--all-tokens", action="store_true", help="the last layer computes all tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: bears with a busy machine better")
    arguments = parser.parse_args()
    require_native_kernels()
    torch.set_num_threads(arguments.threads)
    model, one = _loaded(arguments.directory, getattr(torch, arguments.dtype))
    for lengths in arguments.lengths or ["504"]:
        with torch.inference_mode():
            _measure(
                model,
                [int(each) for each in lengths.split(",")],
                arguments.rounds,
                one and not arguments.all_tokens,
                time.thread_time if arguments.cpu_time else time.perf_counter,
            )


def _loaded(directory: Path, dtype: torch.dtype) -> tuple[Encoder, bool]:
    """Return the model, and whether it pools one token of each text."""
    with Checkpoint(directory) as checkpoint:
        config = checkpoint.config
        pooling = read(directory, config)
        model = registry.build(
            config,
            select(CPU, dtype),
            dtype=dtype,
            device=CPU,
            max_len=config["max_position_embeddings"],
            stored=checkpoint.tensors,
            pooling=pooling,
        )
        load(model, checkpoint, Heap())
    if not isinstance(model, Encoder) or model.stacked is None:
        raise SystemExit(f"{directory}: its layers are not computed by one native call")
    return model, pooling.pooling in ONE


def _measure(model: Encoder, lengths: Sequence[int], rounds: int, one: bool, clock: Callable[[], float]) -> None:
    tokens, offsets = sum(lengths), [0, *accumulate(lengths)]
    batch = Batch(
        tokens=torch.randint(1000, model.vocab_size, (tokens,)),
        positions=torch.tensor([at for length in lengths for at in range(length)]),
        attention=[],
        cache=[],
        offsets=offsets,
    )
    if one:
        first = offsets[:-1]
        batch.sampled = SampledBatch(torch.tensor(first), None, indices=first)
    recipes = [block.recipe() for block in model._blocks]
    dtype = recipes[0].attention_norm.weight.dtype
    products = [each for recipe in recipes for each in (recipe.qkv, recipe.output, recipe.up, recipe.down)]
    sizes = [(each.outputs, each.inputs) for each in map(described, products)]
    rows = {width: torch.randn(tokens, width, dtype=dtype) for width in {inputs for _, inputs in sizes}}
    counts = [tokens] * len(products)
    if one:  # q of the last layer is counted with k and v
        counts[-3:] = [len(lengths)] * 3

    def multiply() -> None:
        for each, (_, inputs), count in zip(products, sizes, counts, strict=True):
            each.form.multiply(rows[inputs][:count], each.storage, each.bias)

    plan = model._attention.prepare(SpanBatch(tokens=tokens, offsets=offsets, device=CPU))
    heads = [
        torch.randn(tokens, recipe.heads + 2 * recipe.kv_heads, recipe.head_size, dtype=dtype) for recipe in recipes
    ]

    def attend() -> None:
        for recipe, qkv in zip(recipes, heads, strict=True):
            q, k, v = qkv.split((recipe.heads, recipe.kv_heads, recipe.kv_heads), dim=1)
            plan.run(q, k, v, scale=recipe.scale, reach=recipe.reach)

    parts: dict[str, Callable[[], Any]] = {
        "step": partial(model.forward, batch),
        "products": multiply,
        "attention": attend,
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(rounds + 3):
        for name, part in parts.items():
            begun = clock()
            part()
            if number >= 3:
                times[name].append(1000 * (clock() - begun))
    step, multiplied, attended = (statistics.median(times[name]) for name in parts)
    # Of attention's two products, if every query sees every key of its text.
    scored = sum(4 * recipe.heads * recipe.head_size * length**2 for recipe in recipes for length in lengths)
    operations = 2 * sum(outputs * inputs * count for (outputs, inputs), count in zip(sizes, counts, strict=True))
    every = multiplied * (1 + scored / operations)  # products, attention's two at the others' rate
    print(
        f"{','.join(map(str, lengths))}: step {step:.2f} ms; products {multiplied:.2f} ms"
        f" ({operations / multiplied / 1e6:.0f} GFLOP/s), a share of {multiplied / step:.2f};"
        f" attention {attended:.2f} ms ({scored / attended / 1e6:.0f} GFLOP/s), {attended / step:.2f};"
        f" the rest {step - multiplied - attended:.2f} ms, {1 - (multiplied + attended) / step:.2f};"
        f" all products, attention's at the rate of the others: {every:.2f} ms, {every / step:.2f}"
    )


if __name__ == "__main__":
    main()
