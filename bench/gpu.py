"""Kernels and whole steps on a GPU, each figure beside what the machine could do at best.

Weights are random, so nothing is fetched. First the machine: bytes a second of a copy, and the rate of a large matrix
product. Then every kernel at a model's own sizes, compared with the reference and timed; then whole steps of the
runner, as the scheduler would plan them, two in flight. A floor is the time of moving the bytes that must be moved, or
of the arithmetic that must be done, whichever is longer; `x` says how many times that long it took. Attention, norms,
gates and the entry into the cache are timed with each kernel that does not refuse, and decoding twice: launched kernel
by kernel, and replayed as a graph.
Last, the same weights are served by `infd start` to a client on other cores, and by transformers' continuous batching
(gpu_served.py): tokens a second while all are decoding, beside those of the bare engine.

    python bench/gpu.py --models qwen3-0.6b qwen3-8b llama-3.1-8b
    python bench/gpu.py --device cpu --models tiny --batches 1 4 --context 64 --prompt 64 --steps 8 --served 16
                                                      # tries the program, says nothing
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_kernels import kernels
from gpu_machine import MODELS, PAGE, Bench, Traffic
from gpu_served import Asked, Cores, by_transformers, over_http, weight, write

from infd.config import CacheConfig, Config, DeviceConfig, SchedulerConfig
from infd.kernels.flashinfer import modules
from infd.kernels.select import select
from infd.models import registry
from infd.request import Request, SamplingParams
from infd.runner.design import Design
from infd.runner.loading import assemble
from infd.runner.pulse import Pulse
from infd.scheduler.plan import Join, Span, StepPlan
from infd.scheduler.sequence import Sequence
from infd.weights.load import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.kernels.ops import Ops
    from infd.models.base import Model
    from infd.runner.memory import Arena
    from infd.runner.runner import Landing, Runner


def fill(bench: Bench, ops: Ops, config: dict[str, Any], *, length: int) -> tuple[Model, Arena]:
    """Return a model of random weights, and where they lie."""
    dtype, device = torch.bfloat16, bench.device
    model = registry.build(config, ops, dtype=dtype, device=device, max_len=length)
    size = sum(torch.Size(p.shape).numel() * p.dtype.itemsize + ALIGNMENT for p in model.parameters)
    weights = bench.bank.arena(size, "weights")
    for parameter in model.parameters:
        parameter.tensor = weights.take(tuple(parameter.shape), parameter.dtype)
        for source in parameter.sources:
            parameter.place(source.row, weight(source.name, source.shape, device).to(dtype))
    return model, weights


def put_together(
    bench: Bench, ops: Ops, model: Model, weights: Arena, *, rows: int, length: int, graphs: bool
) -> Runner:
    """Return a runner. With graphs, every size is captured."""
    settings = Config(
        device=DeviceConfig(kind=bench.device.type, graphs=graphs),
        scheduler=SchedulerConfig(max_num_seqs=rows, step_tokens=max(64, min(length, 8192))),
        cache=CacheConfig(page_tokens=PAGE),
    )
    runner = assemble(
        settings, Design(model, ops, torch.bfloat16, bench.device, length), bench.bank, weights, Pulse()
    ).runner
    with runner.active():
        while runner.idle():
            pass
    return runner


def steps(bench: Bench, runner: Runner, traffic: Traffic, arguments: argparse.Namespace, how: str) -> dict[int, float]:
    """Time prompts and decoding; return the tokens a second of the steps that are served, by batch.

    how  in which way steps are issued
    """
    length, context, count = arguments.prompt, arguments.context, arguments.steps
    run(bench, runner, iter([prompt(length)]))
    taken = run(bench, runner, iter([prompt(length)] * 4)) / 4
    bench.figures.report(f"a prompt of {length}, {how}", taken, traffic.prompt(length), f"{length / taken:,.0f} tok/s")
    rates = {}
    for batch in arguments.batches:
        run(bench, runner, decoding(batch, context - count, 2))
        taken = run(bench, runner, decoding(batch, context - count, count)) / count
        floor = traffic.decoding(batch, context)
        bench.figures.report(
            f"{batch} that decode behind {context}, {how}", taken, floor, f"{batch / taken:,.0f} tok/s"
        )
        asked = asked_of(arguments)
        rates[batch] = asked.tokens * batch / run(bench, runner, decoding(batch, asked.prompt, asked.tokens))
    return rates


def asked_of(arguments: argparse.Namespace) -> Asked:
    """Return what is asked of a server: as much behind the context as before it."""
    return Asked(max(1, arguments.context - arguments.served // 2), arguments.served)


def serve(
    bench: Bench, checkpoint: Path, bare: dict[int, float], traffic: Traffic, config: dict[str, Any], arguments: Any
) -> None:
    """Time the same sequences served, and by transformers; each beside the bare engine's rate."""
    asked, size, batches = asked_of(arguments), config["vocab_size"], arguments.batches
    served = over_http(checkpoint, bench.device.type, batches, asked, size, arguments.cores)
    theirs = by_transformers(checkpoint, bench.device, batches, asked, size)
    if isinstance(theirs, str):
        print(f"transformers' continuous batching: {theirs}")
        theirs = {}
    context = asked.prompt + asked.tokens / 2
    for batch in batches:
        floor = traffic.decoding(batch, context)
        found = served[batch]
        rates = {"bare": bare[batch], "over HTTP": found["tokens_s"]}
        rates |= {"by transformers": theirs[batch]} if batch in theirs else {}
        for how, rate in rates.items():
            note = f"{rate:,.0f} tok/s, {rate / bare[batch]:.3f} of the bare engine's"
            note += f", {found['tokens_an_event']:.2f} tokens an event" if how == "over HTTP" else ""
            bench.figures.report(f"{batch} around {context:,.0f}, {how}", batch / rate, floor, note)


def prompt(tokens: int) -> StepPlan:
    return StepPlan(0, [_join(0, tokens, 1)], [], [_span(0, 0, tokens)])


def decoding(batch: int, context: int, count: int) -> Iterator[StepPlan]:
    """Plan steps of sequences that know `context` tokens, whose pages hold all that they will."""
    held = -(-(context + count) // PAGE)
    joins = [_join(row, context, 1 + row * held, held) for row in range(batch)]
    for step in range(count):
        yield StepPlan(step, joins if not step else [], [], [_span(row, context - 1 + step, 1) for row in range(batch)])


def _join(row: int, tokens: int, page: int, held: int = 0) -> Join:
    held = held or -(-tokens // PAGE)
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    return Join(row, [7] * tokens, tokens, greedy, frozenset(), [list(range(page, page + held))], row)


def _span(row: int, start: int, count: int) -> Span:
    asked = Request(id="bench", prompt=(7,), sampling=SamplingParams(max_tokens=9))
    return Span(Sequence(asked), row, start, count, samples=True)


def run(bench: Bench, runner: Runner, plans: Iterator[StepPlan]) -> float:
    """Return the seconds that steps take, two in flight."""
    flight: deque[Landing] = deque()

    def land() -> None:
        failed = runner.read(flight.popleft()).failed
        assert not failed, failed

    bench.wait()
    started = time.perf_counter()
    for plan in plans:
        flight.append(runner.sample(runner.forward(plan)))
        if len(flight) == 2:
            land()
    while flight:
        land()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["qwen3-0.6b", "qwen3-8b", "llama-3.1-8b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--served", type=int, default=512, help="tokens of an answer over HTTP; 0: serve nothing")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where all figures are written")
    arguments = parser.parse_args()
    arguments.cores = Cores.here()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, arguments.cores.server)  # the bare engine has what the server will have
    try:
        measure(arguments)
    finally:
        os.sched_setaffinity(0, before)


def measure(arguments: argparse.Namespace) -> None:
    bench = Bench(torch.device(arguments.device), arguments.rounds)
    with torch.inference_mode():
        modules.keep(None)
        ops = select(bench.device, torch.bfloat16)
    for row in ops.describe():
        print(row)
    print(f"copies {bench.machine.bytes_s / 1e9:,.0f} GB/s, multiplies {bench.machine.flops / 1e12:,.1f} TFLOP/s")
    for name in arguments.models:
        print(f"\n{name}")
        bench.figures.model = name
        with tempfile.TemporaryDirectory() as directory:
            bare, traffic = engine(bench, ops, MODELS[name], arguments, Path(directory))
            if arguments.served:
                serve(bench, Path(directory), bare, traffic, MODELS[name], arguments)
        arguments.json.write_text(
            json.dumps({"machine": bench.machine._asdict(), "torch": torch.__version__, "figures": bench.figures.found})
        )


@torch.inference_mode()
def engine(
    bench: Bench, ops: Ops, config: dict[str, Any], arguments: argparse.Namespace, directory: Path
) -> tuple[dict[int, float], Traffic]:
    """Time kernels and steps; write what is to be served. All memory is free again behind it."""
    kernels(bench, ops, config, arguments.batches, arguments.context)
    longest = max(arguments.context, arguments.prompt, sum(asked_of(arguments)))
    model, weights = fill(bench, ops, config, length=longest + PAGE)
    traffic, bare = Traffic.of(bench.machine, model, config), {}
    for how, graphs in (("launched", False), ("replayed", True)):
        rows = max(arguments.batches)
        runner = put_together(bench, ops, model, weights, rows=rows, length=longest + PAGE, graphs=graphs)
        print(f"{how}: {runner.facts()}")
        with runner.active():
            bare = steps(bench, runner, traffic, arguments, how)
        del runner
    if arguments.served:
        write(model, config, directory, bench.device)
    weights.release()
    del model, weights
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return bare, traffic


if __name__ == "__main__":
    main()
