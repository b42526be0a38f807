"""A model without weights: every mistake in pages, rows or order changes its answers.

FakeDevice has a real paged memory of token ids. To sample, it reads a
sequence's history through the page tables and hashes the history: a page
granted twice, a stale table, a wrong position or a step out of order changes
the answer. `continuation` computes the expected answer without pages.
"""

from __future__ import annotations

import asyncio
import zlib
from array import array
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from infd.errors import AdapterTooLarge, CheckpointError
from infd.memory import ALL, Memory, MemoryPart, Residency
from infd.request import (
    AdapterFacts,
    ExpertSizes,
    Generate,
    Pool,
    Pooled,
    PoolTask,
    RoutedExperts,
    Score,
    TokenLogprobs,
    by_token,
    pick,
)
from infd.scheduler.layout import CacheLayout, Capacity, PageGroup
from infd.scheduler.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    from infd.errors import DeviceLost, InfdError
    from infd.request import Adapter
    from infd.scheduler.layout import Regimes
    from infd.scheduler.plan import Join, Span

VOCAB = 512
EXPERTS = ExpertSizes(layers=2, experts=512, chosen=2)
ANGLES = 2**16  # factor that distinguishes cached tokens rotated by different angles
FULL = CacheLayout((PageGroup(layers=(0,), page_tokens=4),))


def capacity(
    layout: CacheLayout = FULL,
    *,
    pages: int = 64,
    rows: int = 8,
    step_tokens: int = 16,
    max_model_len: int = 64,
    score_cost: int = 1,
    mixed_tokens: int | None = None,
    crowded_tokens: int | None = None,
    pools_last: bool = False,
) -> Capacity:
    return Capacity(
        layout=layout,
        pages=pages,
        rows=rows,
        step_tokens=step_tokens,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        score_cost=score_cost,
        mixed_tokens=mixed_tokens,
        crowded_tokens=crowded_tokens,
        pools=get_args(PoolTask),
        pools_last=pools_last,
        experts=EXPERTS,
    )


def remembered(
    token: int, adapter: Adapter | None, *, regimes: Regimes = FULL.regimes, regime: int = 0, position: int = 0
) -> int:
    """Return the cache entry of a token computed with an adapter, at a position, under a rope regime."""
    angles = regime
    if regimes.prompt_over is not None:
        angles = max(regime, position + 1)
        angles = angles if angles > regimes.prompt_over else 0
    return token + (0 if adapter is None else VOCAB * adapter.generation) + ANGLES * angles


def history(tokens: list[int], prompt: int, layout: CacheLayout, adapter: Adapter | None) -> list[int]:
    """Return the cache entries of a sequence with `prompt` prompt tokens."""
    regimes = layout.regimes
    regime = regimes.of(prompt, len(tokens))
    return [
        remembered(token, adapter, regimes=regimes, regime=regime, position=position)
        for position, token in enumerate(tokens)
    ]


def choose(histories: list[list[int]], seed: int) -> int:
    """Return the next token, given the cache entries visible to each page group."""
    digest = seed & 0xFFFFFFFF
    for history in histories:
        digest = zlib.crc32(array("i", history).tobytes(), digest)
    return 3 + digest % (VOCAB - 3)


def continuation(
    prompt: list[int], count: int, *, seed: int = 0, layout: CacheLayout = FULL, adapter: Adapter | None = None
) -> list[int]:
    """Return the first `count` tokens that the fake model generates after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        kept = history(tokens, len(prompt), layout, adapter)
        seen = [kept if group.window is None else kept[-group.window :] for group in layout.groups] or [kept]
        tokens.append(choose(seen, seed))
    return tokens[len(prompt) :]


def likeliness(token: int) -> float:
    """Return the log-probability that the fake model reports for a generated token."""
    return -(token % 50) / 8


def likelihood(histories: list[list[int]], token: int, most: int) -> TokenLogprobs:
    """Return the log-probabilities reported for `token`, given the preceding cache entries visible to each group."""
    guess = choose(histories, token)
    ids = tuple((guess + i) % VOCAB for i in range(most))
    return TokenLogprobs(-guess / 8, ids, tuple(-0.5 - i for i in range(most)), 1 + guess % 7)


def prompt_likelihoods(
    prompt: list[int], most: int = 0, *, layout: CacheLayout = FULL, adapter: Adapter | None = None
) -> list[TokenLogprobs]:
    """Return the log-probabilities reported for all tokens of `prompt` except the first."""
    kept = history(prompt, len(prompt), layout, adapter)
    return [
        likelihood(
            [kept[:p] if group.window is None else kept[:p][-group.window :] for group in layout.groups] or [kept[:p]],
            prompt[p],
            most,
        )
        for p in range(1, len(prompt))
    ]


def pooled(pool: Pool, prompt: list[int], limits: Capacity, adapter: Adapter | None = None) -> Pooled:
    """Return the numbers that the fake model reduces `prompt` to."""
    kept, groups = history(prompt, len(prompt), limits.layout, adapter), limits.layout.groups
    states = [
        choose([kept[:p] if group.window is None else kept[:p][-group.window :] for group in groups] or [kept[:p]], 0)
        for p in range(1, len(prompt) + 1)
    ]
    return reduced(pool, states[pool.skip :], last=limits.pools_last)


def reduced(pool: Pool, states: list[int], *, last: bool) -> Pooled:
    """Return the states of all pooled tokens, or only their sum, or the last."""
    rows = states if by_token(pool.task) else states[-1:] if last else [sum(states)]
    return Pooled(1, array("f", rows).tobytes())


def routed(tokens: list[int], prompt: int, *, layout: CacheLayout = FULL, adapter: Adapter | None = None) -> bytes:
    """Return the experts that the fake model reports for `tokens`, of which the first `prompt` are a prompt's.

    Each is of the regime in which the token was first computed.
    """
    experts = []
    for p in range(1, len(tokens) + 1):
        kept = history(tokens[: max(p, prompt)], prompt, layout, adapter)[:p]
        seen = [kept if group.window is None else kept[-group.window :] for group in layout.groups] or [kept]
        experts.append(experts_of(seen))
    return b"".join(experts)


def experts_of(histories: list[list[int]]) -> bytes:
    """Return a token's experts, given the cache entries visible to each page group, its own included."""
    first = choose(histories, 0)
    return array("h", [(first + i) % VOCAB for i in range(EXPERTS.layers * EXPERTS.chosen)]).tobytes()


def nearest(token: int, mask: npt.NDArray[Any]) -> int:
    """Return the first allowed token from `token` on, in a circle. mask: int32 [ceil(VOCAB / 32)]."""
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return next((token + i) % VOCAB for i in range(VOCAB) if allowed[(token + i) % VOCAB])


class FakeDevice:
    """Executes plans in order. `forward` and `sample` are separate, as on a real device."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        groups = capacity.layout.groups
        most = max((group.page_tokens for group in groups), default=1)
        self.memory = [[-1] * most for _ in range(capacity.pages + 1)]
        self.tokens: list[list[int]] = [[] for _ in range(capacity.rows)]
        self.drafts: list[dict[int, int]] = [{} for _ in range(capacity.rows)]  # by row and position
        self.tables: list[list[dict[int, int]]] = [[{} for _ in groups] for _ in range(capacity.rows)]
        self.seeds = [0] * capacity.rows
        self.logprobs: list[int | None] = [None] * capacity.rows
        self.most = [0] * capacity.rows
        self.prompts = [0] * capacity.rows
        self.slot_of = [0] * capacity.rows
        self.adapters: set[Adapter] = set()  # adapters in memory
        self.regime_of = [0] * capacity.rows
        self.slots: dict[int, Adapter] = {}
        self.pools: list[Pool | None] = [None] * capacity.rows
        self.states: list[list[int]] = [[] for _ in range(capacity.rows)]  # of the tokens pooled since the row's join
        self.steps = 0
        self.asleep = False

    def wipe(self) -> None:
        """Overwrite every page, as releasing the cache's memory does."""
        for page in self.memory:
            page[:] = [-1] * len(page)

    def forward(self, plan: StepPlan) -> None:
        assert not self.asleep, "a step while memory is given back"
        for load in plan.loads:
            assert load.adapter in self.adapters, "an adapter is loaded that is not in memory"
            self.slots[load.slot] = load.adapter
        for join in plan.joins:
            self._seat(join)
        for grant in plan.grants:
            self.tables[grant.row][grant.group][grant.index] = grant.page
        for draft in plan.drafts:
            self.drafts[draft.row] |= dict(enumerate(draft.tokens, draft.start))
        assert len({span.row for span in plan.spans}) == len(plan.spans), "two spans in one row"
        assert plan.tokens <= self.capacity.step_tokens
        for span in plan.spans:
            self._write(span)
        self.steps += 1

    def sample(self, plan: StepPlan, mask: npt.NDArray[Any] | None = None) -> StepResult:
        """mask: int32 [sampled positions, ceil(VOCAB / 32)]; None: all tokens."""
        accepted, tokens, logprobs, prompt_logprobs, pooled, routed = [], [], {}, {}, {}, {}
        position = 0  # of the mask's row
        for number, span in enumerate(plan.spans):
            history = self.tokens[span.row]
            if span.scores:
                assert span.scores <= span.count
                prompt_logprobs[number] = [
                    likelihood(self._read(span, position + 1), history[position + 1], self.most[span.row])
                    for position in range(span.start, span.start + span.scores)
                ]
            if span.pools and (numbers := self._pool(span)) is not None:
                pooled[number] = numbers
            if span.routes:
                assert span.samples <= 1, "a span that reports experts has no drafts"
                experts = [experts_of(self._read(span, span.start + at + 1)) for at in range(span.routes)]
                routed[number] = RoutedExperts(EXPERTS.layers, EXPERTS.chosen, b"".join(experts))
            kept = self._verify(span, None if mask is None else mask[position : position + span.samples])
            position += span.samples
            accepted.append(len(kept))
            tokens += kept
            if kept and (asked := self.logprobs[span.row]) is not None:
                logprobs[number] = [
                    TokenLogprobs(
                        likeliness(token),
                        tuple((token + i) % VOCAB for i in range(asked)),
                        tuple(likeliness(token) - i for i in range(asked)),
                    )
                    for token in kept
                ]
        return StepResult(accepted, tokens, logprobs, prompt_logprobs, pooled, routed=routed)

    def _pool(self, span: Span) -> Pooled | None:
        """Reduce the span's tokens; return the known rows."""
        pool, end = self.pools[span.row], span.start + span.count
        assert pool is not None
        assert span.pools == span.count
        read = range(max(span.start, pool.skip), end)
        states = [choose(self._read(span, position + 1), 0) for position in read]
        if by_token(pool.task):
            return reduced(pool, states, last=False) if states else None
        self.states[span.row] += states
        if end < self.prompts[span.row]:
            return None
        return reduced(pool, self.states[span.row], last=self.capacity.pools_last)

    def _verify(self, span: Span, mask: npt.NDArray[Any] | None) -> list[int]:
        """Sample a span's positions as long as the drafts agree, and append the tokens; return them.

        mask  one row per sampled position
        """
        history, kept = self.tokens[span.row], []
        if span.samples:
            first = self._first(span) + span.count - span.samples + 1
            assert len(history) == first, "sampled from the middle of a sequence"
        for place in range(span.samples):
            token = self.speak(span, self._read(span, len(history)))
            if mask is not None and not mask[place].any():
                assert kept, "a mask allows no token"
                break
            if mask is not None:
                token = nearest(token, mask[place])
            draft = self.drafts[span.row].get(len(history), 0)
            history.append(token)
            kept.append(token)
            if token != draft:
                break
        return kept

    def _first(self, span: Span) -> int:
        """Return the first position that a span computes."""
        return min(span.start, len(self.tokens[span.row]) - 1)

    def speak(self, span: Span, histories: list[list[int]]) -> int:
        """Return the next token."""
        return choose(histories, self.seeds[span.row])

    def run(self, plan: StepPlan, mask: npt.NDArray[Any] | None = None) -> StepResult:
        self.forward(plan)
        return self.sample(plan, mask)

    def _computed(self, span: Span, position: int) -> int:
        slot = self.slot_of[span.row]
        adapter = self.slots[slot] if slot else None
        assert adapter is None or adapter in self.adapters, "an adapter is computed that is not in memory"
        history = self.tokens[span.row]
        return remembered(
            history[position] if position < len(history) else self.drafts[span.row].get(position, 0),
            adapter,
            regimes=self.capacity.layout.regimes,
            regime=self.regime_of[span.row],
            position=position,
        )

    def _seat(self, join: Join) -> None:
        self.slot_of[join.row] = join.slot
        self.regime_of[join.row] = join.regime
        self.tokens[join.row] = list(join.tokens)
        self.drafts[join.row] = {}
        self.tables[join.row] = [{i: page for i, page in enumerate(table) if page} for table in join.tables]
        self.seeds[join.row] = join.seed
        generate, score = pick(Generate, join.wants), pick(Score, join.wants)
        self.logprobs[join.row] = generate.sampling.logprobs if generate else None
        self.most[join.row] = score.top if score else 0
        self.pools[join.row], self.states[join.row] = pick(Pool, join.wants), []
        self.prompts[join.row] = join.prompt_tokens

    def _write(self, span: Span) -> None:
        for group, table in zip(self.capacity.layout.groups, self.tables[span.row], strict=True):
            first = self._first(span)
            for position in range(first, first + span.count):
                page = table[position // group.page_tokens]
                assert 0 < page <= self.capacity.pages
                self.memory[page][position % group.page_tokens] = self._computed(span, position)

    def _read(self, span: Span, end: int) -> list[list[int]]:
        """Return the cache entries before `end` visible to each group."""
        groups = self.capacity.layout.groups
        if not groups:
            assert span.start == 0, "nothing was kept of the earlier tokens"
            return [[self._computed(span, position) for position in range(end)]]
        histories = []
        for group, table in zip(groups, self.tables[span.row], strict=True):
            first = 0 if group.window is None else max(0, end - group.window)
            histories.append(
                [self.memory[table[p // group.page_tokens]][p % group.page_tokens] for p in range(first, end)]
            )
        return histories


class Seated:
    """The tokens with which each row's sequence joined; faults that strike one sequence use them."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def of(self, plan: StepPlan) -> list[list[int]]:
        """Return the tokens of each span's sequence. Takes plans in order."""
        self._tokens |= {join.row: join.tokens for join in plan.joins}
        return [self._tokens[span.row] for span in plan.spans]


class FakeStep:
    def __init__(self, executor: FakeExecutor, plan: StepPlan) -> None:
        self.plan = plan
        self.mask: npt.NDArray[Any] | None = None
        self.result: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._executor = executor

    def sample(self, mask: npt.NDArray[Any] | None = None) -> asyncio.Future[StepResult]:
        self.mask = mask
        self._executor.ready(self)
        return self.result


class FakeExecutor:
    """An Executor over a FakeDevice, on the event loop.

    step_s   duration of a step
    fault    called with each plan; an exception fails the plan's step and all queued steps
    gate     while cleared, no step completes
    reading  while cleared, no adapter is read
    files    size in bytes and stamp of each readable adapter, by path
    """

    def __init__(
        self,
        capacity: Capacity | None = None,
        *,
        depth: int = 1,
        decoding_depth: int | None = None,
        step_s: float = 0.0,
        fault: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.depth = depth
        self.decoding_depth = depth if decoding_depth is None else decoding_depth
        self.step_s = step_s
        self.fault = fault
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = False
        self._capacity = capacity or globals()["capacity"](pages=256, rows=16, step_tokens=64, max_model_len=256)
        self.device = FakeDevice(self._capacity)
        self._queue: list[FakeStep | Callable[[], None]] = []  # steps, and functions to call between steps
        self.files: dict[str, tuple[int, int]] = {}
        self.reading = asyncio.Event()
        self.reading.set()
        self.reads = 0
        self.issued: list[FakeStep] = []  # all steps issued so far
        self.sampled = 0  # of these
        self._worker: asyncio.Task[None] | None = None
        self.load_error: InfdError | None = None
        self.lost: Callable[[DeviceLost], None] | None = None  # reports the loss of the device
        self.sleep_refusal = ""
        self.parks = False  # whether weights leave the device in a light sleep
        self.resident: dict[str, int] = {}
        self.held = Memory()
        self.memory_gate = asyncio.Event()  # while cleared, no change of memory completes
        self.memory_gate.set()
        self.sleep_error: Exception | None = None
        self.wake_error: Exception | None = None
        self.weights_error: Exception | None = None
        self.fails_midway = False

    async def load(self, lost: Callable[[DeviceLost], None] | None = None) -> Capacity:
        if self.load_error:
            raise self.load_error
        self.lost = lost
        return self._capacity

    def forward(self, plan: StepPlan) -> FakeStep:
        self.issued.append(FakeStep(self, plan))
        return self.issued[-1]

    def ready(self, step: FakeStep) -> None:
        assert step is self.issued[self.sampled], "a device samples every step, in order: it waits for one left out"
        self.sampled += 1
        self._queue.append(step)
        self._start()

    def _start(self) -> None:
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while self._queue:
            await asyncio.sleep(self.step_s)
            await self.gate.wait()
            step = self._queue.pop(0)
            if not isinstance(step, FakeStep):
                step()
                continue
            try:
                if self.fault is not None:
                    self.fault(step.plan)
                result = self.device.run(step.plan, step.mask)
            except Exception as error:
                step.result.set_exception(error)
                behind, self._queue = self._queue, []
                for dropped in behind:
                    if not isinstance(dropped, FakeStep):
                        self._queue.append(dropped)
                        continue
                    for _ in range(3):  # each failure is reported separately, as from a thread
                        await asyncio.sleep(0)
                    dropped.result.set_exception(error)
            else:
                step.result.set_result(result)

    @property
    def _steps_queued(self) -> bool:
        return any(isinstance(each, FakeStep) for each in self._queue)

    @property
    def memory(self) -> Memory:
        return self.held

    def released_by(self, level: int) -> frozenset[MemoryPart]:
        return ALL if level > 1 or self.parks else frozenset({MemoryPart.CACHE})

    async def sleep(self, level: int) -> int:
        assert not self._steps_queued, "memory is given back between steps only"
        await self.memory_gate.wait()
        if self.sleep_error is not None:
            raise self.sleep_error
        light = Residency.PARKED if self.parks else self.held.weights
        self.held = Memory(weights=Residency.RELEASED if level > 1 else light, cache=Residency.RELEASED)
        self.device.asleep = True
        self.device.wipe()
        return 1000 * level

    async def wake(self, parts: Collection[MemoryPart]) -> None:
        await self.memory_gate.wait()
        if self.wake_error is not None:
            raise self.wake_error
        weights, cache = self.held.weights, self.held.cache
        if MemoryPart.WEIGHTS in parts and weights in (Residency.RELEASED, Residency.PARKED):
            weights = Residency.LOADED
        self._hold(weights, Residency.LOADED if MemoryPart.CACHE in parts else cache)

    async def load_weights(self, path: str, root: str = "") -> None:
        assert not self._steps_queued, "weights change between steps only"
        before, self.device.asleep = self.device.asleep, True
        await self.memory_gate.wait()
        self.device.asleep = before
        if self.weights_error is not None:
            if self.fails_midway:
                self._hold(Residency.INVALID, self.held.cache)
            raise self.weights_error
        self._hold(Residency.LOADED, self.held.cache)

    def _hold(self, weights: Residency, cache: Residency) -> None:
        self.held = Memory(weights=weights, cache=cache)
        self.device.asleep = not self.held.whole

    async def read_adapter(self, adapter: Adapter, root: str | None, room: int) -> AdapterFacts:
        """Read a fake adapter listed in `files`."""
        self.reads += 1
        await self.reading.wait()
        if adapter.path not in self.files:
            raise CheckpointError(f"{adapter.path}: No such file or directory")
        size, stamp = self.files[adapter.path]
        if size > room:
            raise AdapterTooLarge(size, room)
        self._between(lambda: self.device.adapters.add(adapter))
        return AdapterFacts("fake", 8, size, ((stamp,),))

    def forget_adapter(self, adapter: Adapter, slot: int | None) -> None:
        def forget() -> None:
            self.device.adapters.discard(adapter)
            if slot is not None:
                self.device.slots.pop(slot, None)

        self._between(forget)

    def _between(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self._start()

    def describe(self) -> dict[str, Any]:
        return {
            "device": "fake",
            "dtype": "int",
            "weights_bytes": 0,
            "cache_bytes": 0,
            "ops": [{"family": "attention", "chosen": "fake", "refused": {}}],
            "resident": self.resident,
            "stored": {"int4, groups of 32, kept": 7},
        }

    def pulse(self) -> int:
        return self.device.steps

    async def close(self) -> None:
        self.closed = True
        if self._worker is not None:
            self._worker.cancel()
