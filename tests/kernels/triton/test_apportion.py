"""The device splits the keys of captured steps as the host does for uncaptured steps."""

from __future__ import annotations

import random

import pytest
import torch
from msgspec.structs import replace

from tests.kernels.attention_case import KV_HEADS, Case
from tests.kernels.paging import PagedSpan, attention_batch

ROOM = 40  # parts computed side by side: 20 for each of two key heads


def batch_of(starts, device, *, window=None, count=1):
    spans = [PagedSpan(start, count, [1] * 50) for start in starts]
    batch = attention_batch(spans, page_tokens=4096, window=window, device=torch.device("cpu"))
    return replace(batch, start=batch.start.to(device))


@pytest.fixture
def apportioned(device):
    """Return a function from starts to the device's cut and the host's."""
    from infd.kernels.triton.apportion import Apportioned
    from infd.kernels.triton.blocks import Gpu
    from infd.kernels.triton.tiles import Shape, tile_step

    shape = Shape(KV_HEADS, 2, 8, torch.float32)
    tiling = shape.default_tiling(Gpu())

    def both(starts, **asked):
        batch = batch_of(starts, device, **asked)
        found = Apportioned(batch, shape, tiling, ROOM)
        for tensor in (found.tile_table.tiles, found.tile_table.firsts):
            tensor.fill_(-1)
        found.renew()
        (expected,) = tile_step(batch, shape, tiling, ROOM)
        return found.tile_table, expected

    return both


LENGTHS = random.Random(1)
UNEVEN = [
    [0],
    [100_000],
    [255, 256, 257],
    [100_000, *[50] * 30],
    [*[50] * 30, 100_000],
    [LENGTHS.randrange(9000) for _ in range(128)],
    [LENGTHS.choice([0, 3, 300, 70_000]) for _ in range(131)],
    [LENGTHS.randrange(600) for _ in range(300)],
]


@pytest.mark.parametrize("starts", UNEVEN)
@pytest.mark.parametrize(("window", "count"), [(None, 1), (1000, 1), (None, 3)])
def test_the_device_cuts_as_the_host_does(apportioned, starts, window, count):
    found, expected = apportioned(starts, window=window, count=count)
    used = len(expected.tiles)
    assert found.tiles[:used].tolist() == expected.tiles.tolist()
    assert not found.tiles[used:].any()  # unused parts have no queries
    assert len(found.tiles) == len(starts) + ROOM // KV_HEADS
    alone = list(range(len(starts)))
    assert found.firsts.tolist() == (alone if expected.firsts is None else expected.firsts.tolist())
    assert (found.blocks, found.most_queries) == (expected.blocks, expected.most_queries)


def test_a_long_sequence_among_short_ones_is_split(apportioned):
    found, _ = apportioned([100_000, *[50] * 30])
    assert found.tiles[0, 5] >= ROOM // KV_HEADS - 1
    assert (found.tiles[found.firsts.long()[1:], 5] == 1).all()


STEPS = [[5, 0, 40, 300], [520, 15, 16, 1], [0, 0, 0, 0], [60, 2, 400, 270]]


@pytest.mark.parametrize(
    ("asked", "window", "softcap", "sinks"),
    [({}, None, None, False), ({}, 270, 2.0, False), ({"shared": 3, "head": 24}, None, None, True)],
)
def test_one_plan_attends_to_the_current_keys_of_each_step(device, unsynchronised, asked, window, softcap, sinks):
    from infd.kernels.triton.attention import PagedAttention

    first, *later = (
        Case([(start, 1) for start in starts], page_tokens=16, window=window, softcap=softcap, sinks=sinks, **asked)
        for starts in STEPS
    )
    width = max(case.batch.table.shape[1] for case in (first, *later))
    expected = {case: case.expected() for case in (first, *later)}
    table, start, slots = (torch.zeros(4, width).int(), first.batch.start.clone(), first.batch.slots.clone())
    table, start, slots = (each.to(device) for each in (table, start, slots))
    bounds = [width * 16 - 1] * 4
    plan = PagedAttention(8).captured(replace(first.batch, starts=bounds, table=table, start=start, slots=slots))
    for case, result in expected.items():
        case.move(device)
        table.zero_()[:, : case.batch.table.shape[1]] = case.batch.table
        start.copy_(case.batch.start)
        slots.copy_(case.batch.slots)
        new = [torch.stack([kv[at][-1] for kv in case.kv]) for at in range(2)]
        offered = None if case.sinks is None else case.sinks.to(device)
        with unsynchronised():
            plan.refill(bounds)
            plan.begin()
            plan.write(*new, case.pages)
            out = plan.run(case.q, case.pages, scale=case.scale, softcap=softcap, sinks=offered)
        torch.testing.assert_close(out.cpu().double(), result, atol=2e-6, rtol=2e-6)
