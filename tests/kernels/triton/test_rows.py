"""The persistent batch on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.families.rows import BatchState, DecodeInputs
from infd.kernels.reference.rows import RowKernels as Reference

ROWS, LONGEST, VOCAB = 9, 12000, 500
PAGE_TOKENS = [4, 16]  # with 4, a table has more pages than one program copies


@pytest.fixture
def rows(device):
    from infd.kernels.triton.rows import RowKernels

    return RowKernels()


def kept(groups: int) -> BatchState:
    chance = torch.Generator().manual_seed(1)
    return BatchState(
        torch.randint(VOCAB, (ROWS, LONGEST), generator=chance).to(torch.int32),
        torch.tensor([1, 2, 16, 17, 5000, LONGEST, 300, 4, 1]),
        torch.randint(1, 9999, (ROWS, groups, LONGEST // 4), generator=chance).to(torch.int32),
    )


def inputs_of(rows: list[int], bounds: list[int], groups: int, device: torch.device) -> DecodeInputs:
    count = len(rows)
    sent = torch.tensor([*rows, *bounds], device=device)

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DecodeInputs(
        row=sent[:count],
        bound=sent[count:],
        position=zeros(count),
        start=zeros(count, dtype=torch.int32),
        token=zeros(count),
        page_tokens=PAGE_TOKENS[:groups],
        tables=[zeros(count, LONGEST // 4, dtype=torch.int32) for _ in range(groups)],
        slots=[zeros(count) for _ in range(groups)],
    )


@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows_", "bounds"),
    [
        ([5], [LONGEST - 1]),
        ([4, 0, 7], [4999, 0, 3]),
        ([5, 6, 3, 2, 8, 8], [9000, 300, 20, 15, 0, 0]),  # bounds above, and below, the exact positions
    ],
)
def test_a_steps_inputs_are_gathered(rows, device, unsynchronised, groups, rows_, bounds):
    cpu = torch.device("cpu")
    expected, found = inputs_of(rows_, bounds, groups, cpu), inputs_of(rows_, bounds, groups, device)
    known = kept(groups)
    Reference().gather_inputs(known, expected)
    there = BatchState(*(each.to(device) for each in known))
    with unsynchronised():
        rows.gather_inputs(there, found)
    assert found.position.cpu().equal(expected.position)
    assert found.start.cpu().equal(expected.position.to(torch.int32))
    assert found.token.cpu().equal(expected.token)
    for group, size in enumerate(PAGE_TOKENS[:groups]):
        assert found.slots[group].cpu().equal(expected.slots[group])
        for at, last in enumerate((expected.position // size).tolist()):
            assert found.tables[group][at, : last + 1].cpu().equal(expected.tables[group][at, : last + 1])
            assert not found.tables[group][at, last + 1 :].any()


@pytest.mark.parametrize("count", [1, 3, 200])
def test_sampled_tokens_are_appended(rows, device, unsynchronised, count):
    chance = torch.Generator().manual_seed(2)
    known = BatchState(
        torch.zeros(count + 2, 40).int(), torch.ones(count + 2).long(), torch.zeros(count + 2, 1, 1).int()
    )
    row = torch.randperm(count + 2, generator=chance)[:count]
    end = torch.randint(40, (count,), generator=chance)
    token = torch.randint(VOCAB, (count,), generator=chance)
    found = BatchState(*(each.to(device, copy=True) for each in known))
    Reference().append(known, row, end, token)
    given = [each.to(device) for each in (row, end, token)]
    with unsynchronised():
        rows.append(found, *given)
    for ours, theirs in zip(found, known, strict=True):
        assert ours.cpu().equal(theirs)
