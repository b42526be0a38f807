"""Products with packed matrices in Triton equal those with the decoded matrix."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.reference.packed import PackedRows
from tests.kernels.packed_case import KINDS, rows_of


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_product_equals_that_with_the_decoded_matrix(device, kind, rows):
    from infd.kernels.triton.packed import PackedMatrix

    outputs, inputs = 70, 300 if kind.inputs > 300 else 320
    form = PackedMatrix(outputs, inputs, kind, torch.bfloat16)
    storage = torch.zeros(form.shape, dtype=form.dtype, device=device)
    given = rows_of(kind, outputs, inputs)
    for first in (0, 64):
        part = slice(first, min(first + 64, outputs))
        cut = {
            name: content[part] for name, content in given._asdict().items() if content is not None and name != "order"
        }
        form.place_groups(storage, first, given._replace(**cut))
    x = torch.randn(rows, 2 * inputs, generator=torch.Generator().manual_seed(rows)).to(device)
    bias = torch.randn(outputs).bfloat16().to(device)
    for dtype, near in ((torch.bfloat16, 2**-7), (torch.float32, 1e-5)):
        some = x[:, :inputs].to(dtype)
        found = form.multiply(some, storage, bias.to(dtype))
        want = PackedRows.multiply(form, some, storage, bias.to(dtype))
        assert found.dtype == dtype
        assert (found - want).norm() <= near * want.norm()
    assert form.multiply(some, storage).shape == (rows, outputs)
