"""`steps` of bench/gpu.py: planned as the scheduler plans, computed by a runner, two in flight."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from gpu_machine import PAGE, Bench, Traffic
from gpu_served import Asked
from torch.profiler import ProfilerActivity

from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.request import Adapter, Generate, SamplingParams
from infd.runner.cuda_graphs.padded_step import PATIENCE
from infd.scheduler.plan import Join, Load, Span, StepPlan

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator, Mapping
    from collections.abc import Sequence as Some

    from infd.models.base import Model
    from infd.models.parameter import Target
    from infd.runner.runner import PendingResult, Runner

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
CHOOSING = SamplingParams(max_tokens=9, temperature=0.6, top_k=20, top_p=0.95)  # recommended for Qwen3
BESIDE = 512  # prompt tokens in a mixed step
ADAPTERS, RANK = 4, 16
COUNTED = 8  # steps for counting driver calls
CALLS = {
    "launches": ("cudaLaunch", "cuLaunch"),
    "copies": ("cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset"),
    "replays": ("cudaGraphLaunch", "cuGraphLaunch"),
}


def asked_of(arguments: Namespace) -> Asked:
    """Return the lengths of a served batch: prompt and answer center on the context length."""
    return Asked(max(1, arguments.context - arguments.served // 2), arguments.served)


def plain(bench: Bench, runner: Runner, traffic: Traffic, arguments: Namespace, how: str) -> dict[int, float]:
    """Time prompts and decoding; return the tokens per second of served steps, by batch.

    how  how steps are issued, for the report
    """
    length, context, count = arguments.prompt, arguments.context, arguments.steps
    run(bench, runner, iter([prompt(length)]))
    taken = run(bench, runner, iter([prompt(length)] * 4)) / 4
    bench.figures.report(f"a prompt of {length}, {how}", taken, traffic.prompt(length), f"{length / taken:,.0f} tok/s")
    rates, asked = {}, asked_of(arguments)
    for batch in arguments.batches:
        decode(bench, runner, [context] * batch, count, f"behind {context}, {how}", traffic.decoding(batch, context))
        if asked.tokens:
            rates[batch] = batch / step_s(bench, runner, [asked.prompt] * batch, asked.tokens)
    return rates


def others(bench: Bench, runner: Runner, traffic: Traffic, model: Model, arguments: Namespace) -> None:
    """Time further steps of a busy server: uneven lengths, random sampling, with a prompt, with adapters."""
    context, count, most = arguments.context, arguments.steps, max(arguments.batches)
    some = sorted(arguments.batches)[len(arguments.batches) // 2]
    contexts = [arguments.long * context, *[context] * (some - 1)]
    floor = traffic.decoding(some, sum(contexts) / some)
    decode(bench, runner, contexts, count, f"behind {context}, one of them behind {contexts[0]}", floor)
    even = traffic.decoding(most, context)
    decode(bench, runner, [context] * most, count, f"behind {context}, by top-k and top-p", even, sampling=CHOOSING)
    if most > 1:
        beside = min(BESIDE, arguments.prompt)
        floor = traffic.mixed(most - 1, context, beside)
        name = f"behind {context}, beside {beside} of a prompt"
        decode(bench, runner, [context] * (most - 1), count, name, floor, beside=beside)
    low = adapter(model)
    if low:
        loads = [Load(slot, Adapter(f"a{slot}", slot)) for slot in range(1, ADAPTERS + 1)]
        for load in loads:
            runner.adapters.hold(load.adapter, low)
        floor = traffic.decoding(most, context, len(loads) * _bytes(low))
        name = f"behind {context}, with {len(loads)} adapters"
        decode(bench, runner, [context] * most, count, name, floor, loads=loads)


def decode(
    bench: Bench,
    runner: Runner,
    contexts: Some[int],
    count: int,
    name: str,
    floor: float,
    *,
    loads: Some[Load] = (),
    **asked: Any,
) -> None:
    """Report `count` steps in which sequences decode up to `contexts`; see `decoding` for the other parameters."""
    starts, asked = [context - count for context in contexts], {**asked, "slots": len(loads)}
    run(bench, runner, decoding(starts, PATIENCE + 2, loads=loads, **asked))  # behind which what can be captured is
    taken, batch = step_s(bench, runner, starts, count, **asked), len(contexts)
    bench.figures.report(f"{batch} that decode {name}", taken, floor, f"{batch / taken:,.0f} tok/s")


def calls(bench: Bench, runner: Runner, contexts: Some[int], how: str) -> None:
    """Report the driver calls of a decoding step: kernel launches, copies, fills, graph replays."""
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (bench.device.type == "cuda")]
    plans = decoding([context - COUNTED for context in contexts], COUNTED + 1)
    run(bench, runner, islice(plans, 1))
    with torch.profiler.profile(activities=kinds) as seen:
        run(bench, runner, plans)
    asked = issued((event.key, event.count / COUNTED) for event in seen.key_averages())
    print(f"{len(contexts)} that decode, {how}, a step: {asked}")
    bench.figures.note(f"calls of {len(contexts)} that decode, {how}", **asked)


def issued(counts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Count CUDA calls that submit work, by kind of work."""
    asked = dict.fromkeys(CALLS, 0.0)
    for call, count in counts:
        for kind, names in CALLS.items():
            if call.startswith(names):
                asked[kind] += count
    return asked


def step_s(bench: Bench, runner: Runner, starts: Some[int], count: int, **asked: Any) -> float:
    """Return the mean seconds of a step, without the step that admits the sequences."""
    plans = decoding(starts, count + 1, **asked)
    run(bench, runner, islice(plans, 1))
    return run(bench, runner, plans) / count


def prompt(tokens: int) -> StepPlan:
    return StepPlan(0, [_join(0, tokens, 1)], [], [_span(0, 0, tokens)])


def decoding(
    contexts: Some[int],
    count: int,
    *,
    sampling: SamplingParams = GREEDY,
    beside: int = 0,
    slots: int = 0,
    loads: Some[Load] = (),
) -> Iterator[StepPlan]:
    """Plan decoding steps of sequences of known lengths, with all pages granted at the start.

    sampling  sampling parameters
    beside    prompt tokens added to each step
    slots     number of adapter slots, used by sequences in turn
    loads     adapters to load into the slots
    """
    joins, page = [], 1
    for row, context in enumerate(contexts):
        held = -(-(context + count) // PAGE)
        joins.append(_join(row, context, page, held, sampling, 1 + row % slots if slots else 0))
        page += held
    following = [_join(len(contexts), beside, page)] if beside else []
    for step in range(count):
        spans = [_span(row, context - 1 + step, 1) for row, context in enumerate(contexts)]
        spans += [_span(len(contexts), 0, beside)] if beside else []
        first = not step
        yield StepPlan(step, [*joins, *following] if first else following, [], spans, list(loads) if first else [])


def adapter(model: Model) -> dict[Target, LowRank]:
    """Return an adapter of zeros for every product between embedding and head."""
    targets = [target for target in model.targets if all(name.endswith("_proj") for name in target.modules)]

    def zeros(modules: Mapping[str, int], inputs: int) -> LowRank:
        parts, output = [], 0
        for number, outputs in enumerate(modules.values()):
            parts.append(LowRankPart(torch.zeros(outputs, RANK, dtype=torch.bfloat16), RANK * number, output))
            output += outputs
        return LowRank(torch.zeros(RANK * len(modules), inputs, dtype=torch.bfloat16), parts)

    return {each: zeros(each.modules, each.inputs) for each in targets}


def _bytes(low: dict[Target, LowRank]) -> int:
    return sum(each.a.nbytes + sum(part.b.nbytes for part in each.parts) for each in low.values())


def _join(row: int, tokens: int, page: int, held: int = 0, sampling: SamplingParams = GREEDY, slot: int = 0) -> Join:
    held = held or -(-tokens // PAGE)
    wants = (Generate(sampling),)
    return Join(row, [7] * tokens, tokens, wants, [list(range(page, page + held))], row, slot)


def _span(row: int, start: int, count: int) -> Span:
    return Span(row, start, count, samples=1)


def run(bench: Bench, runner: Runner, plans: Iterator[StepPlan]) -> float:
    """Return the seconds of the steps, two in flight."""
    flight: deque[PendingResult] = deque()

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
