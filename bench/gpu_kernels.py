"""The kernels' part of bench/gpu.py: each family at one layer's sizes, compared with the reference and timed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_machine import PAGE, Bench, Shape

from infd.kernels.ops import AttentionBatch, Drawing, KeyValuePages
from infd.kernels.reference import attention as reference_attention
from infd.kernels.reference import dense
from infd.kernels.select import CANDIDATES, Facts, insisting, select

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.kernels.ops import Attention, Ops


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
            bench.figures.report(f"{name} of {tokens} tokens", bench.seconds(work), bench.machine.floor(moved), off)
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
    bench.figures.report(
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
        bench.figures.report(f"a token of {rows} rows, {name}", taken, bench.machine.floor(logits.nbytes))


def _off(given: Any, expected: Any) -> str:
    """Say how far results, one or several, are from the reference's at most."""
    if isinstance(given, torch.Tensor):
        given, expected = [given], [expected]
    worst = max(float((one.float() - other.float()).abs().max()) for one, other in zip(given, expected, strict=True))
    return f"off by {worst:.3g}"
