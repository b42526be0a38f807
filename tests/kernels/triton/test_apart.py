"""The host code around Triton's kernels never waits: whole steps run on a device where waiting raises."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

from infd.kernels.reference.lora import Lora
from infd.kernels.select import CANDIDATES, insisting, select
from infd.runner.staging import Pinned
from tests.runner.apart import APART, Away, Device
from tests.runner.test_staging import assembled, results

TRITON = {"attention", "norm", "rope", "activation", "rows", "draw"}


@pytest.fixture
def apart(device, monkeypatch):
    """A device whose kernels run in the interpreter."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def there(executor, *args, **named):
        args, named = tree_map(lambda x: x.held if isinstance(x, Away) else x, (args, named))
        return launch(executor, *args, **named)

    monkeypatch.setattr(GridExecutor, "__call__", there)
    with Device() as apart, torch.inference_mode():
        yield apart


def test_steps_by_tritons_kernels_are_issued_without_waiting(tiny, apart):
    from infd.kernels.triton.attention import PagedAttention

    ops = select(APART, torch.float32, insisting("triton", CANDIDATES))
    ops.request(*CANDIDATES)
    assert {row.family for row in ops.selection if row.chosen == "triton"} >= TRITON
    ops = ops.replace(attention=PagedAttention(programs=4), lora=Lora())  # Triton's LoRA needs addresses
    runner = assembled(tiny("llama"), APART, Pinned(APART, apart.pin, apart.event), None, ops)
    assert len(results(runner, apart.unsynchronised)) == 9
