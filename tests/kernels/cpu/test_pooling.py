"""Sums of hidden states in native code, against the reference; bitwise, whatever other spans the step has."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.pooling import Pooling
from infd.kernels.reference.pooling import Pooling as Reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 48, 100])
def test_each_span_is_summed_alone(library, width, dtype):
    native, counts = Pooling(library), [3, 1, 0, 40]
    states = torch.randn(46, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    states[44:] = torch.nan  # rows after the last span

    found = native.sums(states, counts, torch.from_numpy)
    assert found.dtype is torch.float32
    assert found.equal(Reference().sums(states, counts, torch.from_numpy))
    assert found[3:].equal(native.sums(states[4:44], [40], torch.from_numpy))
    assert native.sums(states.T.contiguous().T, counts, torch.from_numpy).equal(found)
