"""LoRA on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from infd.kernels.families.adapters import ALIGNED, LowRank, LowRankPart
from infd.kernels.reference.lora import Lora as Reference
from infd.runner.staging import staging
from tests.kernels.lora_case import RANKS, ROWS, adapter
from tests.kernels.values import draw

TOKENS, INPUTS, OUTPUTS = 45, 72, 150


@pytest.fixture
def lora(device):
    from infd.kernels.triton.lora import Lora

    return Lora()


def aligned(matrix, device):
    """Return a matrix on the device, with rows padded to multiples of ALIGNED numbers."""
    columns = matrix.shape[1]
    return functional.pad(matrix, (0, -columns % ALIGNED)).to(device)[:, :columns]


def moved(groups, device):
    return [(rows.to(device), there(low, device)) for rows, low in groups]


def there(low, device):
    parts = [LowRankPart(aligned(part.b, device), *part[1:]) for part in low.parts]
    return LowRank(aligned(low.a, device), parts)


# (dtype of inputs and adapters, dtype of the product's result); logits are float32.
TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize(("dtype", "result"), TYPES)
def test_each_row_gets_the_product_of_its_own_adapter(lora, device, unsynchronised, dtype, result):
    groups = [(rows, adapter(ranks, INPUTS, dtype=dtype)) for rows, ranks in zip(ROWS, RANKS, strict=True)]
    x, y = draw(TOKENS, INPUTS, seed=1, dtype=dtype), draw(TOKENS, OUTPUTS, seed=2, dtype=result)
    expected = y.clone()
    Reference().add(expected, x, groups)
    x, given, groups = x.to(device), y.to(device), moved(groups, device)
    with unsynchronised():
        lora.add(given, x, groups)
    tolerance = 1e-4 if dtype is torch.float32 else 0.03  # products have magnitudes of 10 to 100
    torch.testing.assert_close(given.cpu(), expected, rtol=tolerance, atol=10 * tolerance)
    others = [row for row in range(TOKENS) if not any(row in rows for rows in ROWS)]
    assert others
    assert given.cpu()[others].equal(y[others])


@pytest.mark.parametrize(("dtype", "result"), TYPES)
def test_rows_of_a_table_are_changed_by_token(lora, device, unsynchronised, dtype, result):
    groups = [
        (rows, adapter(ranks, INPUTS, table=True, dtype=dtype)) for rows, ranks in zip(ROWS[:2], RANKS[:2], strict=True)
    ]
    tokens, y = (torch.arange(TOKENS) * 7) % INPUTS, draw(TOKENS, OUTPUTS, seed=2, dtype=result)
    expected = y.clone()
    Reference().add_rows(expected, tokens, groups)
    tokens, given, groups = tokens.to(device), y.to(device), moved(groups, device)
    with unsynchronised():
        lora.add_rows(given, tokens, groups)
    tolerance = 1e-4 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(given.cpu(), expected, rtol=tolerance, atol=10 * tolerance)


def test_outputs_may_be_a_part_of_a_wider_product(lora, device):
    groups = [(ROWS[0], adapter([3, 0, 0], INPUTS))]
    wide, x = torch.zeros(TOKENS, 2 * OUTPUTS), draw(TOKENS, INPUTS, seed=1, dtype=torch.float32)
    expected = wide.clone()
    Reference().add(expected[:, OUTPUTS:], x, groups)
    given = wide.to(device)
    lora.add(given[:, OUTPUTS:], x.to(device), moved(groups, device))
    torch.testing.assert_close(given.cpu(), expected, rtol=1e-4, atol=1e-3)


def test_addresses_are_sent_once_while_they_stay_the_same(lora, device):
    groups = moved([(ROWS[0], adapter([3, 0, 0], INPUTS))], device)
    more = [*groups, *moved([(ROWS[1], adapter([2, 2, 0], INPUTS))], device)]
    assert lora._step(groups) is lora._step(groups)
    assert lora._product(groups) is lora._product(groups)
    first = lora._product(groups)
    assert lora._product(more).table.shape == (2, 15)
    assert lora._product(groups) is first


def test_products_of_different_adapters_do_not_evict_each_others_tables(lora, device):
    x, y = torch.ones(TOKENS, INPUTS, device=device), torch.zeros(TOKENS, OUTPUTS, device=device)
    some = moved([(rows, adapter([3, 0, 0], INPUTS)) for rows in ROWS[:2]], device)
    sent = []

    def upload(array):
        sent.append(array)
        return torch.from_numpy(array).to(device)

    for _ in range(3):
        lora.add(y, x, some, upload)
        lora.add(y, x, some[:1], upload)
    assert len(sent) == 4


def test_the_number_of_kept_tables_is_bounded(lora, device, monkeypatch):
    from infd.kernels.triton import lora as module

    monkeypatch.setattr(module, "CACHED_TABLES", 2)
    groups = [moved([(ROWS[0], adapter([rank, 0, 0], INPUTS))], device) for rank in (1, 2, 3)]
    first = lora._product(groups[0])
    lora._product(groups[1])
    assert lora._product(groups[0]) is first
    lora._product(groups[2])
    assert len(lora._weights) == 2
    assert lora._product(groups[0]) is first


@pytest.mark.parametrize(("dtype", "result"), TYPES)
def test_in_captured_steps_each_row_gets_the_product_of_its_slots_adapter(lora, device, unsynchronised, dtype, result):
    held = [adapter(RANKS[0], INPUTS, dtype=dtype), None, adapter(RANKS[1], INPUTS, dtype=dtype)]
    captured = lora.captured(TOKENS + 3, device)
    carried = staging(device)
    held_there = [low and there(low, device) for low in held]
    weights = captured.slot_weights(held_there, [50, 50, 50], table=False, upload=carried.up)
    tolerance = 1e-4 if dtype is torch.float32 else 0.03
    for wanted in ([1, 3, 0] * 15, [3] * TOKENS, [0] * TOKENS):
        x, y = draw(TOKENS + 3, INPUTS, seed=1, dtype=dtype), draw(TOKENS + 3, OUTPUTS, seed=2, dtype=result)
        expected = y.clone()
        groups = [((torch.tensor(wanted) == slot).nonzero()[:, 0], low) for slot, low in enumerate(held, 1) if low]
        Reference().add(expected, x, groups)
        given = y.to(device)
        x = x.to(device)
        with unsynchronised():
            captured.refill([*wanted, 0, 0, 0], carried.fill)
            captured.add(given, x, weights)
        torch.testing.assert_close(given.cpu(), expected, rtol=tolerance, atol=10 * tolerance)
        others = [row for row in range(TOKENS + 3) if row >= TOKENS or not wanted[row]]
        assert given.cpu()[others].equal(y[others])


def test_a_table_of_slots_holds_others_in_its_place_until_ranks_outgrow_it(lora, device):
    """The tables reserve ranks in blocks of 16: rank 12 fits, rank 96 does not."""
    carried, captured, wanted = staging(device), lora.captured(4, device), [1, 2, 3, 0]
    x, y = draw(4, INPUTS, seed=1, dtype=torch.float32).to(device), torch.zeros(4, OUTPUTS, device=device)
    low = [adapter(ranks, INPUTS) for ranks in RANKS]
    weights = captured.slot_weights([None, there(low[0], device), None], [50] * 3, table=False, upload=carried.up)
    place = weights.weights.table.data_ptr()
    captured.refill(wanted, carried.fill)
    for held in ([low[2], low[0], None], [None, None, low[2]], [None, None, None]):
        held_there = [each and there(each, device) for each in held]
        assert weights.replace(held_there, carried.fill)
        assert weights.weights.table.data_ptr() == place
        given, expected = y.clone(), y.cpu()
        Reference().add(expected, x.cpu(), [(torch.tensor([slot]), each) for slot, each in enumerate(held) if each])
        captured.add(given, x, weights)
        torch.testing.assert_close(given.cpu(), expected, rtol=1e-4, atol=1e-3)
    before = weights.weights.table.clone()
    assert not weights.replace([there(low[1], device), None, None], carried.fill)
    assert weights.weights.table.equal(before)


def test_tables_are_sent_through_the_given_upload(lora, device):
    sent = []

    def upload(array):
        sent.append(array)
        return torch.from_numpy(array).to(device)

    x, y = torch.ones(TOKENS, INPUTS, device=device), torch.zeros(TOKENS, OUTPUTS, device=device)
    groups = [moved([(rows, adapter([3, 0, 0], INPUTS))], device) for rows in ROWS[:2]]
    for each in groups:
        lora.add(y, x, each, upload)
    assert len(sent) == 4
