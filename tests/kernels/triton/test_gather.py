"""Gathered page ids on a GPU, against plain torch operations."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.flashinfer.documented import gather as plain


@pytest.mark.parametrize("width", [7, 1500])
def test_pages_that_are_seen_are_put_side_by_side(device, unsynchronised, width):
    from infd.kernels.triton.gather import gather

    table = torch.randperm(4 * width, dtype=torch.int32).view(4, width).to(device)
    first = torch.tensor([0, 3, 3, 2 + width, 4 + width], dtype=torch.int32).to(device)
    skipped = torch.tensor([4, 0, 1, width - 2], dtype=torch.int32).to(device)
    given, expected = (torch.full((2 * width,), -1, dtype=torch.int32, device=device) for _ in range(2))
    with unsynchronised():
        gather(table, first, skipped, given)
    plain(table, first, skipped, expected)
    assert given.equal(expected)
    assert given[:3].equal(table[0, 4:7])
    assert given[4 + width :].eq(-1).all()
