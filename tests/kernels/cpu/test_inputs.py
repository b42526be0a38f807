"""Inputs rounded in C++ equal the reference's to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from infd.input_scheme import InputScheme
from infd.kernels.cpu.inputs import Inputs
from infd.kernels.reference.inputs import Inputs as Reference

if TYPE_CHECKING:
    from infd.kernels.cpu.library import Library

SCHEMES = [
    InputScheme("e4m3"),
    InputScheme("e4m3", static=True),
    InputScheme("e4m3", 128),
    InputScheme("e4m3", 32, powers=True),
    InputScheme("int8"),
    InputScheme("int8", static=True),
    InputScheme("int8", static=True, zeros=True),
    InputScheme("e2m1", 16, static=True),
    InputScheme("e2m1", 32, powers=True),
    InputScheme("e2m1", 32),
    InputScheme("int8", zeros=True),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 70])
def test_rounded_inputs_equal_the_references_to_the_bit(
    library: Library, scheme: InputScheme, dtype: torch.dtype, rows: int
) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 300, generator=draw) * torch.logspace(-3, 2, rows)[:, None]).to(dtype)
    x[0, :40], x[-1, 50:60], x[-1, 64:96] = 0, torch.tensor(448 * 2.0**-4), torch.tensor([1.75, 0.7] * 16)
    scale = torch.tensor([0.03]) if scheme.static else None
    zero = torch.tensor([-12.0]) if scheme.static and scheme.zeros else None
    wide = torch.cat((x, x), 1)[:, 100:400]  # rows with a stride

    for given in (x, wide):
        found = Inputs(library).round(given, scheme, scale, zero)
        want = Reference().round(given, scheme, scale, zero)
        assert found.equal(want)
        assert not found.equal(given)


@pytest.mark.parametrize("scheme", SCHEMES[:5], ids=str)
def test_each_number_of_a_byte_and_the_halves_between_round_to_even(library: Library, scheme: InputScheme) -> None:
    bytes_ = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (bytes_[1:] + bytes_[:-1]) / 2
    x = torch.cat((bytes_, between, -bytes_, -between, torch.tensor([448.0, 449.0])))[None]
    scale = torch.ones(1) if scheme.static else None
    assert Inputs(library).round(x, scheme, scale, None).equal(Reference().round(x, scheme, scale, None))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", SCHEMES[:-1], ids=str)
def test_a_row_that_is_not_finite_spoils_no_other(library: Library, scheme: InputScheme, bad: float) -> None:
    x = torch.randn(3, 300).bfloat16()
    scale = torch.tensor([0.03]) if scheme.static else None
    zero = torch.tensor([-12.0]) if scheme.static and scheme.zeros else None
    want = Inputs(library).round(x, scheme, scale, zero)
    x[1, 7] = bad
    found = Inputs(library).round(x, scheme, scale, zero)
    assert found[::2].equal(want[::2])
    assert scheme.static or not found[1].isfinite().all()
