"""Host and device never wait for each other: on a device that raises where a GPU would be waited for."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from itertools import count
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.kernels.reference.drawing.draw import Draw
from infd.kernels.select import select
from infd.models import registry
from infd.request import Adapter, SamplingParams
from infd.runner import staging
from infd.runner.adapters import DeviceSlots
from infd.runner.arenas.cache import CacheSpec
from infd.runner.instance import Instance
from infd.runner.pulse import Pulse
from infd.runner.rows import Rows
from infd.runner.runner import Runner
from infd.runner.staging import BUFFER_BYTES, KEPT_BYTES, NAP_S, Pinned, Shared
from infd.scheduler.plan import Grant, Load, StepPlan
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load
from tests.models.driving import Heap
from tests.runner.apart import APART, Away, Device, Waited
from tests.runner.driving import CPU, join, span
from tests.runner.recording import TableAttention
from tests.runner.test_overlap import ASKED, SCORED
from tests.tiny import make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

PAGE = 4
STEPS = 7


@pytest.fixture
def device() -> Iterator[Device]:
    with Device() as device, torch.inference_mode():
        yield device


def numbers() -> Tensor:
    return torch.arange(6.0, device=APART).view(2, 3)


HOST = torch.ones(3)
READING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "int": lambda x: int(x[0, 0]),
    "truth": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to the host": lambda x: x.to("cpu", non_blocking=True),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 3),
    "unique": lambda x: x.unique(),
    "a mask": lambda x: x[x > 3],
    "a mask written": lambda x: x.__setitem__(x > 3, 0.0),
    "a list": lambda x: x[[0, 1]],
    "counts": lambda x: x.repeat_interleave(x[0].long(), dim=1),
    "equal": lambda x: torch.equal(x, x),
    "a tensor of numbers": lambda x: torch.tensor([1.0], device=x.device),
    "the host's index": lambda x: x.index_select(0, torch.tensor([1])),
    "up from pageable memory": lambda x: HOST.to(x.device, non_blocking=True),
    "filled from pageable memory": lambda x: x[0].copy_(HOST, non_blocking=True),
    "down to pageable memory": lambda x: torch.empty(3).copy_(x[0], non_blocking=True),
}


@pytest.mark.parametrize("how", READING)
def test_whatever_waits_for_a_gpu_raises(device, how):
    x = numbers()
    with device.unsynchronised(), pytest.raises(Waited):
        READING[how](x)


def test_pinned_memory_raises_only_where_its_copies_block(device):
    x, memory = numbers(), device.pin(12).view(torch.float32)
    with device.unsynchronised():
        memory.to(APART, non_blocking=True)
        memory.copy_(x[0], non_blocking=True)
        for blocking in (lambda: memory.to(APART), lambda: memory.copy_(x[0])):
            with pytest.raises(Waited):
                blocking()


class Unlimited(Draw):
    """Chooses among all tokens. The reference waits where it is to look at the likely ones alone."""

    def __call__(self, logits, drawing, *, truncated):
        return super().__call__(logits, drawing, truncated=False)


class Again:
    """Captures nothing, and does the work again."""

    def capture(self, work):
        return work


def assembled(directory, device, staging, graphs, ops=None) -> Runner:
    ops = ops or select(APART, torch.float32).replace(attention=TableAttention(), draw=Unlimited())
    with Checkpoint(directory) as checkpoint:
        stored = checkpoint.tensors
        model = registry.build(checkpoint.config, ops, dtype=torch.float32, device=device, max_len=64, stored=stored)
        load(model, checkpoint, Heap(device))
    layout = model.cache_layout(PAGE)
    rows = Rows(
        rows=len(ASKED),
        max_len=64,
        page_tokens=[PAGE] * len(layout.groups),
        vocab_size=model.vocab_size,
        staging=staging,
        kernels=ops.rows,
    )
    cache = CacheSpec(layout, model.page_tensors(PAGE)).allocate(90 * len(layout.groups), Heap(device))
    slots = DeviceSlots(ops.lora, staging)
    runner = Runner(Instance(model, ops, layout, cache, rows, slots, Pulse()), graphs)
    runner.targets = model.targets[1:5]
    return runner


def plans(runner: Runner) -> Iterator[StepPlan]:
    """Plan prompts, one of them in two parts and one behind an adapter; decoding; another sequence in a row left."""
    groups, page = len(runner.instance.layout.groups), 1
    joins, spans = [], []
    for row, (asked, scored) in enumerate(zip(ASKED, SCORED, strict=True)):
        prompt = [(7 * row + 3 * i) % 190 + 3 for i in range(5 + row)]
        held = -(-(len(prompt) + STEPS) // PAGE) - 1
        tables = [list(range(page + held * group, page + held * (group + 1))) for group in range(groups)]
        page += held * groups
        joins.append(join(row, prompt, tables, SamplingParams(max_tokens=9, **asked), scored=scored, seed=row))
        joins[-1].regime = runner.instance.layout.regimes.of(len(prompt), len(prompt))
        spans.append(span(row, 0, len(prompt), scores=0 if scored is None else len(prompt) - 1))
    joins[1].slot = 1
    low = {
        target: LowRank(
            torch.ones(2, target.inputs), [LowRankPart(torch.ones(next(iter(target.modules.values())), 2) / 9, 0, 0)]
        )
        for target in runner.targets
    }
    adapter = Adapter("a", 1)
    runner.adapters.hold(adapter, low)
    cut = [replace(each, count=3, samples=0) if each.row == 0 else each for each in spans]
    yield StepPlan(0, joins, [], cut, [Load(1, adapter)])
    yield StepPlan(1, [], [], [span(0, 3, 2), *(span(row, 5 + row, 1) for row in range(1, len(ASKED)))])
    for step in range(1, STEPS):
        grants = []
        starts = [4 + row + step + (row > 0) for row in range(len(ASKED))]
        for row, start in enumerate(starts):
            index, turn = divmod(start, PAGE)
            if not turn and index >= len(joins[row].tables[0]):
                grants += [Grant(row, group, index, page + group) for group in range(groups)]
                page += groups
        late = [row for row in range(len(ASKED)) if row != 1 or step < 3]  # then nothing wants the adapter
        yield StepPlan(step + 1, [], grants, [span(row, starts[row], 1) for row in late])
    again = join(1, [4, 5, 6], [[page + group] for group in range(groups)], SamplingParams(max_tokens=9), seed=3)
    yield StepPlan(STEPS + 1, [again], [], [span(1, 0, 3)])


def results(runner: Runner, strict) -> list[object]:
    """Compute the plans, two in flight."""
    found, flight = [], deque()
    for plan in plans(runner):
        with strict():
            flight.append(runner.sample(runner.forward(plan)))
            if len(flight) == 2:
                found.append(runner.read(flight.popleft()))
    found += [runner.read(each) for each in flight]
    assert not any(result.failed for result in found)
    return [(each.accepted, each.tokens, each.logprobs, each.prompt_logprobs) for each in found]


@pytest.mark.parametrize("graphs", [None, Again()], ids=["launched", "replayed"])
@pytest.mark.parametrize("variant", ["llama", "gemma3", "phi3-long", "dynamic"])
def test_steps_are_issued_without_waiting_and_equal_those_in_shared_memory(tiny, device, variant, graphs, tmp_path):
    changed = {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 8.0}}
    checkpoint = make("llama", tmp_path, **changed) if variant == "dynamic" else tiny(variant)
    carried = Pinned(APART, device.pin, device.event)
    apart = assembled(checkpoint, APART, carried, graphs)
    here = assembled(checkpoint, CPU, Shared(CPU), graphs)
    assert apart.overlaps
    assert not here.overlaps
    assert isinstance(apart._rows.tokens, Away)
    expected = results(here, nullcontext)
    assert str(results(apart, device.unsynchronised)) == str(expected)
    assert carried.buffers == 2


def test_a_prompt_of_many_steps_has_two_of_them_in_flight_and_no_more(tiny, device):
    carried = Pinned(APART, device.pin, device.event)
    runner = assembled(tiny("llama"), APART, carried, None)
    prompt, flight = [5 + i for i in range(40)], deque()
    with device.unsynchronised():
        for step in range(10):
            joins = [join(0, prompt, [list(range(1, 12))])] if not step else []
            plan = StepPlan(step, joins, [], [span(0, 4 * step, 4, samples=0)])
            flight.append(runner.sample(runner.forward(plan)))
            if len(flight) == 2:
                pending = flight.popleft()
                assert not pending.buffer.event.query()
                assert not runner.read(pending).tokens
                assert pending.buffer.event.query()
    assert carried.buffers == 2


class Hasty(Pinned):
    """Uses memory again before the device has read it."""

    def _current(self):
        buffer = super()._current()
        if not self._idle:
            buffer.clear()
        return buffer


def test_memory_that_is_used_again_too_soon_is_noticed(tiny, device):
    hasty = assembled(tiny("llama"), APART, Hasty(APART, device.pin, device.event), None)
    with pytest.raises(AssertionError, match="is used again too soon"):
        results(hasty, device.unsynchronised)


def test_a_result_that_is_read_before_it_has_arrived_is_noticed(tiny, device):
    class Impatient(Pinned):
        def wait(self, buffer):
            pass

    impatient = assembled(tiny("llama"), APART, Impatient(APART, device.pin, device.event), None)
    with pytest.raises(AssertionError):
        results(impatient, device.unsynchronised)


class Passing:
    """An event that passes after it was asked a few times, or slept for."""

    def __init__(self, asked: int) -> None:
        self.left = asked
        self.slept = False

    def record(self):
        pass

    def query(self):
        self.left -= 1
        return self.left < 0

    def synchronize(self):
        self.slept = True


@pytest.mark.parametrize(
    ("spin_s", "asked", "slept"),
    [
        (0.0, 0, False),  # it has passed
        (0.0, 1, True),
        (50 * NAP_S, 20, False),
        (50 * NAP_S, 1000, True),
    ],
)
def test_a_wait_asks_for_a_while_and_then_sleeps(monkeypatch, spin_s, asked, slept):
    now = count()  # in naps
    monkeypatch.setattr(staging, "time", SimpleNamespace(perf_counter=lambda: next(now) * NAP_S, sleep=lambda _: None))
    event = Passing(asked)
    carried = Pinned(CPU, lambda size: torch.empty(size, dtype=torch.uint8), lambda: event)
    carried.spin_s = spin_s
    carried.down(torch.ones(3))
    carried.wait(carried.end())
    assert event.slept is slept
    assert event.left < 0 or slept


def test_a_wait_for_a_gpu_makes_that_gpu_current(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    second = torch.device("cuda", 1)
    thread = Thread(target=Pinned(second, lambda size: None, lambda: None).prepare_to_wait)
    thread.start()
    thread.join()
    assert current == [second]


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float32, np.uint8, bool])
def test_arrays_of_any_shape_survive_the_round_trip(device, kind):
    carried = Pinned(APART, device.pin, device.event)
    array = np.arange(24).reshape(2, 3, 4).astype(kind)
    with device.unsynchronised():
        down = carried.down(carried.up(array[:, ::2]))
        lasting = torch.zeros(3, dtype=down.dtype, device=APART)
        carried.fill(lasting, array[0, :, 1])
        buffer = carried.end()
        carried.wait(buffer)
    assert np.array_equal(down.numpy(), array[:, ::2])
    assert np.array_equal(lasting.held.numpy(), array[0, :, 1])


GROUPS = [[np.arange(3), np.arange(5, 7)], [np.zeros(0, np.int64)], [np.arange(4)]]


def test_groups_of_arrays_are_joined_and_copied_together(device):
    carried = Pinned(APART, device.pin, device.event)
    with device.unsynchronised():
        found = carried.up_together(*GROUPS)
        carried.wait(carried.end())
    assert [each.held.tolist() for each in found] == [[0, 1, 2, 5, 6], [], [0, 1, 2, 3]]
    assert [each.tolist() for each in Shared(CPU).up_together(*GROUPS)] == [[0, 1, 2, 5, 6], [], [0, 1, 2, 3]]


def test_a_part_serves_again_once_its_event_has_passed_and_its_results_are_read(device):
    carried = Pinned(APART, device.pin, device.event)
    with device.unsynchronised():
        carried.down(numbers())
        held = carried.end()
        carried.begin()
        carried.up(np.ones(3, np.int64))  # of a step that fails: there is no end
        carried.begin()
        assert carried.buffers == 2
        carried.up(np.ones(3, np.int64))
        assert carried.buffers == 3  # nothing has passed
        carried.wait(held)
        carried.release(held)
        carried.wait(carried.end())  # not read, and so not free
        carried.up(np.ones(3, np.int64))
        assert carried.buffers == 3


def test_a_buffer_grows_as_needed_and_shrinks_after_a_large_step(device):
    carried = Pinned(APART, device.pin, device.event)
    with device.unsynchronised():
        small, large = (carried.up(np.arange(size)) for size in (5, BUFFER_BYTES))
        assert large.held.equal(torch.arange(BUFFER_BYTES))
        carried.up(np.zeros(KEPT_BYTES, np.int64))
        buffer = carried.end()
        carried.wait(buffer)
    assert small.held.equal(torch.arange(5))
    carried.release(buffer)
    carried.up(np.arange(5))
    assert len(buffer._bytes) == BUFFER_BYTES
