"""Measure steps of mixtures of experts with random weights against what memory and matrix products allow.

Decoding is bound by memory: `share` is the time in which the weights that the step's tokens chose would be read, at the
rate of MemoryProbe, over the step's time. A prompt is bound by products: `share` is the time of the same FLOPs at the
rate of dense products of 32 rows in the same form, over the step's time. Sampling is not part of a step here.

    python bench/experts.py --shape granite --form bfloat16 int8 int4 --threads 2
    python bench/experts.py --shape olmoe --form int4 --only prompt --rounds 21
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from bandwidth import MemoryProbe
from native_kernels import require_native_kernels

from infd.kernels.cpu.linear import PANEL
from infd.kernels.cpu.product import Addressable
from infd.kernels.families.attention import AttentionBatch, KeyValuePages
from infd.kernels.select import CANDIDATES, quantized, select
from infd.models import registry
from infd.models.base import Batch, SampledBatch
from infd.models.parameter import Matrix, MatrixStack
from infd.runner.arenas.arena import Arena
from infd.weights.load import required_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from infd.kernels.families.attention import AttentionPlan
    from infd.kernels.families.matrices import Form
    from infd.kernels.ops import Ops
    from infd.models.base import Model
    from infd.models.parameter import Parameter, Source

COMMON = {"max_position_embeddings": 4096, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "granite": {  # granite-3.1-1b-a400m
            "architectures": ["GraniteMoeForCausalLM"],
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "vocab_size": 49_155,
            "tie_word_embeddings": True,
        },
        "olmoe": {  # OLMoE-1B-7B with half its layers
            "architectures": ["OlmoeForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 50_304,
            "tie_word_embeddings": False,
        },
        "gpt-oss": {  # gpt-oss-20b with 4 of its 24 layers
            "architectures": ["GptOssForCausalLM"],
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201_088,
            "tie_word_embeddings": False,
        },
    }
)
CPU = torch.device("cpu")
PAGE = 16
LENGTH = 64  # tokens of a decoding sequence
PROMPT = 512
DENSE_ROWS = 32
DENSE_BYTES = 2**28  # of dense matrices, which caches do not hold


class Mixture:
    """A model with random weights, and the last routes of its steps."""

    def __init__(self, config: Mapping[str, Any], form: str) -> None:
        self.ops: Ops = select(CPU, torch.bfloat16, CANDIDATES if form == "bfloat16" else quantized(form))
        self.model: Model = registry.build(
            {**config, **COMMON}, self.ops, dtype=torch.bfloat16, device=CPU, max_len=4096, stored={}
        )
        arena = Arena(required_bytes(self.model), CPU, "weights")
        for parameter in self.model.parameters:
            parameter.tensor = arena.take(parameter.shape, parameter.dtype)
            fill(parameter)
        while arena.collapse():
            pass
        layers = config["num_hidden_layers"]
        self._cache = [
            KeyValuePages(*(torch.zeros(512, *t.shape, dtype=t.dtype) for t in self.model.page_tensors(PAGE)))
            for _ in range(layers)
        ]
        self._vocabulary = config["vocab_size"]
        self.routes = torch.empty(0)

    def step(self, rows: int, count: int) -> Callable[[], Tensor]:
        """Return a step in which each of `rows` sequences computes `count` tokens, and samples the last of a prompt."""
        length = count if count > 1 else LENGTH
        pages, start, total = -(-length // PAGE), length - count, rows * count
        table = torch.arange(1, rows * pages + 1, dtype=torch.int32).view(rows, pages)
        positions = (start + torch.arange(count)).repeat(rows)
        row = torch.arange(rows).repeat_interleave(count)
        slots = table[row, positions // PAGE].long() * PAGE + positions % PAGE

        groups = self.model.cache_layout(PAGE).groups

        def prepared(number: int, starts: list[int], counts: list[int], slots: Tensor) -> AttentionPlan:
            batch = AttentionBatch(
                page_tokens=PAGE,
                window=groups[number].window,
                starts=starts,
                counts=counts,
                offsets=[sum(counts[:i]) for i in range(len(counts) + 1)],
                start=torch.tensor(starts, dtype=torch.int32),
                table=table,
                slots=slots,
            )
            return self.ops.attention.prepare(batch)

        def compute() -> Tensor:
            tokens = torch.randint(self._vocabulary, (total,))
            plans = [prepared(number, [start] * rows, [count] * rows, slots) for number in range(len(groups))]
            sizes = self.model.experts
            assert sizes is not None
            self.routes = torch.full((total, sizes.layers, sizes.chosen), -1, dtype=torch.int16)
            batch = Batch(tokens=tokens, positions=positions, attention=plans, cache=self._cache, routes=self.routes)
            if count > 1:
                last = torch.tensor([total - 1])
                group = max(range(len(groups)), key=lambda number: max(groups[number].layers))
                batch.sampled = SampledBatch(last, prepared(group, [length - 1], [1], slots[-1:]))
            return self.model.logits(self.model.forward(batch))

        return compute

    def bytes_read(self) -> int:
        """Return the bytes of weights that the last step read: all but the embedding's rows and unchosen experts."""
        size = 0
        stacks = 0
        for parameter in self.model.parameters:
            whole = parameter.tensor.numel() * parameter.tensor.element_size()
            if isinstance(parameter, MatrixStack):
                chosen = len(self.routes[:, stacks // 2].unique())  # gate and up, down
                stacks += 1
                whole = chosen * _bytes_of(parameter.form, parameter.outputs)
            elif isinstance(parameter, Matrix):
                whole = _bytes_of(parameter.form, sum(source.shape[0] for source in parameter.sources))
            size += whole if isinstance(parameter, MatrixStack) or self._reads_whole(parameter) else 0
        return size

    def _reads_whole(self, parameter: Parameter) -> bool:
        tied = not any("lm_head" in each.name for other in self.model.parameters for each in other.sources)
        return tied or not any("embed_tokens" in source.name for source in parameter.sources)

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of a prompt's products with matrices, of which the last layer and the head sample one."""
        sizes, numbers, experts = self.model.experts, 0, 0
        assert sizes is not None
        for parameter in self.model.parameters:
            shapes = [source.shape for source in parameter.sources]
            if isinstance(parameter, MatrixStack):
                experts += sum(a * b for a, b in self._matrices(parameter)) * sizes.chosen // sizes.experts
            elif isinstance(parameter, Matrix) and not any(
                name in source.name for source in parameter.sources for name in ("embed_tokens", "lm_head")
            ):
                numbers += sum(rows * columns for rows, columns in shapes)
        layers = sizes.layers
        return 2 * tokens * (numbers + experts * (layers - 1) // layers)

    @staticmethod
    def _matrices(stack: MatrixStack) -> list[tuple[int, int]]:
        return [(source.rows, _inputs(source)) for source in stack.sources]


def fill(parameter: Parameter) -> None:
    """Fill a parameter with random numbers: experts of a stack are alike, in memory of their own."""
    if isinstance(parameter, MatrixStack):
        inputs = _inputs(parameter.sources[0])
        parameter.form.place(parameter.tensor[0], 0, _drawn(parameter.outputs, inputs))
        parameter.tensor[1:] = parameter.tensor[0]
    elif isinstance(parameter, Matrix):
        inputs = parameter.sources[0].shape[-1]
        for source in parameter.sources:
            parameter.form.place(parameter.tensor, source.row, _drawn(source.shape[0], inputs))
    else:
        parameter.tensor.copy_(torch.randn(parameter.shape) / 32)


def _bytes_of(form: Form, outputs: int) -> int:
    """Return the bytes that a product with a matrix of `outputs` outputs reads."""
    assert isinstance(form, Addressable)
    return -(-outputs // PANEL) * form.panel_bytes


def _inputs(source: Source) -> int:
    return source.shape[-2 if source.view is not None and source.view.turned else -1]


def _drawn(outputs: int, inputs: int) -> Tensor:
    return (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16()


def dense(mixture: Mixture) -> Callable[[], float]:
    """Return a function that multiplies DENSE_ROWS rows with matrices of an expert's shape, and returns its FLOPs/s."""
    stack = next(each for each in mixture.model.parameters if isinstance(each, MatrixStack))
    outputs, inputs = 4 * stack.outputs, _inputs(stack.sources[0])
    form = mixture.ops.linear.form(outputs, inputs, torch.bfloat16)
    size = form.dtype.itemsize
    for length in form.shape:
        size *= length
    count = -(-DENSE_BYTES // size)
    arena = Arena(count * (size + 64), CPU, "weights")
    held = [arena.take(form.shape, form.dtype) for _ in range(count)]
    form.place(held[0], 0, _drawn(outputs, inputs))
    for each in held[1:]:
        each.copy_(held[0])
    while arena.collapse():
        pass
    x = torch.randn(DENSE_ROWS, inputs).bfloat16()

    def rate() -> float:
        started = time.perf_counter()
        for each in held:
            form.multiply(x, each)
        return 2 * DENSE_ROWS * outputs * inputs * count / (time.perf_counter() - started)

    return rate


def seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def report(name: str, taken: Sequence[float], limit: str, shares: Sequence[float]) -> None:
    spread = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
    print(f"{name:24} {statistics.median(taken) * 1e3:8.2f} ms, {limit}: share {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="granite")
    parser.add_argument("--form", nargs="+", default=["bfloat16"], choices=["bfloat16", "int8", "int4"])
    parser.add_argument("--only", choices=["decode", "prompt"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    require_native_kernels()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with torch.inference_mode(), MemoryProbe(sorted(os.sched_getaffinity(0))[: arguments.threads]) as probe:
        for form in arguments.form:
            mixture = Mixture(SHAPES[arguments.shape], form)
            for rows in (1, 8) if arguments.only != "prompt" else ():
                step, taken, shares, rates = mixture.step(rows, 1), [], [], []
                step()
                for _ in range(arguments.rounds):
                    rates.append(probe.gb_s() * 1e9)
                    for _ in range(8):
                        taken.append(seconds(step))
                        shares.append(mixture.bytes_read() / rates[-1] / taken[-1])
                limit = f"{mixture.bytes_read() / 1e6:.0f} MB at {statistics.median(rates) / 1e9:.1f} GB/s"
                report(f"{arguments.shape} {form:8} {rows} rows", taken, limit, shares)
            if arguments.only != "decode":
                step, rate, taken, shares = mixture.step(1, PROMPT), dense(mixture), [], []
                step()
                rates = []
                for _ in range(arguments.rounds):
                    rates.append(rate())
                    taken.append(seconds(step))
                    shares.append(mixture.flops(PROMPT) / rates[-1] / taken[-1])
                limit = f"{mixture.flops(PROMPT) / 1e9:.0f} GFLOP, dense {statistics.median(rates) / 1e9:.0f} GFLOP/s"
                report(f"{arguments.shape} {form:8} prompt", taken, limit, shares)


if __name__ == "__main__":
    main()
