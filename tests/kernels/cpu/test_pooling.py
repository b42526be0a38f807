"""Means of hidden states and rows of length 1 in native code, against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from infd.kernels.cpu.pooling import Pooling
from infd.kernels.reference.pooling import Pooling as Reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 48, 100])
def test_each_span_is_summed_alone(library, width, dtype):
    native, counts, divisors = Pooling(library), [3, 1, 0, 40], [3.0, 1.0, 7.0, 820.0]
    states = torch.randn(46, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    states[44:] = torch.nan  # rows after the last span

    found = native.sums(states, counts, divisors, torch.from_numpy)
    assert found.dtype is torch.float32
    assert found.equal(Reference().sums(states, counts, divisors, torch.from_numpy))
    assert found[3:].equal(native.sums(states[4:44], [40], [820.0], torch.from_numpy))
    assert native.sums(states.T.contiguous().T, counts, divisors, torch.from_numpy).equal(found)
    for kernels in (native, Reference()):
        pair = kernels.sums(states, [2, 0], [1.0, 1.0], torch.from_numpy)
        assert pair.equal(torch.stack([states[:2].float().sum(0), torch.zeros(width)]))
        # one row of each span
        rows = kernels.sums(states, [1] * 5, [1.0] * 5, torch.from_numpy)
        assert rows.equal(states[:5].float())
        assert rows.data_ptr() != states.data_ptr()  # readouts write to them
        assert kernels.sums(states, [1] * 5, [2.0] * 5, torch.from_numpy).equal(states[:5].float() / 2)


@pytest.mark.parametrize("width", [1, 16, 48, 100])
def test_rows_get_length_1_and_those_that_are_not_finite_are_reported(library, width):
    wide = torch.randn(8, width + 20, generator=torch.Generator().manual_seed(1))
    wide[1] = 0
    wide[2] *= 1e-20  # shorter than LEAST_LENGTH
    wide[3, width - 1] = torch.nan
    wide[4, 0] = torch.inf
    wide[5, width - 1] = -torch.inf
    wide[6] = 1e30  # its squares are infinite
    wide[7, width:] = torch.nan  # beyond the row
    rows = wide[:, :width]

    found, finite = Pooling(library).normalized(rows)
    expected, finite_too = Reference().normalized(rows)
    assert [bool(each) for each in finite] == finite_too == [True, True, True, False, False, False, True, True]
    np.testing.assert_allclose(found, expected, rtol=1.3e-6, atol=1e-5)
    assert math.isclose(np.square(found[0]).sum(), 1, rel_tol=1e-6)
    assert not found[6].any()
