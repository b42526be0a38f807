"""Compile what the kernels' classes launch, for GPUs that are not here; say what each kernel takes of them.

A program of its own, since its parent interprets: `python -m tests.kernels.triton.compiling FAMILY` prints one JSON
object a line. The launches are the classes' own, on tensors without storage, written down instead of made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infd.kernels.ops import Drawing, KeyValuePages, LowRank, LowRankPart
from infd.kernels.triton.activation import Activation
from infd.kernels.triton.attention import PagedAttention
from infd.kernels.triton.draw import Draw
from infd.kernels.triton.lora import Lora
from infd.kernels.triton.norm import Norm
from infd.kernels.triton.rope import Rope
from tests.kernels.paging import PagedSpan, attention_batch

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = {"sm_90a": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
META = torch.device("meta")


class Launch(NamedTuple):
    """One kernel as Triton would compile it for a call."""

    source: ASTSource
    options: dict[str, int]


def recorded(work: Callable[[], object]) -> list[Launch]:
    """Return what `work` launches, each kind of launch once."""
    launches: dict[str, Launch] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launch = describe(kernel, args, named)
        launches[launch.source.hash()] = launch

    original = triton.JITFunction.run
    triton.JITFunction.run = run
    try:
        work()
    finally:
        triton.JITFunction.run = original
    return list(launches.values())


def describe(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False)) | {n: named.pop(n) for n in kernel.arg_names if n in named}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[i,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and not parameter.do_not_specialize:
            attributes[i,] = [["tt.divisibility", 16]]
    return Launch(ASTSource(kernel, signature, constants, attributes), named)


def attention(kv_heads: int, shared: int, head: int, dtype: torch.dtype, window: int | None, softcap: float | None):
    """Decode one sequence beside a prompt."""
    tables = list(range(1, 251))
    spans = [PagedSpan(3000, 1, tables), PagedSpan(100, 600, tables)]
    batch = attention_batch(spans, page_tokens=16, window=window, padding=1, device=META)
    pages = KeyValuePages(*(torch.empty(300, kv_heads, 16, head, dtype=dtype, device=META) for _ in range(2)))
    new = torch.empty(602, kv_heads * (shared + 2), head, dtype=dtype, device=META)
    q, k, v = new.split((kv_heads * shared, kv_heads, kv_heads), 1)
    plan = PagedAttention(264).prepare(batch)
    plan.write(k, v, pages)
    plan.run(q, pages, scale=head**-0.5, softcap=softcap)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def norms(dtype: torch.dtype) -> None:
    """Norm the stream of a model of 4,096, and the heads of its queries."""
    stream, weight = empty(7, 4096, dtype=dtype), empty(4096, dtype=dtype)
    Norm().add_rms_norm(stream, stream, weight, 1e-6)
    Norm().rms_norm(empty(7, 48, 128, dtype=dtype)[:, :32], empty(128, dtype=dtype), 1e-6, 1.0)


def rotations(pairs: int, *, interleaved: bool) -> None:
    q, k, _ = empty(7, 48, 128).split((32, 8, 8), 1)
    positions = empty(7, dtype=torch.int64)
    Rope()(q, k, positions, empty(9999, 2, pairs, dtype=torch.float32), interleaved=interleaved)


def gates() -> None:
    Activation().silu_mul(empty(7, 2 * 14336))
    Activation().gelu_tanh_mul(empty(7, 2 * 14336))


def draws(*, truncated: bool) -> None:
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
    Draw()(empty(9, 151936, dtype=torch.float32), drawing, truncated=truncated)


def adapters(ranks: int, dtype: torch.dtype) -> None:
    """Change queries and values of a fused product, and the embedding."""
    b = [empty(outputs, ranks, dtype=dtype) for outputs in (4096, 1024)]
    parts = [LowRankPart(b[0], 0, 0), LowRankPart(b[1], ranks, 5120)]
    rows, y = empty(40, dtype=torch.int64), empty(99, 6144, dtype=dtype)
    lora = Lora()
    lora.add(y, empty(99, 4096, dtype=dtype), [(rows, LowRank(empty(2 * ranks, 4096, dtype=dtype), parts))])
    lora.add_rows(y, empty(99, dtype=torch.int64), [(rows, LowRank(empty(999, ranks, dtype=dtype), parts[:1]))])


FAMILIES: dict[str, dict[str, Callable[[], object]]] = {
    "attention": {
        "bfloat16, 32 heads of 128": lambda: attention(8, 4, 128, torch.bfloat16, None, None),
        "float16, 32 heads of 64": lambda: attention(8, 4, 64, torch.float16, None, None),
        "bfloat16, 16 heads of 256, cap and window": lambda: attention(8, 2, 256, torch.bfloat16, 1024, 50.0),
        "float32, 16 heads of 128": lambda: attention(8, 2, 128, torch.float32, None, None),
    },
    "dense": {
        "norms, bfloat16": lambda: norms(torch.bfloat16),
        "norms, float32": lambda: norms(torch.float32),
        "whole heads turn": lambda: rotations(64, interleaved=False),
        "half a head turns": lambda: rotations(32, interleaved=True),
        "gates": gates,
    },
    "lora": {
        "bfloat16, rank 16": lambda: adapters(16, torch.bfloat16),
        "float32, rank 64": lambda: adapters(64, torch.float32),
    },
    "draw": {
        "among all": lambda: draws(truncated=False),
        "among the likely": lambda: draws(truncated=True),
    },
}


def compiled(launch: Launch, name: str) -> dict[str, int]:
    """Return registers of a thread, bytes of shared memory, and what did not fit into registers."""
    kernel = triton.compile(launch.source, target=TARGETS[name], options=launch.options)
    used = {"shared": kernel.metadata.shared}
    if name == "gfx942":
        found = re.findall(r"\.(\w+): +(\d+)", kernel.asm["amdgcn"])
        counts = {key: int(number) for key, number in found}
        return used | {
            "registers": counts["vgpr_count"],
            "spilled": counts["vgpr_spill_count"] + counts["private_segment_fixed_size"],
        }
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    counts = {key: int(number) for key, number in re.findall(r"(\w+):(\d+)", told.stdout)}
    return used | {"registers": counts["REG"], "spilled": counts["STACK"] + counts["LOCAL"]}


def main(family: str) -> None:
    assert os.environ.get("TRITON_INTERPRET") is None
    for case, work in FAMILIES[family].items():
        for launch in recorded(work):
            for target in TARGETS:
                kernel = launch.source.name
                print(json.dumps({"kernel": kernel, "case": case, "target": target, **compiled(launch, target)}))


if __name__ == "__main__":
    main(sys.argv[1])
