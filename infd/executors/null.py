"""An executor that computes nothing: for lifecycle tests, and for measuring infd's own overhead.

A token is a hash of (seed, position), a vector is one of the prompt, or of (token,
position). With pooling.task embed or classify it is an encoder, which keeps no cache;
else it does everything. Token ids are from the third quarter of the vocabulary, because common
vocabularies have special tokens at the ends and single bytes in the lower half.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from hashlib import shake_128
from typing import TYPE_CHECKING, Any, Final, Protocol, get_args

from msgspec import structs

from infd.adapters.files import locate
from infd.adapters.peft import PeftConfig
from infd.errors import AdapterTooLarge
from infd.memory import ALL, Memory, MemoryPart, Residency
from infd.request import (
    AdapterFacts,
    Generate,
    Pool,
    Pooled,
    PoolTask,
    Score,
    TokenLogprobs,
    by_token,
    embeds,
)
from infd.scheduler.layout import CacheLayout, Capacity, PageGroup
from infd.scheduler.plan import StepResult
from infd.weights import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from infd.config import Config
    from infd.errors import DeviceLost
    from infd.pooling import PoolingSettings
    from infd.request import Adapter
    from infd.scheduler.plan import Span, StepPlan

STEP_TOKENS = 2048
DIMENSIONS: Final = 64  # of an embedding
LABELS: Final = 2  # of a classification
SEED_FACTOR, POSITION_FACTOR = 0x9E3779B1, 0x85EBCA77  # odd and large: neighbouring positions have distant hashes


def invented(settings: PoolingSettings) -> PoolingSettings:
    """Return a checkpoint's settings with the widths of this executor's numbers, whatever the checkpoint's are."""
    labels = tuple(f"LABEL_{label}" for label in range(LABELS))
    return structs.replace(
        settings, dimensions=DIMENSIONS, labels=labels, matryoshka=(), token_dense=None, token_weight=None
    )


class Sizes(Protocol):
    """The sizes of a model that the null executor reports."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


class NullStep:
    """A step in flight. Its result is computed when the step ends."""

    __slots__ = ("_executor", "plan", "result")

    def __init__(self, executor: NullExecutor, plan: StepPlan, result: asyncio.Future[StepResult]) -> None:
        self._executor = executor
        self.plan = plan
        self.result = result

    def sample(self, mask: Any | None = None) -> asyncio.Future[StepResult]:
        self._executor.run(self)
        return self.result


class NullExecutor:
    """Runs steps in sequence, each `device.null_step_ms` long; at 0 a step ends on the event loop's next iteration."""

    def __init__(self, config: Config, sizes: Callable[[], Sizes], weights_root: Callable[[], Path]) -> None:
        """Set up; `load` determines the sizes.

        sizes         called by `load`; may raise StartError
        weights_root  returns the directory that must contain weights; called by `load_weights` if it is given none
        """
        self.depth = self.decoding_depth = config.device.depth or 1
        self._config = config
        self._sizes = sizes
        self._weights_root = weights_root
        self._step_s = config.device.null_step_ms / 1000
        self._first = 0
        self._ordinary = 1
        self._seeds: dict[int, int] = {}
        self._lengths: dict[int, int] = {}  # known tokens of each row whose length is uncertain to the host
        self._drafts: dict[int, dict[int, int]] = {}  # drafts of each row, by position
        self._logprobs: dict[int, int] = {}
        self._prompt_logprobs: dict[int, int] = {}
        self._pools: dict[int, tuple[Pool, list[int]]] = {}  # how each row's prompt is pooled, and its tokens
        self._steps = 0
        self._free_at = 0.0
        self.memory = Memory()
        self.sleep_refusal = ""

    async def load(self, lost: Callable[[DeviceLost], None] | None = None) -> Capacity:
        config, sizes = self._config, self._sizes()
        self._first = sizes.vocab_size // 2
        self._ordinary = max(1, sizes.vocab_size // 4)
        layout = CacheLayout((PageGroup(layers=(0,), page_tokens=config.cache.page_tokens),))
        step_tokens = config.scheduler.step_tokens or STEP_TOKENS
        task = config.pooling.task
        encodes = task in ("embed", "classify")
        if encodes:
            layout = CacheLayout((), divisible=False)
            step_tokens = max(step_tokens, sizes.max_position_embeddings)
        return Capacity(
            layout=layout,
            pages=config.scheduler.max_num_seqs * layout.peak_pages(sizes.max_position_embeddings, step_tokens),
            rows=config.scheduler.max_num_seqs,
            step_tokens=step_tokens,
            max_model_len=sizes.max_position_embeddings,
            vocab_size=sizes.vocab_size,
            generates=not encodes,
            pools=tuple(each for each in get_args(PoolTask) if task == "auto" or each.endswith(task)),
        )

    def forward(self, plan: StepPlan) -> NullStep:
        return NullStep(self, plan, asyncio.get_running_loop().create_future())

    def run(self, step: NullStep) -> None:
        """Schedule the end of a step, which is after the end of the previous step."""
        loop = asyncio.get_running_loop()
        if not self._step_s:
            loop.call_soon(self._finish, step)
            return
        self._free_at = max(self._free_at, loop.time()) + self._step_s
        loop.call_at(self._free_at, self._finish, step)

    def released_by(self, level: int) -> frozenset[MemoryPart]:
        return ALL if level >= 2 else frozenset({MemoryPart.CACHE})

    async def sleep(self, level: int) -> int:
        self.memory = Memory(
            weights=Residency.RELEASED if level >= 2 else self.memory.weights, cache=Residency.RELEASED
        )
        return 0

    async def wake(self, parts: Collection[MemoryPart]) -> None:
        before = self.memory
        self.memory = Memory(
            weights=Residency.LOADED if MemoryPart.WEIGHTS in parts else before.weights,
            cache=Residency.LOADED if MemoryPart.CACHE in parts else before.cache,
        )

    async def load_weights(self, path: str, root: str = "") -> None:
        checkpoint.read_config(checkpoint.locate(path, root or str(self._weights_root())))
        self.memory = Memory(cache=self.memory.cache)

    async def read_adapter(self, adapter: Adapter, root: str | None, room: int) -> AdapterFacts:
        files = locate(adapter.path, root)
        config, size = PeftConfig.read(files.config), files.tensors.stat().st_size
        if size > room:
            raise AdapterTooLarge(size, room)
        return AdapterFacts(config.base_model_name_or_path or "", config.r, size, files.stamp())

    def forget_adapter(self, adapter: Adapter, slot: int | None) -> None:
        """No-op: this executor stores no weights."""

    def describe(self) -> dict[str, Any]:
        return {
            "device": "null",
            "dtype": "none",
            "arch": "none",
            "weights_bytes": 0,
            "cache_bytes": 0,
            "threads": 0,
            "load_s": 0.0,
            "ops": [],
        }

    def pulse(self) -> int:
        return self._steps

    async def close(self) -> None:
        """No-op: timers of steps in flight end with the event loop."""

    def _finish(self, step: NullStep) -> None:
        self._steps += 1
        if not step.result.done():
            step.result.set_result(self._answer(step.plan))

    def _answer(self, plan: StepPlan) -> StepResult:
        seeds, first, ordinary = self._seeds, self._first, self._ordinary
        for join in plan.joins:
            seeds[join.row] = join.seed * SEED_FACTOR
            self._lengths.pop(join.row, None)
            self._drafts.pop(join.row, None)
            self._logprobs.pop(join.row, None)
            for want in join.wants:
                match want:
                    case Pool():
                        self._pools[join.row] = want, join.tokens
                    case Score(top):
                        self._prompt_logprobs[join.row] = top
                    case Generate(sampling) if sampling.logprobs is not None:
                        self._logprobs[join.row] = sampling.logprobs
        for draft in plan.drafts:
            self._drafts.setdefault(draft.row, {}).update(enumerate(draft.tokens, draft.start))
        if self._drafts:
            result = self._verify(plan)
        else:
            ends = [
                (seeds[s.row] + (s.start + s.count) * POSITION_FACTOR) & 0xFFFFFFFF for s in plan.spans if s.samples
            ]
            tokens = [first + ((mix ^ mix >> 15) * POSITION_FACTOR >> 7) % ordinary for mix in ends]
            result = StepResult([span.samples for span in plan.spans], tokens)
        if self._logprobs or any(span.scores for span in plan.spans):
            self._explain(plan, result)
        for i, span in enumerate(plan.spans):
            if span.pools:
                self._pool(i, span, result)
        return result

    def _verify(self, plan: StepPlan) -> StepResult:
        """Sample every position; keep the samples up to the first that a draft did not anticipate."""
        result = StepResult([], [])
        for span in plan.spans:
            drafts, before = self._drafts.get(span.row, {}), len(result.tokens)
            end = span.start + span.count - span.samples + 1
            if span.samples:
                end = min(end, self._lengths.get(span.row, end))
            for at in range(end, end + span.samples):
                mixed = (self._seeds[span.row] + at * POSITION_FACTOR) & 0xFFFFFFFF
                token = self._first + ((mixed ^ mixed >> 15) * POSITION_FACTOR >> 7) % self._ordinary
                result.tokens.append(token)
                if drafts.pop(at, None) != token:
                    break
            kept = len(result.tokens) - before
            result.accepted.append(kept)
            if span.samples > 1 or span.row in self._lengths:
                self._lengths[span.row] = end + kept
        return result

    def _explain(self, plan: StepPlan, result: StepResult) -> None:
        """Add invented log-probabilities to the result, where requested."""
        token = iter(result.tokens)
        for i, span in enumerate(plan.spans):
            if span.scores:
                likely = self._likely(self._first, self._prompt_logprobs[span.row], rank=1)
                result.prompt_logprobs[i] = [likely] * span.scores
            sampled = [next(token) for _ in range(result.accepted[i])]
            if sampled and span.row in self._logprobs:
                result.logprobs[i] = [self._likely(each, self._logprobs[span.row]) for each in sampled]

    def _pool(self, number: int, span: Span, result: StepResult) -> None:
        """Add the vectors of a span's tokens, or that of the prompt which the span ends."""
        pool, tokens = self._pools[span.row]
        end = span.start + span.count
        if by_token(pool.task):
            read = range(max(span.start, pool.skip), end)
            rows = [_vector(pool, tokens[at], at) for at in read]
            if rows:
                result.pooled[number] = Pooled(len(rows[0]), b"".join(row.tobytes() for row in rows))
        elif end == len(tokens):
            row = _vector(pool, *tokens[pool.skip :])
            result.pooled[number] = Pooled(len(row), row.tobytes())

    def _likely(self, token: int, most: int, rank: int | None = None) -> TokenLogprobs:
        """Return invented log-probabilities, with `token` as the first of the `most` likeliest tokens."""
        top = tuple(self._first + (token - self._first + k) % self._ordinary for k in range(most))
        return TokenLogprobs(-1.0, top, tuple(-1.0 - k for k in range(most)), rank)


def _vector(pool: Pool, *hashed: int) -> array[float]:
    """Return numbers that depend on all integers in `hashed`: an embedding, or probabilities of labels."""
    embedding = embeds(pool.task)
    count = DIMENSIONS if embedding else LABELS
    drawn = array("h", shake_128(array("i", hashed).tobytes()).digest(2 * count))
    numbers = [each / 2**15 for each in drawn[: pool.dimensions]]
    if not embedding and pool.activation is not False:
        numbers = [math.exp(each) for each in numbers]
        return array("f", (each / sum(numbers) for each in numbers))
    if embedding and pool.normalize is not False:
        length = math.hypot(*numbers) or 1.0
        numbers = [each / length for each in numbers]
    return array("f", numbers)
