"""`kernels` of bench/gpu.py: compare each family with the reference at one layer's sizes, and time it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_machine import PAGE, Bench, Shape

from infd.kernels.families.attention import AttentionBatch, KeyValuePages
from infd.kernels.families.draw import Drawing, History
from infd.kernels.reference import attention as reference_attention
from infd.kernels.reference import dense
from infd.kernels.reference.drawing import draw
from infd.kernels.select import CANDIDATES, Facts, insisting, select

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpu_machine import Timed

    from infd.kernels.families.attention import Attention
    from infd.kernels.families.draw import Draw
    from infd.kernels.ops import Ops

IMPOSSIBLE = -1e30  # replaces -inf in comparisons


def kernels(
    bench: Bench, ops: Ops, config: dict[str, Any], batches: list[int], context: int, only: Sequence[str]
) -> None:
    """Compare each family with the reference at one layer's sizes, and time it.

    only  names of kernels to measure; empty: all
    """
    shape, device = Shape.of(config), bench.device

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).bfloat16()

    norm, gate = "add_rms_norm", "silu_mul"
    for tokens in (*batches, context):
        x, residual, weight = drawn(tokens, shape.hidden), drawn(tokens, shape.hidden), drawn(shape.hidden)
        gates = drawn(tokens, 2 * shape.inner)
        for family, plain, name, given, moved in (
            ("norm", dense.Norm(), norm, (x, residual, weight, 1e-6), 4 * x.nbytes),
            ("activation", dense.Activation(), gate, (gates,), 1.5 * gates.nbytes),
        ):
            expected = getattr(plain, name)(*given)
            for kernel, each in alternatives(family, ops, device, only):
                work = partial(getattr(each, name), *_fresh(given))
                off = _off(work(), expected)
                taken = bench.timed(work)  # inputs modified in place are reused as they are
                bench.figures.kernel(f"{kernel} {name} of {tokens} tokens", taken, bench.machine.floor(moved), off=off)
        entries(bench, ops, shape, tokens, only)
    for batch in batches:
        shaping(bench, ops, shape, batch, context)
        sampling(bench, ops, shape, batch)
    mixes = [[(context - 1, 1)] * batch for batch in batches]
    mixes += [[(0, context)], [(context - 1, 1)] * batches[-1] + [(0, context)]]
    for name, each in attentions(ops, device, only):
        for spans in mixes:
            attention(bench, name, each, shape, spans)


def alternatives(family: str, ops: Ops, device: torch.device, only: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Return a family's chosen kernel, and the others available."""
    ops.request(family)
    chosen = next(row.chosen for row in ops.selection if row.family == family)
    facts = Facts(device=device, dtype=torch.bfloat16)
    for each in CANDIDATES[family]:
        if only and each.name not in only:
            continue
        if each.name == chosen:
            yield chosen, getattr(ops, family)
        elif each.name != "reference" and each.refuses(facts) is None:
            yield each.name, getattr(select(device, torch.bfloat16, insisting(each.name, CANDIDATES)), family)


def attentions(ops: Ops, device: torch.device, only: Sequence[str]) -> Iterator[tuple[str, Attention]]:
    """Return the chosen attention kernel and the others available, FlashInfer's in each variant."""
    for name, each in alternatives("attention", ops, device, only):
        if name != "flashinfer":
            yield name, each
            continue
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        for backend in ("fa2", "fa3") if hopper else ("fa2",):
            yield f"{name} {backend}", type(each)(backend=backend)
        yield f"{name} planned", type(each)(planned=True)


def entries(bench: Bench, ops: Ops, shape: Shape, tokens: int, only: Sequence[str]) -> None:
    """Time the work before attention: q and k are rotated, k and v written to the cache."""
    device = bench.device
    heads = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.head, device=device).bfloat16()
    q, k, v = heads.split_with_sizes((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    cache = KeyValuePages(
        *(torch.zeros(tokens // PAGE + 2, shape.kv_heads, PAGE, shape.head, device=device).bfloat16() for _ in range(2))
    )
    positions = torch.arange(tokens, device=device)
    table = torch.rand(tokens, 2, shape.head // 2, device=device)
    batch = AttentionBatch(
        page_tokens=PAGE,
        window=None,
        starts=[0],
        counts=[tokens],
        offsets=[0, tokens],
        start=torch.zeros(1, dtype=torch.int32, device=device),
        table=torch.arange(1, tokens // PAGE + 2, dtype=torch.int32, device=device)[None],
        slots=positions + PAGE,
    )
    expected = dense.Rope()(q, k, positions, table)[0]
    writers = dict(alternatives("attention", ops, device, only))
    for name, rope in alternatives("rope", ops, device, only):
        plan = writers.get(name, ops.attention).prepare(batch)
        work = partial(rope.enter, q, k, v, positions, table, plan, cache)
        off = _off(work(), expected)
        floor = bench.machine.floor(2 * heads.nbytes)
        bench.figures.kernel(f"{name} entry of {tokens} tokens", bench.timed(work), floor, off=off)


def attention(bench: Bench, kernel: str, family: Attention, shape: Shape, spans: list[tuple[int, int]]) -> Timed:
    """Report attention of a step of `spans`, each (start, count); return its time."""
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
    taken = bench.timed(lambda: plan.run(q, cache, scale=scale))
    bench.figures.kernel(
        name,
        taken,
        bench.machine.floor(moved, 4 * seen * shape.heads * shape.head),
        off=_off(plan.run(q, cache, scale=scale), plain.run(q, cache, scale=scale)),
    )
    return taken


def shaping(bench: Bench, ops: Ops, shape: Shape, rows: int, context: int) -> None:
    """Time penalties over all known tokens, and a grammar's mask."""
    device = bench.device
    logits = 4 * torch.randn(rows, shape.vocab, device=device)
    ids, numbers = torch.arange(rows, device=device), torch.full((rows,), 1.1, device=device)
    known = torch.randint(shape.vocab, (rows, context), dtype=torch.int32, device=device)
    prompt = torch.full((rows,), context // 2, dtype=torch.int32, device=device)
    history = History(known, ids, prompt, torch.full_like(ids, context), context)
    bits = torch.randint(-(2**31), 2**31, (rows, -(-shape.vocab // 32)), dtype=torch.int32, device=device)

    def penalize(family: Draw, logits: torch.Tensor) -> None:
        family.penalize_repetition(logits, ids, history, numbers)
        family.penalize_answer(logits, ids, history, numbers, numbers)

    def forbid(family: Draw, logits: torch.Tensor) -> None:
        family.forbid(logits, ids, bits)

    for name, shape_them, moved in (
        ("penalties", penalize, 4 * known.nbytes),  # tokens are read twice, logits read and written
        ("a mask", forbid, bits.nbytes + logits.nbytes),
    ):
        given, expected = logits.clone(), logits.clone()
        shape_them(ops.draw, given)
        shape_them(draw.Draw(), expected)
        off = _off(given.clamp(min=IMPOSSIBLE), expected.clamp(min=IMPOSSIBLE))
        taken = bench.timed(partial(shape_them, ops.draw, given))
        bench.figures.kernel(f"{name} of {rows} rows", taken, bench.machine.floor(moved), off=off)


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
        work = partial(ops.draw, logits, drawing, truncated=truncated)
        others = int((work() != draw.Draw()(logits, drawing, truncated=truncated)).sum())
        floor = bench.machine.floor(logits.nbytes)
        bench.figures.kernel(f"a token of {rows} rows, {name}", bench.timed(work), floor, others=others)


def _fresh(given: tuple[Any, ...]) -> list[Any]:
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in given]


def _off(given: Any, expected: Any) -> float:
    """Return the largest absolute difference between results, one or several, and the reference's."""
    if isinstance(given, torch.Tensor):
        given, expected = [given], [expected]
    return max(float((one.float() - other.float()).abs().max()) for one, other in zip(given, expected, strict=True))
