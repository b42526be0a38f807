"""Kernels and whole steps on a GPU, each figure beside what the machine could do at best.

Weights are random, so nothing is fetched. First the machine: bytes a second of a copy, and the rate of a large matrix
product. Then every kernel at a model's own sizes, compared with the reference and timed; then whole steps of the
runner, as the scheduler would plan them, two in flight. A floor is the time of moving the bytes that must be moved, or
of the arithmetic that must be done, whichever is longer; `x` says how many times that long it took. Attention is
timed with each kernel that does not refuse, and decoding twice: launched kernel by kernel, and replayed as a graph.

    python bench/gpu.py --models qwen3-0.6b qwen3-8b llama-3.1-8b
    python bench/gpu.py --device cpu --models tiny    # tries the program, says nothing
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infd.config import CacheConfig, Config, DeviceConfig, SchedulerConfig
from infd.kernels.ops import AttentionBatch, Drawing, KeyValuePages
from infd.kernels.reference import attention as reference_attention
from infd.kernels.reference import dense
from infd.kernels.select import CANDIDATES, Facts, insisting, select
from infd.models import registry
from infd.request import Request, SamplingParams
from infd.runner.design import Design
from infd.runner.loading import assemble
from infd.runner.memory import Arena
from infd.runner.pulse import Pulse
from infd.runner.vram import bank_of
from infd.scheduler.plan import Join, Span, StepPlan
from infd.scheduler.sequence import Sequence
from infd.weights.load import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infd.kernels.ops import Attention, Ops
    from infd.models.base import Model
    from infd.runner.runner import Landing, Runner

PAGE = 16
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_QWEN3,
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}


class Machine(NamedTuple):
    """What a device can do: bytes a second, read and written; operations a second of a matrix product."""

    bytes_s: float
    flops: float

    def floor(self, bytes_moved: float, operations: float = 0.0) -> float:
        return max(bytes_moved / self.bytes_s, operations / self.flops)


class Bench:
    """One device, and how to time on it."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self._rounds = rounds
        self.machine = self._measure()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], *, times: int = 20) -> float:
        """Return the median of some rounds, each the mean of `times` calls. The first call is not counted."""
        work()
        rounds = []
        for _ in range(self._rounds):
            self.wait()
            started = time.perf_counter()
            for _ in range(times):
                work()
            self.wait()
            rounds.append((time.perf_counter() - started) / times)
        return statistics.median(rounds)

    def _measure(self) -> Machine:
        large = self.device.type == "cuda"
        source = torch.zeros(2**31 if large else 2**24, dtype=torch.uint8, device=self.device)
        target, size = torch.empty_like(source), 8192 if large else 256
        square = torch.randn(size, size, device=self.device).bfloat16()
        return Machine(
            2 * source.numel() / self.seconds(lambda: target.copy_(source)),
            2 * size**3 / self.seconds(lambda: square @ square),
        )


def report(name: str, seconds: float, floor: float, note: str = "") -> None:
    print(f"{name:44} {seconds * 1e6:11,.1f} us   floor {floor * 1e6:10,.1f} us   x{seconds / floor:6.2f}   {note}")


class Shape(NamedTuple):
    """Sizes of a model that its kernels see."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head = config.get("head_dim", hidden // heads)
        kv_heads = config["num_key_value_heads"]
        return cls(hidden, config["intermediate_size"], heads, kv_heads, head, config["vocab_size"])


def kernels(bench: Bench, ops: Ops, config: dict[str, Any], batches: list[int], context: int) -> None:
    """Compare each family with the reference, at the sizes of one layer, and time it."""
    shape, device = Shape.of(config), bench.device

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).bfloat16()

    norm, gate = "add_rms_norm", "silu_mul"
    for tokens in (*batches, context):
        x, residual, weight = draw(tokens, shape.hidden), draw(tokens, shape.hidden), draw(shape.hidden)
        gates = draw(tokens, 2 * shape.inner)
        for family, plain, name, given, moved in (
            (ops.norm, dense.Norm(), norm, (x, residual, weight, 1e-6), 4 * x.nbytes),
            (ops.activation, dense.Activation(), gate, (gates,), 1.5 * gates.nbytes),
        ):
            work, reference = partial(getattr(family, name), *given), partial(getattr(plain, name), *given)
            off = _off(work(), reference())
            report(f"{name} of {tokens} tokens", bench.seconds(work), bench.machine.floor(moved), off)
    for batch in batches:
        sampling(bench, ops, shape, batch)
    mixes = [[(context - 1, 1)] * batch for batch in batches]
    mixes += [[(0, context)], [(context - 1, 1)] * batches[-1] + [(0, context)]]
    for name, each in attentions(ops, device):
        for spans in mixes:
            attention(bench, name, each, shape, spans)


def attentions(ops: Ops, device: torch.device) -> Iterator[tuple[str, Attention]]:
    """Return what was chosen, and what else could have been."""
    chosen = next(row.chosen for row in ops.selection if row.family == "attention")
    yield chosen, ops.attention
    facts = Facts(device=device, dtype=torch.bfloat16)
    for each in CANDIDATES["attention"]:
        if each.name not in (chosen, "reference") and each.refuses(facts) is None:
            yield each.name, select(device, torch.bfloat16, insisting(each.name, CANDIDATES)).attention


def attention(bench: Bench, kernel: str, family: Attention, shape: Shape, spans: list[tuple[int, int]]) -> None:
    device = bench.device
    pages = [-(-(start + count) // PAGE) for start, count in spans]
    cache = KeyValuePages(
        *(torch.randn(sum(pages) + 1, shape.kv_heads, PAGE, shape.head, device=device).bfloat16() for _ in range(2))
    )
    table = torch.zeros(len(spans), max(pages), dtype=torch.int32)
    first = 1
    for row, held in enumerate(pages):
        table[row, :held] = torch.arange(first, first + held)
        first += held
    offsets = [0]
    for _, count in spans:
        offsets.append(offsets[-1] + count)
    batch = AttentionBatch(
        page_tokens=PAGE,
        window=None,
        starts=[start for start, _ in spans],
        counts=[count for _, count in spans],
        offsets=offsets,
        start=torch.tensor([start for start, _ in spans], dtype=torch.int32, device=device),
        table=table.to(device),
        slots=torch.zeros(offsets[-1], dtype=torch.int64, device=device),
    )
    q = torch.randn(offsets[-1], shape.heads, shape.head, device=device).bfloat16()
    plan, scale = family.prepare(batch), shape.head**-0.5
    plain = reference_attention.PagedAttention().prepare(batch)
    seen = sum(count * (start + (count + 1) / 2) for start, count in spans)
    moved = 2 * sum(start + count for start, count in spans) * shape.kv_heads * shape.head * 2 + 2 * q.nbytes
    name = f"{kernel} attention, {len(spans)} spans of {offsets[-1]}"
    report(
        name,
        bench.seconds(lambda: plan.run(q, cache, scale=scale)),
        bench.machine.floor(moved, 4 * seen * shape.heads * shape.head),
        _off(plan.run(q, cache, scale=scale), plain.run(q, cache, scale=scale)),
    )


def sampling(bench: Bench, ops: Ops, shape: Shape, rows: int) -> None:
    logits = 4 * torch.randn(rows, shape.vocab, device=bench.device)
    numbers = torch.ones(rows, device=bench.device)
    ids = torch.arange(rows, dtype=torch.int32, device=bench.device)
    drawing = Drawing(
        rows=ids.long(),
        largest=logits.amax(-1),
        seed=torch.stack((ids, ids), 1),
        position=ids,
        temperature=numbers,
        top_k=50 * torch.ones_like(ids),
        top_p=0.9 * numbers,
        min_p=0 * numbers,
    )
    for name, truncated in (("whole", False), ("top-k and top-p", True)):
        taken = bench.seconds(lambda truncated=truncated: ops.draw(logits, drawing, truncated=truncated))
        report(f"a token of {rows} rows, {name}", taken, bench.machine.floor(logits.nbytes))


def _off(given: Any, expected: Any) -> str:
    """Say how far results, one or several, are from the reference's at most."""
    if isinstance(given, torch.Tensor):
        given, expected = [given], [expected]
    worst = max(float((one.float() - other.float()).abs().max()) for one, other in zip(given, expected, strict=True))
    return f"off by {worst:.3g}"


def fill(bench: Bench, ops: Ops, config: dict[str, Any], *, length: int) -> tuple[Model, Arena]:
    """Return a model of random weights, and where they lie."""
    dtype, device = torch.bfloat16, bench.device
    model = registry.build(config, ops, dtype=dtype, device=device, max_len=length)
    size = sum(torch.Size(p.shape).numel() * p.dtype.itemsize + ALIGNMENT for p in model.parameters)
    weights = Arena(size, device, "weights")
    for parameter in model.parameters:
        parameter.tensor = weights.take(tuple(parameter.shape), parameter.dtype)
        for source in parameter.sources:
            parameter.place(source.row, 0.02 * torch.randn(source.shape, device=device).to(dtype))
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
        settings, Design(model, ops, torch.bfloat16, bench.device, length), bank_of(bench.device), weights, Pulse()
    ).runner
    with runner.active():
        while runner.idle():
            pass
    return runner


def steps(
    bench: Bench, model: Model, runner: Runner, config: dict[str, Any], arguments: argparse.Namespace, how: str
) -> None:
    """Time prompts and decoding. how: in which way steps are issued"""
    machine = bench.machine
    parameters = [parameter.tensor.nbytes for parameter in model.parameters]
    tied = config["tie_word_embeddings"]
    ends = parameters[0]  # the embedding, looked up; the head is as large, unless it is the embedding
    read = sum(parameters) - (0 if tied else ends)
    inner = (read - ends) / 2  # numbers that every token is multiplied with
    layers = sum(len(group.layers) for group in model.cache_layout(PAGE).groups)
    token = layers * sum(each.bytes for each in model.page_tensors(PAGE)) / PAGE  # in the cache
    length, context, count = arguments.prompt, arguments.context, arguments.steps
    run(bench, runner, iter([prompt(length)]))
    taken = run(bench, runner, iter([prompt(length)] * 4)) / 4
    report(
        f"a prompt of {length}, {how}", taken, machine.floor(read, 2 * inner * length), f"{length / taken:,.0f} tok/s"
    )
    for batch in arguments.batches:
        run(bench, runner, decoding(batch, context - count, 2))
        taken = run(bench, runner, decoding(batch, context - count, count)) / count
        floor = machine.floor(read + batch * context * token, read * batch)
        report(f"{batch} that decode behind {context}, {how}", taken, floor, f"{batch / taken:,.0f} tok/s")


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
    arguments = parser.parse_args()
    with torch.inference_mode():
        bench = Bench(torch.device(arguments.device), arguments.rounds)
        ops = select(bench.device, torch.bfloat16)
        for row in ops.describe():
            print(row)
        print(f"copies {bench.machine.bytes_s / 1e9:,.0f} GB/s, multiplies {bench.machine.flops / 1e12:,.1f} TFLOP/s")
        for name in arguments.models:
            print(f"\n{name}")
            kernels(bench, ops, MODELS[name], arguments.batches, arguments.context)
            length = max(arguments.context, arguments.prompt) + PAGE
            model, weights = fill(bench, ops, MODELS[name], length=length)
            for how, graphs in (("launched", False), ("replayed", True)):
                rows = max(arguments.batches)
                runner = put_together(bench, ops, model, weights, rows=rows, length=length, graphs=graphs)
                print(f"{how}: {runner.facts()}")
                with runner.active():
                    steps(bench, model, runner, MODELS[name], arguments, how)
                del runner
            del model, weights


if __name__ == "__main__":
    main()
