"""Captured decoding steps: FlashInfer's buffers have fixed addresses, and later replays compute right results."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from infd.kernels.families.attention import FLOAT8, AttentionBatch, KeyValuePages
from tests.kernels.attention_case import KV_HEADS, Case, bits
from tests.kernels.flashinfer.documented import Package, Plain, gather
from tests.runner.recording import Recordings

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import Attention

SIZE, HEAD, SHARED = 3, 64, 2
WIDTH, PAGES = 12, 40  # of a table, of the cache
STEPS = ([5, 0, 40], [6, 1, 41], [100, 15, 16], [0, 0, 0], [60, 170, 2])  # positions of each step's tokens
DECODER = "BatchDecodeWithPagedKVCacheWrapper"


class Steps:
    """A step of two layers, whose tensors are refilled before each replay."""

    def __init__(
        self,
        plans: Attention,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dtype: torch.dtype = torch.float32,
        held: torch.dtype | None = None,
        head: int = HEAD,
        device: str = "cpu",
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.page, self.window, self.softcap, self.dtype, self.held = 16, window, softcap, dtype, held
        self.head = head
        self._start, self._slots = zeros(SIZE, dtype=torch.int32), zeros(SIZE, dtype=torch.int64)
        self._table = zeros(SIZE, WIDTH, dtype=torch.int32)
        self._new = zeros(2, SIZE, KV_HEADS, head)
        self._q = zeros(SIZE, KV_HEADS * SHARED, head)
        self._sinks = torch.randn(KV_HEADS * SHARED) if sinks else None
        self._sunk = None if self._sinks is None else self._sinks.to(device)
        scales = None if held is None else zeros(2, KV_HEADS, dtype=torch.float32)
        self._layers = [
            KeyValuePages(*zeros(2, PAGES, KV_HEADS, self.page, head, dtype=held or dtype), scales) for _ in range(2)
        ]
        self._out = [torch.zeros_like(self._q) for _ in range(2)]
        batch = AttentionBatch(
            page_tokens=self.page,
            window=window,
            starts=[WIDTH * self.page - 1] * SIZE,
            counts=[1] * SIZE,
            offsets=list(range(SIZE + 1)),
            start=self._start,
            table=self._table,
            slots=self._slots,
        )
        plan = plans.captured(batch)
        assert plan is not None
        self._plan = plan

    def fill(self, starts: list[int], seed: int) -> Case:
        """Fill the tensors with a step of sequences."""
        case = Case(
            [(start, 1) for start in starts],
            head=self.head,
            shared=SHARED,
            page_tokens=self.page,
            window=self.window,
            softcap=self.softcap,
            dtype=self.dtype,
            held=self.held,
            seed=seed,
        )
        case.sinks = self._sinks
        count = case.pages.k.shape[0]
        assert count <= PAGES
        for layer in self._layers:
            for cache, held in zip(map(bits, layer[:2]), map(bits, case.pages[:2]), strict=True):
                cache.fill_(255 if cache.dtype is torch.uint8 else torch.nan)
                cache[:count] = held
                cache[0] = 0  # the scratch page must be finite
            if layer.scales is not None:
                layer.scales.copy_(case.scales)
        self._start.copy_(case.batch.start)
        self._slots.copy_(case.batch.slots)
        self._table.zero_()
        self._table[:, : case.batch.table.shape[1]] = case.batch.table
        self._q.copy_(case.q)
        for at in range(2):
            self._new[at] = torch.stack([kv[at][-1] for kv in case.kv])
        self._plan.refill(starts)
        return case

    def work(self) -> None:
        self._plan.begin()
        for layer, out in zip(self._layers, self._out, strict=True):
            self._plan.write(*self._new, layer)
            scale = 1.2 * self.head**-0.5
            out.copy_(self._plan.run(self._q, layer, scale=scale, softcap=self.softcap, sinks=self._sunk))

    def error(self, case: Case) -> float:
        expected = case.expected()
        return max(float((out.cpu().double() - expected).abs().max()) for out in self._out)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the Triton gather by torch operations that can be recorded."""
    pytest.importorskip("triton")
    from infd.kernels.flashinfer import captured

    monkeypatch.setattr(captured, "gather", gather)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "planned"),
    [
        (None, None, False, False),
        (20, None, True, False),
        (None, None, False, True),
        (20, None, False, True),
        (None, 0.7, False, False),
        (33, 0.7, False, False),
    ],
)
def test_a_captured_step_is_right_when_lengths_and_tables_change(window, softcap, sinks, planned):
    from infd.kernels.flashinfer.attention import PagedAttention

    package = Package()
    attention = PagedAttention(package, planned=planned)
    steps = Steps(attention, window=window, softcap=softcap, sinks=sinks)
    case = steps.fill(STEPS[0], 0)
    steps.work()  # the uncaptured first step
    assert steps.error(case) < 1e-5
    replay = Recordings().capture(steps.work)
    before = list(package.calls)
    for seed, starts in enumerate(STEPS):
        case = steps.fill(starts, seed)
        replay()
        assert steps.error(case) < 1e-5
    planned = planned or softcap is not None
    assert package.called("xqa") == (0 if planned else 4)  # two layers, run once and captured once
    made_since = package.calls[len(before) :]
    assert made_since == ([f"{DECODER}.plan"] * len(STEPS) if planned else [])
    assert package.called(DECODER) == (1 if planned else 0)
    assert package.called("append_paged_kv_cache") == 4


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, 0.7)])
def test_captured_steps_over_an_fp8_cache_equal_the_reference_by_the_planned_kernel(window, softcap):
    from infd.kernels.flashinfer.attention import Float8PagedAttention

    package = Package()
    steps = Steps(Float8PagedAttention(package, Plain()), window=window, softcap=softcap, held=FLOAT8, head=128)
    steps.fill(STEPS[0], 0)
    steps.work()
    replay = Recordings().capture(steps.work)
    for seed, starts in enumerate(STEPS):
        case = steps.fill(starts, seed)
        replay()
        assert steps.error(case) < 1e-5
    assert package.called(f"{DECODER}.plan") == len(STEPS) + 1  # one more at the first layer
    assert not package.called("xqa") + package.called("append_paged_kv_cache")


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("planned", [False, True])
def test_an_unused_plan_is_freed_at_once(planned):
    from infd.kernels.flashinfer.attention import PagedAttention

    steps = Steps(PagedAttention(Package(), planned=planned))
    steps.fill(STEPS[0], 0)
    steps.work()
    gone = weakref.ref(steps._plan)
    gc.disable()
    try:
        del steps
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("recorded")
def test_layers_that_differ_are_planned_apart():
    from infd.kernels.flashinfer.attention import PagedAttention

    package = Package()
    steps = Steps(PagedAttention(package, planned=True))
    steps.fill(STEPS[0], 0)
    steps.work()
    steps.softcap = 0.5
    steps.work()
    assert package.called(DECODER) == package.called(f"{DECODER}.plan") == 2
    case = steps.fill(STEPS[1], 1)
    steps.work()
    assert package.called(f"{DECODER}.plan") == 4
    assert steps.error(case) < 1e-5


@pytest.mark.usefixtures("recorded")
def test_steps_of_all_sizes_share_the_buffer_of_page_ids():
    from infd.kernels.flashinfer.attention import PagedAttention

    attention, table = PagedAttention(Package(), planned=True), torch.zeros(SIZE, WIDTH, dtype=torch.int32)
    pages = KeyValuePages(*torch.zeros(2, PAGES, KV_HEADS, 16, HEAD))
    plans = []
    for size in (1, SIZE):
        batch = AttentionBatch(
            page_tokens=16,
            window=None,
            starts=[0] * size,
            counts=[1] * size,
            offsets=list(range(size + 1)),
            start=torch.zeros(size, dtype=torch.int32),
            table=table[:size],
            slots=torch.zeros(size, dtype=torch.int64),
        )
        plans.append(attention.captured(batch))
    for size, plan in zip((1, SIZE), plans, strict=True):
        plan.run(torch.zeros(size, KV_HEADS * SHARED, HEAD), pages, scale=1.0)
    small, large = (planned._pages for plan in plans for planned in plan._planned.values())
    assert small is large
    assert len(large) == SIZE * WIDTH


@pytest.mark.filterwarnings("default")  # FlashInfer's own warnings
@pytest.mark.parametrize(("window", "softcap", "planned"), [(None, None, False), (20, None, True), (None, 30.0, False)])
def test_on_a_gpu_a_captured_step_is_right_when_lengths_and_tables_change(gpu, window, softcap, planned):
    from infd.kernels.flashinfer.attention import PagedAttention
    from infd.runner.cuda_graphs.capture import CudaGraphs

    attention = PagedAttention(planned=planned)
    steps = Steps(attention, window=window, softcap=softcap, dtype=torch.bfloat16, device=gpu)
    steps.fill(STEPS[0], 0)
    replay = CudaGraphs(gpu).capture(steps.work)
    for seed, starts in enumerate(STEPS):
        case = steps.fill(starts, seed)
        replay()
        assert steps.error(case) < 0.02
