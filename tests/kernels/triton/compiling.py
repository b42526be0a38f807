"""Compile the kernels that the families launch, for GPUs that need not be installed; print each kernel's resources.

A separate program, because the test process runs Triton's interpreter: `python -m tests.kernels.triton.compiling
FAMILY` prints one JSON object a line. The families launch their kernels on tensors without storage.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import triton

from infd.groups import Groups
from infd.input_scheme import InputScheme
from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.kernels.families.attention import KeyValuePages
from infd.kernels.families.draw import Drawing, History
from infd.kernels.families.experts import ExpertChanges
from infd.kernels.families.rows import BatchState, DecodeInputs
from infd.kernels.families.span_attention import WHOLE, Reach, SpanBatch
from infd.kernels.recipe import ExpertsRecipe, NormRecipe, RouterRecipe, StackRecipe
from infd.kernels.reference.dense import Plain
from infd.kernels.router import Gating, Router
from infd.kernels.triton.activation import SILU, Activation
from infd.kernels.triton.attention import PagedAttention
from infd.kernels.triton.compiled import compiling
from infd.kernels.triton.compiled import target as gpu_called
from infd.kernels.triton.draw import Draw
from infd.kernels.triton.experts import Experts
from infd.kernels.triton.float8 import multiply_few
from infd.kernels.triton.gather import gather
from infd.kernels.triton.inputs import Inputs, quantize
from infd.kernels.triton.lora import Lora
from infd.kernels.triton.norm import Norm
from infd.kernels.triton.packed import PackedMatrix
from infd.kernels.triton.rope import Rope
from infd.kernels.triton.rows import RowKernels
from infd.kernels.triton.span_attention import SpanAttention
from tests.kernels.paging import PagedSpan, attention_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TARGETS = ("sm_80", "sm_89", "sm_90a", "gfx942")
REFUSED = {("float32, 8 heads of 512", "gfx942")}  # select.py refuses such heads there
NARROW = TARGETS[1:]  # GPUs with fp8 conversions
META = torch.device("meta")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def attention(
    kv_heads: int,
    shared: int,
    head: int,
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
    *,
    held: torch.dtype | None = None,
    sinks: bool = False,
) -> None:
    """Decode one sequence in a step with a prompt."""
    tables = list(range(1, 251))
    spans = [PagedSpan(3000, 1, tables), PagedSpan(100, 600, tables)]
    batch = attention_batch(spans, page_tokens=16, window=window, padding=1, device=META)
    cache = (empty(300, kv_heads, 16, head, dtype=held or dtype) for _ in range(2))
    pages = KeyValuePages(*cache, None if held is None else empty(2, kv_heads, dtype=torch.float32))
    new = torch.empty(602, kv_heads * (shared + 2), head, dtype=dtype, device=META)
    q, k, v = new.split((kv_heads * shared, kv_heads, kv_heads), 1)
    plan = PagedAttention(264).prepare(batch)
    plan.write(k, v, pages)
    offered = empty(kv_heads * shared, dtype=torch.float32) if sinks else None
    plan.run(q, pages, scale=head**-0.5, softcap=softcap, sinks=offered)
    positions, angles = empty(602, dtype=torch.int64), empty(9999, 2, head // 2, dtype=torch.float32)
    Rope().enter(q, k, v, positions, angles, plan, pages)


def decoding(
    kv_heads: int, shared: int, head: int, window: int | None = None, *, held: torch.dtype | None = None
) -> None:
    """Decode sequences in a captured step."""
    batch = attention_batch([PagedSpan(3000, 1, list(range(1, 251)))] * 40, page_tokens=16, window=window, device=META)
    dtype = torch.bfloat16
    cache = (empty(300, kv_heads, 16, head, dtype=held or dtype) for _ in range(2))
    pages = KeyValuePages(*cache, None if held is None else empty(2, kv_heads, dtype=torch.float32))
    plan = PagedAttention(264).captured(batch)
    plan.run(empty(40, kv_heads * shared, head), pages, scale=head**-0.5)
    plan.begin()


def spans(
    heads: int, kv_heads: int, head: int, dtype: torch.dtype, reach: Reach = WHOLE, *, biased: bool = False
) -> None:
    """Attend within two texts, without a cache."""
    q, k, v = empty(600, heads + 2 * kv_heads, head, dtype=dtype).split((heads, kv_heads, kv_heads), 1)
    plan = SpanAttention().prepare(SpanBatch(tokens=600, offsets=[0, 504, 600], device=META))
    bias = empty(heads, 257, dtype=torch.float32) if biased else None
    plan.run(q, k, v, scale=head**-0.5, reach=reach, bias=bias)


def norms(dtype: torch.dtype) -> None:
    """Norm the stream of a model of hidden size 4096, and the heads of its queries."""
    stream, weight = empty(7, 4096, dtype=dtype), empty(4096, dtype=dtype)
    Norm().add_rms_norm(stream, stream, weight, 1e-6)
    Norm().rms_norm(empty(7, 48, 128, dtype=dtype)[:, :32], empty(128, dtype=dtype), 1e-6, 1.0)


def rotations(pairs: int, *, interleaved: bool) -> None:
    q, k, _ = empty(7, 48, 128).split((32, 8, 8), 1)
    positions = empty(7, dtype=torch.int64)
    Rope()(q, k, positions, empty(9999, 2, pairs, dtype=torch.float32), interleaved=interleaved)


def entering(head: int, pairs: int) -> None:
    """Norm and rotate heads, and write them to the cache."""
    batch = attention_batch([PagedSpan(0, 7, [1])], page_tokens=16, device=META)
    pages = KeyValuePages(*(empty(300, 8, 16, head) for _ in range(2)))
    q, k, v = empty(7, 48, head).split((32, 8, 8), 1)
    norm = SimpleNamespace(recipe=lambda: NormRecipe(empty(head), 1e-6, 0.0))
    positions, angles = empty(7, dtype=torch.int64), empty(9999, 2, pairs, dtype=torch.float32)
    Rope().enter(q, k, v, positions, angles, PagedAttention(264).prepare(batch), pages, q_norm=norm, k_norm=norm)


def gates() -> None:
    Activation().silu_mul(empty(7, 2 * 14336))
    Activation().gelu_tanh_mul(empty(7, 2 * 14336))


def draws(dtype: torch.dtype, *, truncated: bool) -> None:
    numbers, ids = empty(7, dtype=torch.float32), empty(7, dtype=torch.int32)
    drawing = Drawing(
        rows=empty(7, dtype=torch.int64),
        largest=numbers,
        seed=empty(7, 2, dtype=torch.int32),
        position=ids,
        temperature=numbers,
        top_k=ids,
        top_p=numbers,
        min_p=numbers,
    )
    Draw()(empty(9, 151936, dtype=dtype), drawing, truncated=truncated)


def penalties() -> None:
    """Apply penalties and a mask."""
    logits, rows = empty(9, 151936, dtype=torch.float32), empty(7, dtype=torch.int64)
    prompt, numbers = empty(7, dtype=torch.int32), empty(7, dtype=torch.float32)
    history = History(empty(9, 40960, dtype=torch.int32), rows, prompt, rows, 3000)
    Draw().penalize_repetition(logits, rows, history, numbers)
    Draw().penalize_answer(logits, rows, history, numbers, numbers)
    Draw().forbid(logits, rows, empty(7, 4748, dtype=torch.int32))


def rows() -> None:
    """Gather the inputs of a step of seven sequences, and append their sampled tokens."""
    kept = BatchState(
        empty(9, 40960, dtype=torch.int32), empty(9, dtype=torch.int64), empty(9, 1, 2560, dtype=torch.int32)
    )
    seven = empty(7, dtype=torch.int64)
    start, table = empty(7, dtype=torch.int32), empty(7, 2560, dtype=torch.int32)
    RowKernels().gather_inputs(kept, DecodeInputs(seven, seven, seven, start, seven, [16], [table], [seven]))
    RowKernels().append(kept, seven, seven, seven)


def adapters(ranks: int, dtype: torch.dtype) -> None:
    """Add to q and v of a fused product, to the embedding, and to the head with its float32 logits."""
    b = [empty(outputs, ranks, dtype=dtype) for outputs in (4096, 1024)]
    parts = [LowRankPart(b[0], 0, 0), LowRankPart(b[1], ranks, 5120)]
    rows, y = empty(40, dtype=torch.int64), empty(99, 6144, dtype=dtype)
    lora = Lora()
    head = [(rows, LowRank(empty(ranks, 4096, dtype=dtype), [LowRankPart(empty(9999, ranks, dtype=dtype), 0, 0)]))]
    lora.add(y, empty(99, 4096, dtype=dtype), [(rows, LowRank(empty(2 * ranks, 4096, dtype=dtype), parts))])
    lora.add(empty(40, 9999, dtype=torch.float32), empty(40, 4096, dtype=dtype), head)
    lora.add_rows(y, empty(99, dtype=torch.int64), [(rows, LowRank(empty(999, ranks, dtype=dtype), parts[:1]))])


def experts(
    kind: Groups | None = None,
    dtype: torch.dtype = torch.bfloat16,
    gating: Gating = SILU,
    *,
    bias: bool = False,
    changed: bool = False,
) -> None:
    """Compute one token and many tokens with experts of 2048 x 768."""
    count, hidden, inner = 128, 2048, 768

    def stack(outputs: int, inputs: int) -> StackRecipe:
        form = Plain((outputs, inputs), dtype) if kind is None else PackedMatrix(outputs, inputs, kind, dtype)
        biases = empty(count, outputs, dtype=dtype) if bias else None
        return StackRecipe(form, empty(count, *form.shape, dtype=form.dtype), biases)

    design = Router(experts=count, chosen=8)
    recipe = ExpertsRecipe(
        router=RouterRecipe(design, empty(count, hidden, dtype=torch.float32), None, None),
        gate_up=stack(2 * inner, hidden),
        gating=gating,
        down=stack(hidden, inner),
    )
    part = LowRankPart(empty(count, inner, 5, dtype=dtype), 0, inner)
    groups = [(empty(1, dtype=torch.int64), LowRank(empty(count, 8, hidden, dtype=dtype)[:, :5], [part]))]
    for tokens in (1, 600):
        x = empty(tokens, hidden, dtype=dtype)
        family = Experts()
        routes = family.route(x, recipe.router)
        y = family.compute(x, routes, recipe, ExpertChanges(groups, []) if changed else None)
        family.add_shared(y, x, x[:, :1])


def packed(kind: Groups, dtype: torch.dtype) -> None:
    """Multiply one row, several and many rows with a matrix of 4096 inputs."""
    form = PackedMatrix(4096, 4096, kind, dtype)
    storage = empty(*form.shape, dtype=form.dtype)
    for rows in (1, 99, 999):
        form.multiply(empty(rows, 4096, dtype=dtype), storage, empty(4096, dtype=dtype))


def scaled(scheme: InputScheme) -> None:
    """Quantize few rows to fp8, and multiply them with a matrix of fp8; round others."""
    x, group = empty(7, 4096), scheme.inputs or 4096
    scale = empty(1, dtype=torch.float32) if scheme.static else None
    given = quantize(x, scheme, scale, 4096, 7)
    weights, scales = empty(4096, 4096, dtype=torch.uint8), empty(4096 // group, 4096, dtype=torch.float32)
    if scheme.inputs in (0, 128):
        multiply_few(given, weights, scales.t(), empty(4096), blocks=bool(scheme.inputs))
    Inputs().round(x, scheme, scale, None)


FAMILIES: dict[str, dict[str, Callable[[], object]]] = {
    "attention": {
        "bfloat16, 32 heads of 128": lambda: attention(8, 4, 128, torch.bfloat16),
        "float16, 32 heads of 64": lambda: attention(8, 4, 64, torch.float16),
        "bfloat16, 16 heads of 256, cap and window": lambda: attention(8, 2, 256, torch.bfloat16, 1024, 50.0),
        "bfloat16, 64 heads of 64, sinks and window": lambda: attention(8, 8, 64, torch.bfloat16, 128, sinks=True),
        "float32, 16 heads of 128": lambda: attention(8, 2, 128, torch.float32),
        "captured, 32 heads of 128": lambda: decoding(8, 4, 128),
        "captured, 16 heads of 256, window": lambda: decoding(8, 2, 256, 1024),
    },
    "large heads": {
        "bfloat16, 8 heads of 512": lambda: attention(2, 4, 512, torch.bfloat16),
        "float32, 8 heads of 256": lambda: attention(2, 4, 256, torch.float32),
        "float32, 8 heads of 512": lambda: attention(2, 4, 512, torch.float32),
        "captured, 8 heads of 512": lambda: decoding(2, 4, 512),
    },
    "narrow cache": {
        "bfloat16, 32 heads of 128": lambda: attention(8, 4, 128, torch.bfloat16, held=torch.float8_e4m3fn),
        "float16, 16 heads of 256": lambda: attention(8, 2, 256, torch.float16, held=torch.float8_e4m3fn),
    },
    "span attention": {
        "bfloat16, 12 heads of 64": lambda: spans(12, 12, 64, torch.bfloat16),
        "float16, 12 heads of 32": lambda: spans(12, 12, 32, torch.float16),
        "bfloat16, 4 heads of 256, window": lambda: spans(4, 1, 256, torch.bfloat16, Reach(256, 256)),
        "bfloat16, 12 heads of 64, biased": lambda: spans(12, 12, 64, torch.bfloat16, biased=True),
        "float32, 12 heads of 64": lambda: spans(12, 12, 64, torch.float32),
    },
    "dense": {
        "norms, bfloat16": lambda: norms(torch.bfloat16),
        "norms, float32": lambda: norms(torch.float32),
        "whole heads turn": lambda: rotations(64, interleaved=False),
        "half a head turns": lambda: rotations(32, interleaved=True),
        "whole heads are normed and turn": lambda: entering(128, 64),
        "heads are normed and half of each turns": lambda: entering(128, 32),
        "gates": gates,
        "pages side by side": lambda: gather(
            *(empty(*shape, dtype=torch.int32) for shape in ((9, 99), (10,), (9,), (891,)))
        ),
        "rows": rows,
    },
    "lora": {
        "bfloat16, rank 16": lambda: adapters(16, torch.bfloat16),
        "float32, rank 64": lambda: adapters(64, torch.float32),
    },
    "packed": {
        "int4, groups of 128": lambda: packed(Groups(4, 128, "BF16"), torch.bfloat16),
        "int4, zero points, reordered": lambda: packed(Groups(4, 32, "F16", zeros=True, order="x"), torch.bfloat16),
        "Q4_K": lambda: packed(Groups(4, 32, "I8", minima=True), torch.bfloat16),
        "Q6_K": lambda: packed(Groups(6, 16, "I8"), torch.bfloat16),
        "NVFP4": lambda: packed(Groups(4, 16, "F32", table="e2m1"), torch.bfloat16),
        "IQ4_NL": lambda: packed(Groups(4, 32, "F16", table="iq4_nl"), torch.float16),
        "int8 in rows": lambda: packed(Groups(8, 4096, "F32"), torch.float16),
        "fp8 in blocks": lambda: packed(Groups(8, 128, "F32", table="e4m3"), torch.bfloat16),
        "fp8, float32": lambda: packed(Groups(8, 4096, "F32", table="e4m3"), torch.float32),
    },
    "scaled": {
        "by token": lambda: scaled(InputScheme("e4m3")),
        "stored scale": lambda: scaled(InputScheme("e4m3", static=True)),
        "blocks of 128": lambda: scaled(InputScheme("e4m3", 128)),
        "groups of 32, powers": lambda: scaled(InputScheme("e4m3", 32, powers=True)),
    },
    "experts": {
        "bfloat16, with adapters": lambda: experts(changed=True),
        "float16, clamped, biases": lambda: experts(
            dtype=torch.float16, gating=Gating(alpha=1.7, limit=7.0, offset=1.0), bias=True
        ),
        "float32, gelu": lambda: experts(dtype=torch.float32, gating=Gating(activation="gelu_pytorch_tanh")),
        "int4, groups of 128": lambda: experts(Groups(4, 128, "BF16")),
        "int8 in rows": lambda: experts(Groups(8, 4096, "F32")),
        "Q4_K": lambda: experts(Groups(4, 32, "I8", minima=True)),
        "MXFP4": lambda: experts(Groups(4, 32, "BF16", table="e2m1"), bias=True),
        "fp8 in blocks": lambda: experts(Groups(8, 128, "F32", table="e4m3")),
    },
    "draw": {
        "among all, float32": lambda: draws(torch.float32, truncated=False),
        "among all, bfloat16": lambda: draws(torch.bfloat16, truncated=False),
        "among the likely, float32": lambda: draws(torch.float32, truncated=True),
        "among the likely, bfloat16": lambda: draws(torch.bfloat16, truncated=True),
        "penalties and masks": penalties,
    },
}


def asked(work: Callable[[], object], target: str) -> Iterator[dict[str, Any]]:
    """Compile the kernels that `work` launches; yield each kernel's name and resources."""
    found: list[tuple[str, int, dict[str, str]]] = []

    def note(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        found.append((src.name, metadata["shared"], metadata_group))

    triton.knobs.compilation.listener = note
    with compiling(gpu_called(target)):
        work()
    for name, shared, files in found:
        yield {"kernel": name, "shared": shared, **used(files), "single": single(files)}


def single(files: dict[str, str]) -> int:
    """Return the number of 16-bit load instructions, which unvectorized code has; 0 without PTX."""
    ptx = next((path for path in files.values() if path.endswith(".ptx")), None)
    return 0 if ptx is None else len(re.findall(r"ld\.global(?:\.\w+)*\.[bu]16\b", Path(ptx).read_text()))


def used(files: dict[str, str]) -> dict[str, int]:
    """Return registers and spilled bytes a thread, read from the compiler's output files."""
    by_kind = {Path(path).suffix: path for path in files.values()}
    if amd := by_kind.get(".amdgcn"):
        found = re.findall(r"\.(\w+): +(\d+)", Path(amd).read_text())
        counts = {key: int(number) for key, number in found}
        spilled = counts["vgpr_spill_count"] + counts["private_segment_fixed_size"]
        return {"registers": counts["vgpr_count"], "spilled": spilled}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "--dump-resource-usage", by_kind[".cubin"]]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = {key: int(number) for key, number in re.findall(r"(\w+):(\d+)", told.stdout)}
    return {"registers": counts["REG"], "spilled": counts["STACK"] + counts["LOCAL"]}


def main(family: str) -> None:
    assert os.environ.get("TRITON_INTERPRET") is None
    for case, work in FAMILIES[family].items():
        for target in NARROW if family in ("narrow cache", "scaled") else TARGETS:
            if (case, target) in REFUSED:
                continue
            for kernel in asked(work, target):
                print(json.dumps({"case": case, "target": target, **kernel}))


if __name__ == "__main__":
    main(sys.argv[1])
