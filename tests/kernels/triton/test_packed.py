"""Products with packed matrices in Triton equal those with the decoded matrix."""

from __future__ import annotations

import pytest
import torch

from infd.groups import Groups
from infd.kernels.reference.packed import PackedRows
from tests.kernels.packed_case import KINDS, rows_of

ODD = (  # groups that are no part of a tile's inputs, and of which a tile's inputs are no part
    Groups(4, 48, "F16", zeros=True),
    Groups(8, 192, "F32", table="e4m3"),
    Groups(4, 192, "BF16"),
    Groups(4, 10_000, "F16", zeros=True),
)
WIDE = (Groups(4, 128, "F16", zeros=True), Groups(4, 32, "I8", minima=True), Groups(8, 10_000, "F32"))


@pytest.mark.parametrize("rows", [1, 40, 150])
@pytest.mark.parametrize("kind", KINDS + ODD, ids=str)
def test_a_product_equals_that_with_the_decoded_matrix(device, kind, rows):
    check(device, kind, rows, 70, 300 if kind.inputs > 300 else 320 if 320 % kind.inputs == 0 else 384)


@pytest.mark.parametrize("rows", [1, 16, 17, 128])
@pytest.mark.parametrize("kind", WIDE, ids=str)
def test_several_programs_share_the_inputs_of_an_output(device, kind, rows):
    from infd.kernels.triton.packed import split

    assert split(3, 2000 // 128, device)[0] > 1
    check(device, kind, rows, 70, 2000 if kind.inputs > 2000 else 2048)


def test_programs_share_all_inputs_and_are_as_many_as_fill_the_gpu(device, monkeypatch):
    from infd.kernels.triton import packed

    monkeypatch.setattr(packed, "multiprocessors", lambda _: 132)
    for tiles, steps in ((1, 1), (3, 15), (128, 32), (128, 112), (528, 32), (777, 32), (32, 1000)):
        count, each = packed.split(tiles, steps, device)
        assert (count - 1) * each < steps <= count * each
        assert count == 1 or tiles * count <= 132 * 4
        assert count == 1 or each >= 4
    assert packed.split(128, 32, device) == (4, 8)  # 4096 outputs, 4096 inputs


@pytest.mark.parametrize("biased", [False, True])
def test_a_matrix_of_several_slabs_is_decoded_one_after_the_other(device, monkeypatch, biased):
    from infd.kernels.triton import packed

    monkeypatch.setattr(packed, "SLAB", 64 * 320 * 2)
    for kind in (KINDS[2], Groups(4, 16, "I8"), Groups(8, 32, "F16", minima=True)):
        check(device, kind, 150, 200, 320, biased=biased)


def check(device, kind, rows, outputs, inputs, *, biased=True):
    """Compare products with a random matrix with those of the decoded one."""
    from infd.kernels.triton.packed import PackedMatrix

    form = PackedMatrix(outputs, inputs, kind, torch.bfloat16)
    storage = torch.zeros(form.shape, dtype=form.dtype, device=device)
    given = rows_of(kind, outputs, inputs)
    for first in range(0, outputs, 64):
        part = slice(first, min(first + 64, outputs))
        cut = {
            name: content[part] for name, content in given._asdict().items() if content is not None and name != "order"
        }
        form.place_groups(storage, first, given._replace(**cut))
    x = torch.randn(rows, 2 * inputs, generator=torch.Generator().manual_seed(rows)).to(device)
    bias = torch.randn(outputs).bfloat16().to(device) if biased else None
    for dtype, near in ((torch.bfloat16, 2**-7), (torch.float32, 1e-5)):
        some = x[:, :inputs].to(dtype)
        offered = None if bias is None else bias.to(dtype)
        found = form.multiply(some, storage, offered)
        want = PackedRows.multiply(form, some, storage, offered)
        assert found.dtype == dtype
        assert (found - want).norm() <= near * want.norm()
    assert form.multiply(some, storage).shape == (rows, outputs)
