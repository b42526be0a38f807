"""Steps that only decode, captured and replayed: the logic on a CPU, the real thing where there is a GPU."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.kernels.reference.attention import PagedAttention
from infd.kernels.reference.lora import Lora
from infd.kernels.select import CANDIDATES, insisting
from infd.memory import MemoryPart
from infd.request import Adapter, SamplingParams
from infd.runner.cuda_graphs.buffers import sizes
from infd.runner.cuda_graphs.capture import CudaGraphs
from infd.runner.cuda_graphs.padded_step import PATIENCE
from infd.runner.pulse import Pulse
from infd.runner.start import assembly, loading
from infd.scheduler.plan import Grant, Load, StepPlan
from tests.runner.cuda_driver import Bank, FakeDriver
from tests.runner.driving import join, span
from tests.runner.recording import Impossible, Recordings, SlotTables, TableAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infd.adapters.fit import Target
    from infd.runner.cuda_graphs.capture import Graphs
    from infd.runner.start.assembly import Loaded

ROWS = 6
PAGE = 4
PROMPTS = [[(17 * row + 5 * i) % 190 + 3 for i in range(3 + 4 * row)] for row in range(ROWS)]


@dataclass
class Served:
    """A tiny model, and the tokens that its sequences have so far."""

    loaded: Loaded

    def start(self, rows: int, *, slots: tuple[int, ...] = (), loads: Sequence[Load] = ()) -> list[list[int]]:
        """Compute the prompts of some rows, as `prompts` plans; return the first tokens."""
        return [self.step(self.prompts(rows, slots=slots, loads=loads))]

    def prompts(self, rows: int, *, slots: tuple[int, ...] = (), loads: Sequence[Load] = ()) -> StepPlan:
        """Plan the prompts of some rows, each with pages for 16 further tokens.

        slots  adapter slot by row; rows not in it have no adapter
        """
        groups = len(self.loaded.capacity.layout.groups)
        joins, spans, page = [], [], 1
        for row, prompt in enumerate(PROMPTS[:rows]):
            held = -(-(len(prompt) + 16) // PAGE)
            tables = [list(range(page + held * group, page + held * (group + 1))) for group in range(groups)]
            page += held * groups
            sampling = SamplingParams(max_tokens=16, temperature=0.8 if row % 2 else 0.0)
            joins.append(join(row, prompt, tables, sampling, seed=row))
            joins[-1].slot = slots[row] if row < len(slots) else 0
            joins[-1].regime = self.loaded.capacity.layout.regimes.of(len(prompt), len(prompt))
            spans.append(span(row, 0, len(prompt)))
        return StepPlan(0, joins, [], spans, [*loads])

    def go_on(self, rows: int, steps: int) -> list[list[int]]:
        return [self.step(plan) for plan in self.decoding(rows, steps)]

    def decoding(self, rows: int, steps: int) -> list[StepPlan]:
        return [
            StepPlan(1, [], [], [span(row, len(PROMPTS[row]) + step, 1) for row in range(rows)])
            for step in range(steps)
        ]

    def step(self, plan: StepPlan) -> list[int]:
        runner = self.loaded.runner
        with runner.active():
            result = runner.read(runner.sample(runner.forward(plan)))
        assert not result.failed
        return result.tokens

    @property
    def captured(self) -> list[int]:
        return self.loaded.runner.facts()["graphs"]["captured"]

    @property
    def with_adapters(self) -> list[int]:
        return self.loaded.runner.facts()["graphs"]["with_adapters"]

    @property
    def targets(self) -> Sequence[Target]:
        """The products that adapters may change."""
        return self.loaded.reader._targets

    def adapter(self, slot: int, seed: int, rank: int = 2, targets: slice = slice(1, 5)) -> Load:
        """Return the load of an adapter that changes some of the model's products, much."""
        generator = torch.Generator().manual_seed(seed)
        low = {}
        for target in self.targets[targets]:
            stack = (target.experts,) if target.experts else ()
            a = torch.randn(*stack, rank, target.inputs, generator=generator)
            outputs = next(iter(target.modules.values()))
            low[target] = LowRank(a, [LowRankPart(torch.randn(*stack, outputs, rank, generator=generator), 0, 0)])
        adapter = Adapter(f"a{seed}", seed)
        self.loaded.runner.adapters.hold(adapter, low)
        return Load(slot, adapter)

    def idle(self) -> bool:
        with self.loaded.runner.active():
            return self.loaded.idle()


@pytest.fixture
def serve(tiny, monkeypatch) -> Callable[..., Served]:
    def make(graphs: Graphs | None, variant: str = "qwen3", *, start_s: float = 0.0, dtype: str = "float32") -> Served:
        monkeypatch.setattr(PagedAttention, "captured", TableAttention.captured)
        # Kernels outside of torch are invisible to a recording.
        monkeypatch.setattr(loading, "candidates", lambda model: insisting("reference", CANDIDATES))
        monkeypatch.setattr(assembly, "graphs_of", lambda device, settings: graphs)
        monkeypatch.setattr("infd.runner.cuda_graphs.decoding.START_S", start_s)
        return Served(loading.build(settings(str(tiny(variant)), "cpu", dtype=dtype), Pulse()))

    return make


def settings(path: str, kind: str, *, graphs: bool = True, dtype: str = "float32") -> Config:
    return Config(
        model=ModelConfig(path=path, dtype=dtype),  # type: ignore[arg-type]
        device=DeviceConfig(kind=kind, threads=1, graphs=graphs),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_seqs=ROWS, step_tokens=128),
        cache=CacheConfig(bytes=2**21, page_tokens=PAGE),
    )


def test_sizes_cover_every_count_and_pad_by_little():
    assert sizes(1) == [1]
    assert sizes(6) == [1, 2, 4, 6]
    assert sizes(64) == [1, 2, 4, *range(8, 65, 4)]
    for most in range(1, 300):
        found = sizes(most)
        assert found == sorted(set(found))
        assert found[-1] == most
        for smaller, larger in pairwise(found):
            assert larger - smaller - 1 <= max(3, smaller // 8)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "phi3-long"])  # of the last, some rows have long angles
def test_captured_steps_give_the_tokens_that_others_do(serve, variant):
    graphs = Recordings()
    eager, replayed = serve(None, variant), serve(graphs, variant)
    while replayed.idle():
        pass
    assert replayed.captured == sizes(ROWS)
    for rows in (1, 3, 6, 5):
        assert replayed.start(rows) == eager.start(rows)
        assert replayed.go_on(rows, 5) == eager.go_on(rows, 5)
    assert graphs.made == len(sizes(ROWS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("logits_bytes", [0, 2**25])
def test_a_captured_step_is_equal_to_one_that_is_not(serve, monkeypatch, logits_bytes, dtype):
    monkeypatch.setattr("infd.runner.cuda_graphs.buffers.LOGITS_BYTES", logits_bytes)
    served = serve(Recordings(), dtype=dtype)
    decoding = served.loaded.runner.decoding
    served.start(3)
    spans = [span(row, len(PROMPTS[row]), 1) for row in range(3)]
    with served.loaded.runner.active():
        logits, asking, appended = decoding.forward(spans)
        assert logits.dtype is getattr(torch, dtype)
        before, ends, tokens = logits.clone(), asking.ends.clone(), logits.argmax(-1)
        assert (appended is not None) == (logits_bytes > 0)
        while decoding.capture_next():
            pass
        served.start(3)
        after, again, appended = decoding.forward(spans)
        assert after.equal(before)
        assert appended is None or appended.tokens.equal(tokens)
        assert again.ends.equal(ends)
        assert again.rows.tolist() == [0, 1, 2]


ASKED = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 9},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {7: 3.0}},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "bad_words": ((9,),), "min_tokens": 4},
)


def started(served: Served, asked) -> None:
    """Compute the prompts of rows that ask for these."""
    joins, page = [], 1
    groups = len(served.loaded.capacity.layout.groups)
    for row, each in enumerate(asked):
        held = -(-(len(PROMPTS[row]) + 16) // PAGE)
        tables = [list(range(page + held * group, page + held * (group + 1))) for group in range(groups)]
        page += held * groups
        joins.append(join(row, PROMPTS[row], tables, SamplingParams(max_tokens=16, **each), seed=row))
    served.step(StepPlan(0, joins, [], [span(row, 0, len(PROMPTS[row])) for row in range(len(asked))]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_ask_for_more_than_the_likeliest_token_get_it_from_a_captured_step_too(serve, monkeypatch, dtype):
    whole = serve(Recordings(), start_s=60.0, dtype=dtype)
    monkeypatch.setattr("infd.runner.cuda_graphs.buffers.LOGITS_BYTES", 0)
    outside = serve(Recordings(), start_s=60.0, dtype=dtype)
    for asked in (ASKED, ASKED[1:], ASKED[:1]):
        started(whole, asked)
        started(outside, asked)
        assert whole.go_on(len(asked), 6) == outside.go_on(len(asked), 6)


def test_logits_of_16_bits_have_twice_as_many_rows_in_as_many_bytes(serve, monkeypatch):
    vocabulary = serve(None).loaded.runner.instance.rows.vocab_size
    monkeypatch.setattr("infd.runner.cuda_graphs.buffers.LOGITS_BYTES", 2 * 4 * vocabulary)
    for dtype, rows in (("float32", 2), ("bfloat16", 4)):
        frames = serve(Recordings(), dtype=dtype).loaded.runner.decoding._plain
        assert [frame.size for frame in frames if frame._logits is not None][-1] == rows


@pytest.mark.parametrize(("asked", "appends"), [([ASKED[0]] * 3, 0), ([ASKED[0], ASKED[3]], 0), (ASKED[:2], 1)])
def test_where_all_rows_are_greedy_the_sampler_launches_nothing(serve, monkeypatch, asked, appends):
    served = serve(Recordings(), start_s=60.0)
    started(served, asked)
    calls = []
    rows = served.loaded.runner.instance.rows
    monkeypatch.setattr(rows, "append", lambda *given: calls.append(given) or type(rows).append(rows, *given))
    tokens = served.go_on(len(asked), 1)[0]
    assert len(calls) == appends
    ends = [len(prompt) + 1 for prompt in PROMPTS[: len(asked)]]
    assert [int(rows.tokens[row, end]) for row, end in enumerate(ends)] == tokens
    assert rows.length[: len(asked)].tolist() == [end + 1 for end in ends]


def test_a_row_of_a_captured_step_whose_logits_are_not_finite_fails_alone(serve):
    served = serve(Recordings(), start_s=60.0)
    runner = served.loaded.runner
    served.start(3)
    with runner.active():
        for pages in runner.instance.cache:
            pages.v[int(runner.instance.rows.tables[1, 0, 0])] = torch.nan
        plan = StepPlan(1, [], [], [span(row, len(PROMPTS[row]), 1) for row in range(3)])
        result = runner.read(runner.sample(runner.forward(plan)))
    assert list(result.failed) == [1]
    assert len(result.tokens) == 2


def test_rows_of_other_sequences_and_free_rows_are_unchanged(serve):
    served = serve(Recordings())
    while served.idle():
        pass
    served.start(5)
    rows, cache = served.loaded.runner.instance.rows, served.loaded.runner.instance.cache
    mine = int(rows.tables[0, 0, len(PROMPTS[0]) // PAGE])
    before = [pages.k.clone() for pages in cache]
    lengths = rows.length.clone()
    served.step(StepPlan(1, [], [], [span(row, len(PROMPTS[row]), 1) for row in (0,)]))
    assert (rows.length - lengths).tolist() == [1] + [0] * ROWS
    for pages, old in zip(cache, before, strict=True):
        changed = (pages.k != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {0, mine}
        assert mine in changed


def test_a_page_granted_in_the_step_is_written_by_it(serve):
    served = serve(Recordings())
    while served.idle():
        pass
    prompt = [5, 6, 7, 8]
    first = served.step(StepPlan(0, [join(0, prompt, [[1]])], [], [span(0, 0, 4)]))
    second = served.step(StepPlan(1, [], [Grant(0, 0, 1, 9)], [span(0, 4, 1)]))
    again = served.step(StepPlan(2, [join(1, prompt + first, [[2, 3]])], [], [span(1, 0, 5)]))
    assert second == again


def test_the_step_of_one_sequence_is_captured_first_and_then_the_largest(serve):
    served = serve(Recordings())
    order = [served.captured]
    while served.idle():
        order.append(served.captured)
    assert order == [[1], [1, 6], [1, 4, 6]]
    assert served.captured == [1, 2, 4, 6]
    assert not served.idle()


def test_before_the_model_serves_all_sizes_are_captured(serve):
    served = serve(Recordings(), start_s=60.0)
    assert served.captured == [1, 2, 4, 6]
    assert not served.idle()


def test_the_start_waits_for_captures_as_long_as_it_may_and_the_others_are_to_come(serve, monkeypatch, caplog):
    class Slow(Recordings):
        now = 100.0

        def capture(self, work):
            self.now += 0.75
            return super().capture(work)

    graphs = Slow()
    served = serve(graphs)
    assert served.captured == [1]
    decoding = served.loaded.runner.decoding
    monkeypatch.setattr(decoding, "_clock", lambda: graphs.now)
    monkeypatch.setattr("infd.runner.cuda_graphs.decoding.START_S", 1.0)
    with served.loaded.runner.active(), caplog.at_level("INFO"):
        decoding.begin()
    facts = served.loaded.runner.facts()["graphs"]
    assert (facts["captured"], facts["to_come"]) == ([1, 4, 6], 1)
    assert 1.5 <= facts["capture_s"] < 60
    assert "decoding steps: 3 sizes captured in 1.5 s, 1 to be captured while idle" in caplog.text
    assert not served.idle()
    assert served.captured == [1, 2, 4, 6]


def test_a_size_that_is_wanted_often_is_captured_without_waiting_for_an_idle_moment(serve):
    served = serve(Recordings())
    served.start(4)
    served.go_on(4, PATIENCE)
    assert served.captured == [1]
    served.go_on(4, 1)
    assert served.captured == [1, 4]


class Refused(Exception):
    """An error that is no RuntimeError, as Triton raises for a kernel too large for a GPU."""


@pytest.mark.parametrize("error", [None, Refused("shared memory, 300000 of 232448 bytes")])
def test_if_capturing_fails_steps_are_computed_uncaptured(serve, caplog, error):
    graphs = Impossible(error=error)
    served, eager = serve(graphs), serve(None)
    assert served.captured == []
    assert not served.idle()
    assert graphs.tried == [1]
    assert "steps of 1 sequences are not captured" in caplog.text
    assert served.start(3) == eager.start(3)
    assert served.go_on(3, 3) == eager.go_on(3, 3)


def test_where_memory_is_short_of_a_large_size_the_smaller_ones_are_captured(serve):
    graphs = Impossible(most=2)
    served, eager = serve(graphs), serve(None)
    while served.idle():
        pass
    assert graphs.tried == [1, 6, 4, 2]
    assert served.captured == [1, 2]
    assert served.loaded.runner.facts()["graphs"]["failed"] == [4, 6]
    for rows in (1, 2, 5):
        assert served.start(rows) == eager.start(rows)
        assert served.go_on(rows, 3) == eager.go_on(rows, 3)


def test_a_size_whose_capture_failed_is_tried_again_after_ever_more_steps(serve, monkeypatch):
    monkeypatch.setattr("infd.runner.cuda_graphs.padded_step.RETRY", 3)
    monkeypatch.setattr("infd.runner.cuda_graphs.padded_step.GROWTH", 2)
    graphs = Impossible()
    served = serve(graphs)
    assert graphs.tried == [1]
    served.start(1)
    served.go_on(1, 4)
    assert graphs.tried == [1, 1]
    served.start(1)
    served.go_on(1, 5)
    assert graphs.tried == [1, 1]
    graphs.most = 1
    served.start(1)
    served.go_on(1, 1)
    assert graphs.tried == [1, 1, 1]
    assert served.captured == [1]
    assert served.loaded.runner.facts()["graphs"]["failed"] == [2, 4, 6]


class Torch:
    """A fake of the torch functions that CudaGraphs uses: tracks the current stream, and pools in use or recorded to.

    invalid  number of next captures that end invalidated
    emptied  number of times caches were emptied
    dice     whether torch's random generator works outside of captures
    """

    def __init__(self, monkeypatch) -> None:
        self.current, self.side = (SimpleNamespace(wait_stream=lambda other: None) for _ in range(2))
        self.usual = self.current
        self.invalid = self.emptied = 0
        self.dice = True
        self.users: Counter[int] = Counter()  # by pool
        self.used: list[int] = []
        self.recording: set[int] = set()
        self.asked: set[int] = set()  # graphs that the allocator of pinned memory asks
        self.dangling = 0  # of these, the freed ones
        numbers = count(1)
        torch_ = self

        class Graph:
            pool, ended = 0, False

            def capture_begin(self, *, pool, capture_error_mode):
                assert torch_.current is torch_.side, "the usual stream cannot be captured"
                assert capture_error_mode == "thread_local"
                assert pool not in torch_.recording, "already recording"
                assert pool not in torch_.used or torch_.users[pool] > 0, "a pool that nobody uses any more"
                torch_.recording.add(pool)
                torch_.used.append(pool)
                torch_.users[pool] += 1
                torch_.asked.add(id(self))
                torch_.dice = False
                self.pool = pool

            def capture_end(self):
                if torch_.invalid:
                    torch_.invalid -= 1
                    raise RuntimeError("operation failed due to a previous error during capture")
                torch_.recording.remove(self.pool)
                torch_.asked.remove(id(self))
                torch_.dice = self.ended = True

            def replay(self):
                pass

            def __del__(self):
                torch_.dangling += id(self) in torch_.asked
                torch_.users[self.pool] -= self.ended

        @contextmanager
        def stream(wanted):
            before, self.current = self.current, wanted
            try:
                yield
            finally:
                self.current = before

        def end(device, pool):
            if pool not in torch_.recording:
                raise RuntimeError("not recording")
            torch_.recording.remove(pool)

        def release(device, pool):
            torch_.users[pool] -= 1

        def empty():
            self.emptied += 1

        zeros = torch.zeros
        fakes = {
            "graph_pool_handle": lambda: next(numbers),
            "Stream": lambda device: self.side,
            "current_stream": lambda device: self.current,
            "stream": stream,
            "CUDAGraph": Graph,
            "empty_cache": empty,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)


def test_graphs_share_a_pool_as_long_as_there_are_any_and_take_none_again_that_has_no_more(monkeypatch):
    books, graphs = Torch(monkeypatch), CudaGraphs(torch.device("cuda", 0))
    replays = [graphs.capture(lambda: None) for _ in range(3)]
    del replays[0]
    replays.append(graphs.capture(lambda: None))
    assert len(set(books.used)) == 1
    replays.clear()
    kept = graphs.capture(lambda: None)
    assert kept
    assert len(set(books.used)) == 2


def test_one_capture_after_another_empties_no_caches(monkeypatch):
    books, graphs = Torch(monkeypatch), CudaGraphs(torch.device("cuda", 0))
    kept = [graphs.capture(lambda: None) for _ in range(3)]
    assert kept
    assert books.emptied == 0


@pytest.mark.parametrize("before", [0, 2])
def test_after_a_capture_that_was_invalidated_steps_go_where_they_did_and_others_can_be_captured(monkeypatch, before):
    books, graphs = Torch(monkeypatch), CudaGraphs(torch.device("cuda", 0))
    kept = [graphs.capture(lambda: None) for _ in range(before)]
    books.invalid = 1
    with pytest.raises(RuntimeError, match="previous error"):
        graphs.capture(lambda: None)
    assert books.current is books.usual
    assert not books.recording
    assert books.dice
    gc.collect()
    assert len(books.asked) == 1
    assert books.dangling == 0
    kept += [graphs.capture(lambda: None) for _ in range(2)]
    assert len(kept) == before + 2
    assert books.used[-2:] == [books.used[-1]] * 2
    assert books.used[-1] not in books.used[:-2]
    kept.clear()


def test_if_no_capture_can_end_a_warning_names_torchs_random_state(monkeypatch, caplog):
    books, graphs = Torch(monkeypatch), CudaGraphs(torch.device("cuda", 0))
    books.invalid = 2
    with pytest.raises(RuntimeError, match="previous error"):
        graphs.capture(lambda: None)
    assert not books.dice
    assert "torch's random numbers may fail on cuda:0" in caplog.text
    gc.collect()
    assert len(books.asked) == 2
    assert books.dangling == 0


def test_a_capture_in_which_the_work_fails_is_over_and_the_next_one_is_made(monkeypatch):
    books, graphs = Torch(monkeypatch), CudaGraphs(torch.device("cuda", 0))
    tries = iter([None, Refused("no more"), None, None])

    def work():
        if (error := next(tries)) is not None:
            raise error

    with pytest.raises(Refused):
        graphs.capture(work)
    assert not books.recording
    assert books.dice
    assert graphs.capture(work)


def test_a_capture_that_lacks_memory_is_tried_again_with_torchs_caches_emptied(monkeypatch):
    books, graphs = Torch(monkeypatch), CudaGraphs(torch.device("cuda", 0))
    short = torch.OutOfMemoryError("no more")
    for tries, raised in (((None, short, None, None), False), ((short, None, short), True)):
        left, before = iter(tries), books.emptied

        def work(left=left):
            if (error := next(left)) is not None:
                raise error

        with pytest.raises(torch.OutOfMemoryError) if raised else nullcontext():
            assert graphs.capture(work)
        assert books.emptied == before + 1
        assert not books.recording


def test_steps_with_prompts_or_scores_are_not_captured_nor_adapters_that_cannot_be(serve):
    served = serve(Recordings())
    runner = served.loaded.runner
    one, two = span(0, 5, 1), span(1, 9, 1)

    def takes(*spans):
        with runner.active():
            return runner.decoding.forward(spans) is not None

    assert takes(one, two)
    assert not takes(one, span(1, 0, 2))
    assert not takes(one, span(1, 9, 1, samples=0))
    assert not takes(one, span(1, 3, 1, scores=1))
    runner.instance.rows.slots[1] = 2
    assert not takes(one, two)


def test_steps_with_adapters_have_graphs_of_their_own(serve, monkeypatch):
    monkeypatch.setattr(Lora, "captured", SlotTables.captured)
    graphs = Recordings()
    served, eager = serve(graphs), serve(None)
    while served.idle():
        pass
    assert served.with_adapters == []
    plain = graphs.made
    for slots, load, made in (
        ((1, 0, 1), (1, 1), 4),  # the first adapter: its steps are captured from now on
        ((0, 2, 1), (2, 2), 4),  # a second adapter, in an empty slot: it fits the tables, and the graphs stay
        ((2, 2, 0), (2, 3), 4),  # another in the second slot
        ((2, 1, 0), (2, 4, 1, slice(1, 3)), 4),  # one that changes less, by less
        ((1, 3, 2), (3, 5, 3), 8),  # an adapter of a larger rank: the tables grow, and captured steps are discarded
        ((3, 1, 2), (3, 6, 2, slice(1, 6)), 12),  # one that changes something that none has changed yet
        ((0, 0, 0), (1, 7), 12),
    ):
        first = [each.start(4, slots=slots, loads=[each.adapter(*load)]) for each in (served, eager)]
        while served.idle():
            pass
        assert served.with_adapters == sizes(ROWS)
        assert graphs.made == plain + made
        assert first[0] == first[1]
        assert served.go_on(4, 4) == eager.go_on(4, 4)


def test_steps_with_adapters_of_a_mixture_are_not_captured(serve, monkeypatch):
    monkeypatch.setattr(Lora, "captured", SlotTables.captured)
    served, eager = serve(Recordings(), "qwen3-moe"), serve(None, "qwen3-moe")
    targets = slice(1, 7)  # of attention and of experts
    slots = (1, 0, 1, 0)
    first = [each.start(4, slots=slots, loads=[each.adapter(1, 1, targets=targets)]) for each in (served, eager)]

    assert any(target.experts for target in served.targets[targets])
    assert first[0] == first[1]
    assert served.go_on(4, 4) == eager.go_on(4, 4)
    assert served.with_adapters == []


@pytest.mark.parametrize(("kind", "depth"), [("cpu", 1), pytest.param("cuda", 2, marks=pytest.mark.gpu)])
def test_adapters_come_and_go_while_steps_are_in_flight(serve, tiny, monkeypatch, kind, depth):
    """Each round outgrows the tables of the one before: its graphs are freed while their last replays are in flight.

    depth  steps in flight; on a CPU results are read from a step's own memory, which the next step overwrites
    """
    if kind == "cpu":
        monkeypatch.setattr(Lora, "captured", SlotTables.captured)
        served, eager = serve(Recordings()), serve(None)
    elif torch.cuda.is_available():
        served, eager = (
            Served(loading.build(settings(str(tiny("qwen3")), "cuda", graphs=graphs), Pulse()))
            for graphs in (True, False)
        )
    else:
        pytest.skip("no GPU here")
    while served.idle():
        pass
    monkeypatch.setattr("infd.runner.cuda_graphs.padded_step.PATIENCE", 2)  # captures interrupt the stream of steps
    slots, with_adapters = (1, 0, 2, 1), []

    def tokens(each: Served) -> Iterator[list[int]]:
        runner, flight = each.loaded.runner, deque()
        for number, rank in enumerate((2, 20, 40, 80, 160)):  # Triton's tables double, from 16 ranks
            loads = [each.adapter(1, 2 * number, rank), each.adapter(2, 2 * number + 1)]
            for plan in (each.prompts(4, slots=slots, loads=loads), *each.decoding(4, 12)):
                flight.append(runner.sample(runner.forward(plan)))
                if len(flight) == depth:
                    yield runner.read(flight.popleft()).tokens
            if each is served:
                with_adapters.append(each.with_adapters)
            for load in loads:
                runner.adapters.forget(load.adapter, load.slot)
        yield from (runner.read(step).tokens for step in flight)

    found = []
    for each in (served, eager):
        with each.loaded.runner.active():
            found.append(list(tokens(each)))
    assert with_adapters == [[4]] * 5, "or no replay is in flight when its graph is freed"
    assert len(found[0]) == 5 * 13
    assert found[0] == found[1]


def test_an_unreferenced_runner_is_freed_at_once_with_its_graphs(serve, monkeypatch):
    """The one that is tried first would take memory from the one that serves."""
    monkeypatch.setattr(Lora, "captured", SlotTables.captured)
    served = serve(Recordings())
    served.start(4, slots=(1,), loads=[served.adapter(1, 1)])
    served.go_on(4, 2)
    while served.idle():
        pass
    gone = weakref.ref(served.loaded.runner)
    gc.collect()
    gc.disable()
    try:
        del served
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("apart", "level"), [(False, 2), (True, 1), (True, 2)])
def test_captured_steps_stay_valid_after_weights_and_cache_were_released(serve, monkeypatch, apart, level):
    """apart: weights and cache are in the memory of the fake driver."""
    if apart:
        monkeypatch.setattr(loading, "bank_of", lambda device: Bank(FakeDriver()))
    served = serve(Recordings())
    while served.idle():
        pass
    expected = served.start(4) + served.go_on(4, 4)
    residence = served.loaded.residence
    residence.sleep(level)
    assert residence.memory.released == {MemoryPart.WEIGHTS, MemoryPart.CACHE}
    assert not served.idle()
    residence.wake((MemoryPart.WEIGHTS, MemoryPart.CACHE))
    assert served.start(4) + served.go_on(4, 4) == expected
    assert served.captured == sizes(ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "dtype"), [("qwen3", "float32"), ("gemma3", "float32"), ("qwen3", "bfloat16")])
@pytest.mark.parametrize("logits_bytes", [0, 2**25])
def test_on_a_gpu_captured_steps_are_equal_to_those_that_are_not(tiny, monkeypatch, variant, dtype, logits_bytes):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    monkeypatch.setattr("infd.runner.cuda_graphs.decoding.START_S", 0.0)
    monkeypatch.setattr("infd.runner.cuda_graphs.buffers.LOGITS_BYTES", logits_bytes)
    loaded, eager = (
        loading.build(settings(str(tiny(variant)), "cuda", graphs=graphs, dtype=dtype), Pulse())
        for graphs in (True, False)
    )
    served, plain = Served(loaded), Served(eager)
    decoding = loaded.runner.decoding
    served.start(3)
    spans = [span(row, len(PROMPTS[row]), 1) for row in range(3)]
    with loaded.runner.active():
        before = decoding.forward(spans)[0].clone()
        assert before.dtype is getattr(torch, dtype)
        assert served.captured == [1], "or the test compares captured steps with themselves"
        while decoding.capture_next():
            pass
        served.start(3)
        assert decoding.forward(spans)[0].equal(before)
    assert served.captured == sizes(ROWS)
    for rows in (1, 3, 6, 5) if dtype == "float32" else ():  # padded steps round otherwise
        assert served.start(rows) == plain.start(rows)
        assert served.go_on(rows, 5) == plain.go_on(rows, 5)
    torch.cuda.synchronize()
