"""Measure kernels and whole steps on a GPU, each beside the machine's lower bound.

Weights are random; nothing is fetched. In order:
machine  copy bandwidth, and the rate of a large matrix product
steps    whole steps of the runner as the scheduler plans them, two in flight (gpu_steps.py): prompts and decoding,
         launched and replayed as graphs; replayed only: uneven lengths, top-k and top-p, beside a prompt, with
         adapters, and over an fp8 cache
served   the same weights served by `infd start` to a client on other cores, and by transformers' continuous batching
         (gpu_served.py): tokens per second while all sequences decode, beside the bare engine's
kernels  every kernel at a model's sizes, compared with the reference and timed, replayed and launched (gpu_kernels.py);
         attention, norms, gates and cache writes with each kernel that supports the model

The floor of a figure is the longer of the times for the least memory traffic and the least arithmetic; `x` is the
measured time in floors. Each figure is written at once, as a line of JSON.

`--parts calls` counts a step's driver calls with torch's profiler; it runs alone, since the profiler slows later work.

FlashInfer's modules are compiled on first use, for minutes: `--only triton` omits them, `--flashinfer` uses them for
whole steps and the server.

    python bench/gpu.py --models qwen3-0.6b qwen3-8b llama-3.1-8b
    python bench/gpu.py --parts kernels --models llama-3.1-8b --only triton
    python bench/gpu.py --device cpu --models tiny --batches 1 4 --context 64 --prompt 64 --steps 8 --served 16
                                                      # tests this program; its figures mean nothing
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_kernels import kernels
from gpu_machine import MODELS, PAGE, Bench, Figures, Traffic
from gpu_served import Cores, by_transformers, over_http, weight, write
from gpu_steps import asked_of, calls, decode, others, plain

from infd.config import CacheConfig, Config, DeviceConfig, SchedulerConfig
from infd.errors import DeviceMissing
from infd.kernels.flashinfer import modules
from infd.kernels.select import CACHED, CANDIDATES, preferring, select
from infd.models import registry
from infd.runner.arenas.weights_source import WeightsSource
from infd.runner.pulse import Pulse
from infd.runner.start.assembly import assemble
from infd.runner.start.runners import Runners
from infd.runner.start.setup import ModelSetup, choose_device
from infd.weights.load import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.kernels.ops import Ops
    from infd.models.base import Model
    from infd.runner.arenas.arena import Arena
    from infd.runner.runner import Runner


PARTS = ["steps", "served", "kernels", "calls"]


def fill(bench: Bench, ops: Ops, config: dict[str, Any], *, length: int) -> tuple[Model, Arena]:
    """Return a model of random weights, and their arena."""
    dtype, device = torch.bfloat16, bench.device
    model = registry.build(config, ops, dtype=dtype, device=device, max_len=length)
    size = sum(torch.Size(p.shape).numel() * p.dtype.itemsize + ALIGNMENT for p in model.parameters)
    weights = bench.bank.arena(size, "weights")
    for parameter in model.parameters:
        parameter.tensor = weights.take(tuple(parameter.shape), parameter.dtype)
        for source in parameter.sources:
            parameter.place(source.row, weight(source.name, source.shape, device).to(dtype))
    return model, weights


def narrowed(bench: Bench, model: Model, config: dict[str, Any], *, length: int, flashinfer: bool) -> tuple[Model, Ops]:
    """Return a model of the same weights with an fp8 cache. Raises DeviceMissing."""
    dtype, device = torch.bfloat16, bench.device
    ops = select(device, dtype, chosen_from({**CANDIDATES, **CACHED["fp8"]}, flashinfer=flashinfer))
    other = registry.build(config, ops, dtype=dtype, device=device, max_len=length)
    for mine, theirs in zip(other.parameters, model.parameters, strict=True):
        mine.tensor = theirs.tensor
    return other, ops


def chosen_from(candidates: Any, *, flashinfer: bool) -> Any:
    return preferring("flashinfer", candidates) if flashinfer else candidates


def put_together(
    bench: Bench, ops: Ops, model: Model, weights: Arena, *, rows: int, length: int, graphs: bool
) -> Runner:
    """Return a runner. With graphs, capture every size and report the time."""
    settings = Config(
        device=DeviceConfig(kind=bench.device.type, graphs=graphs, kernel_cache=""),
        scheduler=SchedulerConfig(max_num_seqs=rows, step_tokens=max(64, min(length, 8192))),
        cache=CacheConfig(page_tokens=PAGE),
    )
    gc.collect()  # frees an earlier runner's rows
    setup = ModelSetup(model, ops, torch.bfloat16, bench.device, length)
    runners = Runners(settings, setup, bench.bank, Pulse())
    runner = assemble(runners, bench.bank, weights, WeightsSource(Path(), {}, {}, Path())).runner
    with runner.active():
        while runner.idle():
            pass
    if (made := runner.facts().get("graphs")) is not None:
        captured, failed = len(made["captured"]), len(made["failed"])
        bench.figures.note(
            "captures", sizes=captured, failed=failed, each_ms=1e3 * made["capture_s"] / max(1, captured)
        )
    return runner


def serve(
    bench: Bench, checkpoint: Path, bare: dict[int, float], traffic: Traffic, config: dict[str, Any], arguments: Any
) -> None:
    """Time the same sequences served by infd and by transformers, each beside the bare engine's rate."""
    asked, size, batches = asked_of(arguments), config["vocab_size"], arguments.batches
    context = asked.prompt + asked.tokens / 2

    def report(batch: int, how: str, rate: float, more: str = "") -> None:
        share = rate / bare[batch]
        note = f"{rate:,.0f} tok/s, {share:.3f} of the bare engine's{more}"
        floor = traffic.decoding(batch, context)
        bench.figures.report(f"{batch} around {context:,.0f}, {how}", batch / rate, floor, note, of_bare=share)

    settings = {"device.flashinfer": arguments.flashinfer, "device.graphs": arguments.graphs}
    served = asyncio.run(over_http(checkpoint, bench.device.type, batches, asked, size, arguments.cores, settings))
    for batch in batches:
        found = served[batch]
        report(batch, "bare", bare[batch])
        report(batch, "over HTTP", found["tokens_s"], f", {found['tokens_an_event']:.2f} tokens an event")
    theirs = by_transformers(checkpoint, bench.device, batches, asked, size) if arguments.peer else "not asked for"
    if isinstance(theirs, str):
        print(f"transformers' continuous batching: {theirs}")
        return
    for batch in batches:
        report(batch, "by transformers", theirs[batch])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["qwen3-0.6b", "qwen3-8b", "llama-3.1-8b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--long", type=int, default=16, help="the context of one sequence among others, in theirs")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--served", type=int, default=512, help="tokens of an answer over HTTP; 0: serve nothing")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS[:-1], help="what is measured")
    parser.add_argument(
        "--only", nargs="+", default=[], help="the kernels measured by themselves, as `infdctl ops` says"
    )
    parser.add_argument("--flashinfer", action="store_true", help="whole steps and the server prefer its kernels")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="every step is launched")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="transformers serves nothing")
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"), help="where figures are written, a line each")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    arguments.cores = Cores.here()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, arguments.cores.server)  # the same cores for the bare engine as for the server
    try:
        measure(arguments)
    finally:
        os.sched_setaffinity(0, before)


def measure(arguments: argparse.Namespace) -> None:
    with arguments.json.open("w") as file:
        bench = Bench(choose_device(arguments.device), arguments.rounds, Figures(file))
        with torch.inference_mode():
            modules.keep(None)
            ops = select(bench.device, torch.bfloat16, chosen_from(CANDIDATES, flashinfer=arguments.flashinfer))
            ops.request(*CANDIDATES)
        for row in ops.describe():
            print(row)
        machine = bench.machine
        print(f"copies {machine.bytes_s / 1e9:,.0f} GB/s, multiplies {machine.flops / 1e12:,.1f} TFLOP/s")
        bench.figures.write({"machine": machine._asdict(), "torch": torch.__version__, "ops": ops.describe()})
        bench.figures.note("machine", GB_s=machine.bytes_s / 1e9, TFLOP_s=machine.flops / 1e12)
        for name in arguments.models:
            print(f"\n{name}")
            bench.figures.model = name
            with tempfile.TemporaryDirectory() as directory:
                if {"steps", "served", "calls"} & {*arguments.parts}:
                    bare, traffic = engine(bench, ops, MODELS[name], arguments, Path(directory))
                if "served" in arguments.parts and arguments.served:
                    serve(bench, Path(directory), bare, traffic, MODELS[name], arguments)
            if "kernels" in arguments.parts:
                with torch.inference_mode():
                    kernels(bench, ops, MODELS[name], arguments.batches, arguments.context, arguments.only)


@torch.inference_mode()
def engine(
    bench: Bench, ops: Ops, config: dict[str, Any], arguments: argparse.Namespace, directory: Path
) -> tuple[dict[int, float], Traffic]:
    """Time steps, and write the checkpoint to serve. Frees all GPU memory."""
    longest = (
        max(arguments.context, arguments.prompt, arguments.long * arguments.context, sum(asked_of(arguments)))
        + 2 * PAGE
    )
    model, weights = fill(bench, ops, config, length=longest)
    traffic, bare = Traffic.of(bench.machine, model, config), {}
    rows = max(arguments.batches)
    for how, graphs in (("launched", False), ("replayed", True))[: 1 + arguments.graphs]:
        runner = put_together(bench, ops, model, weights, rows=rows, length=longest, graphs=graphs)
        print(f"{how}: {runner.facts()}")
        with runner.active():
            if arguments.parts == ["calls"]:
                for batch in arguments.batches:
                    calls(bench, runner, [arguments.context] * batch, how)
            else:
                bare = plain(bench, runner, traffic, arguments, how)
            if graphs is arguments.graphs and "steps" in arguments.parts:
                others(bench, runner, traffic, model, arguments)
        del runner
    if "steps" in arguments.parts:
        over_8_bits(bench, model, weights, config, arguments, rows=rows, length=longest)
    if "served" in arguments.parts and arguments.served:
        write(model, config, directory, bench.device)
    weights.release()
    del model, weights
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return bare, traffic


def over_8_bits(
    bench: Bench,
    model: Model,
    weights: Arena,
    config: dict[str, Any],
    arguments: argparse.Namespace,
    *,
    rows: int,
    length: int,
) -> None:
    """Time decoding with an fp8 cache, where kernels support one."""
    try:
        narrow, ops = narrowed(bench, model, config, length=length, flashinfer=arguments.flashinfer)
    except DeviceMissing as error:
        print(error)
        return
    traffic, context = Traffic.of(bench.machine, narrow, config), arguments.context
    runner = put_together(bench, ops, narrow, weights, rows=rows, length=length, graphs=arguments.graphs)
    with runner.active():
        for batch in arguments.batches:
            name = f"behind {context}, in 8-bit floats"
            decode(bench, runner, [context] * batch, arguments.steps, name, traffic.decoding(batch, context))


if __name__ == "__main__":
    main()
