"""Capture decoding steps of a few batch sizes as CUDA graphs and replay them: one launch per step.

A decoding step computes one token per sequence and samples all of them. It is padded to the next captured size with the
scratch row. Inputs that differ between steps are in persistent buffers; sampled tokens are read from `Rows` within the
graph. A step of an uncaptured size launches the same kernels on the same buffers one by one, with the same result.

The graph of a small step includes the head, and appends each row's likeliest token to `Rows`: an all-greedy step needs
no further launch. For other rows the sampler overwrites the token. The head of a larger step is not captured, because
logits are large.

Size 1 is captured first, then the largest size, whose memory all smaller sizes reuse, then the others in descending
order: as many as START_S permits before serving, the rest while the device is idle. A frequent size is captured without
waiting for idle time. A size whose capture failed is computed kernel by kernel; after many steps its capture is tried
again, because memory may be free by then.

Steps with adapters compute more, so they have separate graphs, captured once an adapter is loaded. A slot's adapter may
be replaced without a new capture, unless the new adapter's rank exceeds all earlier ranks.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch

from infd.kernels.families.attention import AttentionBatch
from infd.kernels.families.rows import DecodeInputs
from infd.models.base import Batch
from infd.runner.faults import lacks_memory, let_go
from infd.runner.sampler import SampledPositions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.attention import CapturedPlan
    from infd.runner.adapters import CapturedRows, DeviceSlots
    from infd.runner.instance import Instance
    from infd.runner.rows import Rows
    from infd.runner.sampler import Likeliest
    from infd.scheduler.plan import Span

    Array = npt.NDArray[Any]

log = logging.getLogger("infd.runner")

START_S = 2.0  # time limit of captures before serving
PATIENCE = 8  # uncaptured steps of a size before a step waits for the size's capture
RETRY = 4096  # like PATIENCE, after a failed capture; multiplied by GROWTH per further failure
GROWTH = 4
LOGITS_BYTES = 2**25  # most bytes of logits of a step whose head is captured


class Graphs(Protocol):
    """Captures work on a device."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats `work` on the same memory. Capturing may itself call `work`."""


class CudaGraphs:
    """Implements Graphs with CUDA graphs. Other threads may call CUDA during a capture.

    torch.cuda.graph is not used: before each capture it synchronizes with the device and empties torch's caches, which
    delays streams, and the next prompt by new allocations. Here caches are emptied only after memory ran out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._made: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # graphs that share the pool
        # Kept alive: torch's allocator of pinned memory continues to query the graph of an invalidated capture.
        self._broken: list[torch.cuda.CUDAGraph] = []
        self._nothing = torch.zeros(1, device=device)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._capture(work)
        except Exception as error:
            if not lacks_memory(error):
                raise
            let_go(error)
        return self._capture(work)

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # libraries initialize on first use, which cannot be captured
            current.wait_stream(self._stream)
            if not self._made:  # torch does not accept a pool whose graphs are all freed
                self._pool = torch.cuda.graph_pool_handle()
            graph = self._record(work)
        self._made.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `work` on the current stream, with the pool's memory."""
        graph, ended = torch.cuda.CUDAGraph(), False
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
                ended = True
        except BaseException:
            if not ended:
                self._forsake(graph)
            raise
        return graph

    def _forsake(self, graph: torch.cuda.CUDAGraph) -> None:
        """End an invalidated capture for torch's allocators, which otherwise consider it in progress."""
        self._broken.append(graph)
        with suppress(RuntimeError):  # the allocators have ended the capture
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)
        self._made.clear()
        # Before torch 2.13 torch's random number generator considers it in progress until another capture has ended.
        mending = torch.cuda.CUDAGraph()
        try:
            mending.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            self._nothing.zero_()  # torch warns of empty graphs
            mending.capture_end()
        except RuntimeError as error:
            self._broken.append(mending)
            log.warning("torch may give no random numbers on %s any more: %s", self._device, error)


def sizes(most: int) -> list[int]:
    """Return the captured sizes for steps of up to `most` sequences; padding is at most 3 rows or an eighth."""
    found = [1, 2, 4]
    while found[-1] < most:
        found.append(found[-1] + max(4, found[-1] // 8 // 4 * 4))
    return [size for size in found if size < most] + [most]


class Buffers:
    """Persistent input buffers of decoding steps, of the largest size N; smaller sizes use their front.

    sent      [3 N] int64, uploaded per step: rows; upper bounds of the tokens' positions; shifts of the positions in
              tables of rotary angles
    position  [N] int64
    start     [N] int32: `position` in the dtype of attention
    token     [N] int64
    tables    by page group, [N, pages] int32
    slots     by page group, [N] int64
    logits    [M, vocab] in the model's logits_dtype; M: the largest size whose head is captured
    """

    def __init__(self, instance: Instance, most: int) -> None:
        self._instance = instance
        rows, groups = instance.rows, len(instance.layout.groups)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=rows.device)

        self.sent = zeros(3 * most, dtype=torch.int64)
        self.position = zeros(most, dtype=torch.int64)
        self.start = zeros(most, dtype=torch.int32)
        self.token = zeros(most, dtype=torch.int64)
        self.tables = [zeros(most, rows.tables.shape[2], dtype=torch.int32) for _ in range(groups)]
        self.slots = [zeros(most, dtype=torch.int64) for _ in range(groups)]
        dtype = instance.model.logits_dtype
        small = [size for size in sizes(most) if dtype.itemsize * size * rows.vocab_size <= LOGITS_BYTES]
        self.logits = zeros(max(small, default=0), rows.vocab_size, dtype=dtype)

    def inputs(self, size: int) -> DecodeInputs:
        """Return the buffers' parts for steps of `size` rows."""
        groups = self._instance.layout.groups
        return DecodeInputs(
            row=self.sent[:size],
            bound=self.sent[size : 2 * size],
            position=self.position[:size],
            start=self.start[:size],
            token=self.token[:size],
            page_tokens=[group.page_tokens for group in groups],
            tables=[table[:size] for table in self.tables],
            slots=[slots[:size] for slots in self.slots],
        )

    def plans(self, size: int) -> list[CapturedPlan] | None:
        """Return the captured attention plans for steps of `size` rows, by page group; None if not supported."""
        rows, groups = self._instance.rows, self._instance.layout.groups
        batches = (
            AttentionBatch(
                page_tokens=group.page_tokens,
                window=group.window,
                starts=[rows.max_len - 1] * size,
                counts=[1] * size,
                offsets=list(range(size + 1)),
                start=self.start[:size],
                table=table[:size],
                slots=slots[:size],
                upload=rows.staging.up,
            )
            for group, table, slots in zip(groups, self.tables, self.slots, strict=True)
        )
        plans = [plan for plan in map(self._instance.ops.attention.captured, batches) if plan is not None]
        return plans if len(plans) == len(groups) else None


class Computed(NamedTuple):
    """An issued decoding step.

    logits     [N, vocab]
    positions  the sampled positions
    appended   the rows' likeliest tokens if the step appends them to `Rows`; else None
    """

    logits: Tensor
    positions: SampledPositions
    appended: Likeliest | None = None


class Frame:
    """Computes decoding steps of one size, captured or kernel by kernel."""

    def __init__(
        self,
        size: int,
        instance: Instance,
        buffers: Buffers,
        plans: list[CapturedPlan],
        likeliest: Callable[[Tensor], Likeliest],
        adapters: CapturedRows | None = None,
    ) -> None:
        rows = instance.rows
        self.size = size
        self._find_likeliest = likeliest
        self._plans = plans
        self._adapters = adapters
        self._rows = rows
        self._cache = instance.cache
        self._model = instance.model
        self._beat = instance.pulse.beat
        self._shift = instance.layout.regimes.outgrown
        self._sent = buffers.sent[: (2 if self._shift is None else 3) * size]
        self._inputs = buffers.inputs(size)
        self._padding = np.array([rows.scratch] * size + [0] * (len(self._sent) - size))
        self._logits = buffers.logits[:size] if size <= len(buffers.logits) else None
        self._hidden: Tensor | None = None
        self._ends: Tensor | None = None
        self._likeliest: Likeliest | None = None
        self._replay: Callable[[], None] | None = None
        self._waiting = 0  # steps computed kernel by kernel
        self._failures = 0

    @property
    def captured(self) -> bool:
        return self._replay is not None

    @property
    def failed(self) -> bool:
        """Whether the last attempt to capture failed."""
        return self._failures > 0

    @property
    def overdue(self) -> bool:
        """Whether so many steps were computed uncaptured that the next step waits for a capture."""
        patience = RETRY * GROWTH ** (self._failures - 1) if self._failures else PATIENCE
        return not self.captured and self._waiting >= patience

    def compute(self, row_ids: Array, starts: list[int]) -> Computed:
        """Issue a step. starts: upper bound of the position of each row's token."""
        bounds = self._fill(row_ids, starts)
        if self._replay is None:
            self._waiting += 1
            self._work()
        else:
            self._replay()
        assert self._hidden is not None
        assert self._ends is not None
        count = len(starts)
        positions = SampledPositions(self._inputs.row[:count], self._ends[:count], row_ids, bounds + 1)
        if self._logits is None:
            return Computed(self._model.logits(self._hidden, self._adapters)[:count], positions)
        assert self._likeliest is not None
        return Computed(self._logits[:count], positions, self._likeliest.first(count))

    def capture(self, graphs: Graphs) -> None:
        """Capture the work of a step, with all rows the scratch row."""
        self._fill(np.empty(0, np.int64), [])
        self._replay = graphs.capture(self._work)
        self._failures = 0

    def release(self) -> None:
        """Free the graph and the memory of its outputs."""
        self._replay = self._hidden = self._ends = self._likeliest = None
        self._waiting = 0

    def put_off(self) -> None:
        """Record a failed capture: further attempts are delayed, see `overdue`."""
        self.release()
        self._failures += 1

    def _fill(self, row_ids: Array, starts: list[int]) -> Array:
        """Upload a step's inputs; return `starts` as an array."""
        count, padding = len(starts), [0] * (self.size - len(starts))
        sent = self._padding.copy()
        sent[:count] = row_ids
        bounds = sent[self.size : self.size + count]
        bounds[:] = starts
        if self._shift is not None:
            sent[2 * self.size : 2 * self.size + count] = self._rows.regimes[row_ids] * self._shift
        self._rows.staging.fill(self._sent, sent)
        for plan in self._plans:
            plan.refill(starts + padding)
        if self._adapters is not None:
            self._adapters.refill(self._rows.slots[row_ids].tolist() + padding)
        return bounds

    def _work(self) -> None:
        """Issue the captured work of a step. It must not depend on values of the host that change between steps."""
        self._rows.gather_inputs(self._inputs)
        for plan in self._plans:
            plan.begin()
        positions = self._inputs.position
        if self._shift is not None:
            positions = positions + self._sent[2 * self.size :]
        batch = Batch(
            tokens=self._inputs.token,
            positions=positions,
            attention=self._plans,
            cache=self._cache,
            beat=self._beat,
            adapters=self._adapters,
        )
        self._hidden = self._model.forward(batch)
        self._ends = self._inputs.position + 1
        if self._logits is not None:
            self._logits.copy_(self._model.logits(self._hidden, self._adapters))
            self._likeliest = self._find_likeliest(self._logits)
            self._rows.append(self._inputs.row, self._ends, self._likeliest.tokens)


def decoding(graphs: Graphs, instance: Instance, likeliest: Callable[[Tensor], Likeliest]) -> Decoding | None:
    """Return frames of all sizes; None if the attention kernel cannot be captured."""
    most = instance.rows.scratch
    buffers = Buffers(instance, most)
    plain, adapted = [], []
    for size in sizes(most):
        plans = buffers.plans(size)
        if plans is None:
            log.warning("decoding steps are not captured: this attention kernel takes each step by itself")
            return None
        plain.append(Frame(size, instance, buffers, plans, likeliest))
        if (wanting := instance.adapters.captured(size)) is not None:
            adapted.append(Frame(size, instance, buffers, plans, likeliest, wanting))
    return Decoding(graphs, plain, adapted, instance.rows, instance.adapters)


class Decoding:
    """Selects the frame of each decoding step, and captures frames."""

    def __init__(
        self,
        graphs: Graphs,
        plain: list[Frame],
        adapted: list[Frame],
        rows: Rows,
        slots: DeviceSlots,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """plain, adapted: frames without and with adapters, by ascending size; `adapted` may be empty."""
        self._graphs = graphs
        self._clock = clock
        self._capture_s = 0.0  # total
        self._plain, self._adapted = plain, adapted
        self._rows = rows
        self._slots = slots
        self._generation = slots.update_weights()
        self._uncaptured = [plain[0], *plain[:0:-1]]

    def forward(self, spans: Sequence[Span]) -> Computed | None:
        """Issue a step; return None if it does not consist of decoding spans only."""
        for span in spans:
            if span.count != 1 or span.scores or not span.samples:
                return None
        row_ids = np.array([span.row for span in spans])
        adapted = self._rows.slots[row_ids].any()
        if adapted and not self._adapted:
            return None
        self._renew()
        frames = self._adapted if adapted else self._plain
        frame = frames[bisect_left(frames, len(spans), key=lambda frame: frame.size)]
        if frame.overdue:
            self._capture(frame)
        return frame.compute(row_ids, [span.start for span in spans])

    def begin(self) -> None:
        """Capture sizes until all are captured, or START_S have passed."""
        began = self._clock()
        while self.settle() and self._clock() - began < START_S:
            pass
        told = self.facts()
        captured, left = len(told["captured"]), told["to_come"]
        log.info("decoding steps: %d sizes captured in %.1f s, %d to come", captured, self._clock() - began, left)

    def settle(self) -> bool:
        """Capture the next size; return whether uncaptured sizes are left."""
        self._renew()
        if self._uncaptured:
            self._capture(self._uncaptured[0])
        return bool(self._uncaptured)

    def facts(self) -> dict[str, Any]:
        return {
            "captured": [frame.size for frame in self._plain if frame.captured],
            "with_adapters": [frame.size for frame in self._adapted if frame.captured],
            "to_come": len(self._uncaptured),
            "failed": [frame.size for frame in self._plain if frame.failed],
            "capture_s": round(self._capture_s, 3),
        }

    def _renew(self) -> None:
        """If adapters' weights were replaced, free all graphs with adapters and queue their sizes for capture."""
        generation = self._slots.update_weights()
        if generation == self._generation:
            return
        self._generation = generation
        for frame in self._adapted:
            frame.release()
        still = [frame for frame in self._uncaptured if frame in self._plain]
        self._uncaptured = still + [frame for frame in self._adapted[::-1] if not frame.failed]

    def _capture(self, frame: Frame) -> None:
        began = self._clock()
        try:
            frame.capture(self._graphs)
        except Exception as error:  # CUDA's, torch's or a library's; steps are computed without graphs
            # Captured sizes stay. If memory ran out, larger sizes would fail too; else any size probably would.
            short, kind = lacks_memory(error), self._adapted if frame in self._adapted else self._plain
            others = [each for each in kind if not each.captured and (each.size > frame.size or not short)]
            for each in {frame, *others}:
                each.put_off()
            let_go(error)
            which = "larger ones" if short else "any others"
            log.warning("steps of %d sequences are not captured, nor %s for now: %s", frame.size, which, error)
        finally:
            self._capture_s += self._clock() - began
        self._uncaptured = [each for each in self._uncaptured if not (each.captured or each.failed)]
