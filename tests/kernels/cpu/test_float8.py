"""Products with fp8 weights as checkpoints store them, against torch's conversion of fp8 and float64."""

from __future__ import annotations

import pytest
import torch

from infd.groups import GroupedRows, Groups
from infd.kernels.cpu.library import BEST_FIRST, REFINED, Library
from infd.kernels.cpu.linear import Panels
from infd.kernels.cpu.packed import Float8, Packed
from infd.kernels.families.matrices import Grouped
from tests.kernels.cpu.placed import draw
from tests.native import kernels

SHAPES = [(64, 256), (1, 1), (65, 33), (200, 129), (130, 2050)]
SIZES = [32, 64, 128, 384, 4096]
OTHER = "the form of fp8 has E4M3, and float32 scales of 32 inputs"


@pytest.fixture(scope="module", params=(*REFINED, *BEST_FIRST))
def library(request: pytest.FixtureRequest, built: None) -> Library:
    return kernels(request.param)


class Stored:
    """Random bytes, none of them NaN, in the form that keeps them; placed in two parts, the last first."""

    def __init__(self, library, outputs, inputs, size, codes=None):
        form = Float8(library).form(outputs, inputs, torch.bfloat16, Groups(8, size, "F32", table="e4m3"))
        assert isinstance(form, Panels)
        assert isinstance(form, Grouped)
        self.form, generator = form, torch.Generator().manual_seed(outputs + inputs)
        if codes is None:
            codes = torch.randint(0, 256, (outputs, inputs), generator=generator).to(torch.uint8)
            codes[codes & 127 == 127] = 3
        groups = -(-inputs // form.groups.inputs)
        scales = torch.rand(outputs, groups, generator=generator) / 100 - 0.002
        values = codes.view(torch.float8_e4m3fn).float()
        self.weight = values * scales.repeat_interleave(form.groups.inputs, 1)[:, :inputs]
        self.storage = torch.empty(form.shape, dtype=form.dtype)
        self.storage.view(torch.uint8).fill_(255)
        indices = (codes.to(torch.int16) - 128).to(torch.int8)
        cut = outputs // 3
        for part in (slice(cut, None), slice(0, cut)):
            form.place_groups(self.storage, part.start, GroupedRows(indices[part], scales[part]))

    def multiply(self, x, bias=None, *, wide=False):
        return self.form.multiply(x, self.storage, bias, wide=wide)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_that_of_the_stored_values(library, outputs, inputs, size):
    stored = Stored(library, outputs, inputs, size)
    weight = stored.weight.double()
    tokens = torch.arange(outputs).flip(0).repeat(2)
    assert stored.form.look_up(tokens, stored.storage).equal(stored.weight.bfloat16()[tokens])
    assert stored.form.look_up(torch.tensor([outputs, -1]), stored.storage).isnan().all()
    for rows in (1, 4, 5, 7, 13, 31, 48, 64, 241):
        x, bias = draw(rows, inputs, seed=rows), draw(outputs, seed=3)
        bound = (x.double().abs() @ weight.abs().T) * (inputs + 8) * 2.0**-24 + 1e-9
        wide = stored.multiply(x, wide=True)
        assert wide.dtype is torch.float32
        assert ((wide.double() - x.double() @ weight.T).abs() <= bound).all(), f"{rows} rows"
        assert stored.multiply(x).equal(wide.bfloat16()), f"{rows} rows"
        assert stored.multiply(x, bias).equal((wide + bias.float()).bfloat16()), f"{rows} rows"


def test_every_byte_is_multiplied_as_torch_reads_it(library):
    codes = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 8)
    stored = Stored(library, 256, 8, 32, codes)
    for place in range(8):
        x = torch.zeros(1, 8).bfloat16()
        x[0, place] = 1
        found = stored.multiply(x, wide=True)[0]
        assert found.isnan().nonzero().flatten().tolist() == [127, 255]
        numbers = [at for at in range(256) if at % 128 != 127]
        assert found[numbers].equal(stored.weight[numbers, place])


@pytest.mark.parametrize("size", SIZES)
def test_a_set_that_refines_another_has_its_bits(built, size):
    for refined, plain in REFINED.items():
        better, other = (Stored(kernels(isa), 200, 1999, size) for isa in (refined, plain))
        for rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 18, 250):
            x = draw(rows, 1999, seed=rows)
            assert better.multiply(x, wide=True).equal(other.multiply(x, wide=True)), f"{rows} rows"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_bit_identical_in_any_batch(library, size, threads):
    stored, x = Stored(library, 200, 4399, size), draw(260, 4399)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = stored.multiply(x)
        for rows in (1, 2, 3, 5, 6, 7, 13):
            assert stored.multiply(x[:rows]).equal(together[:rows])
            assert stored.multiply(x[-rows:]).equal(together[-rows:])
        for row in (16, 31, 47, 127, 128, 200):
            assert stored.multiply(x[row : row + 1]).equal(together[row : row + 1])
    finally:
        torch.set_num_threads(before)


def test_a_number_that_is_not_finite_affects_only_its_own_row(library):
    codes = torch.randint(0, 100, (70, 200), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    x = draw(9, 200)
    sound = Stored(library, 70, 200, 128, codes).multiply(x)
    x[4, 7] = float("nan")
    codes[2, 150] = 255
    spoilt = Stored(library, 70, 200, 128, codes)
    broken = spoilt.multiply(x)
    assert not broken[4].isfinite().any()
    assert not broken[:, 2].isfinite().any()
    rest, others = [0, 1, 2, 3, 5, 6, 7, 8], [0, 1, *range(3, 70)]
    assert broken[rest][:, others].equal(sound[rest][:, others])


def test_memory_that_was_never_filled_is_a_matrix_of_zeros(library):
    form = Float8(library).form(70, 66, torch.bfloat16, Groups(8, 66, "F32", table="e4m3"))
    assert isinstance(form, Panels)
    assert not form.multiply(draw(9, 66), torch.zeros(form.shape, dtype=form.dtype)).any()


@pytest.mark.parametrize(
    ("groups", "dtype", "reason"),
    [
        (Groups(8, 128, "F32", table="e4m3"), torch.float32, "the form of fp8 computes in bfloat16"),
        (Groups(8, 16, "F32", table="e4m3"), torch.bfloat16, OTHER),
        (Groups(8, 128, "F32", table="e5m2"), torch.bfloat16, OTHER),
    ],
)
def test_the_reason_that_fp8_cannot_be_kept_is_reported(library, groups, dtype, reason):
    assert Packed(library).form(64, 256, dtype, groups) == reason
