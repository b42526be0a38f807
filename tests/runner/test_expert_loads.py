"""One of PERIOD steps counts how many of its tokens choose each expert."""

from __future__ import annotations

import pytest
import torch

from infd.models.base import Batch
from infd.request import ExpertSizes
from infd.runner.expert_loads import PERIOD, LoadSampler
from infd.runner.staging import staging
from infd.scheduler.plan import StepResult

SIZES = ExpertSizes(layers=2, experts=4, chosen=2)
CPU = torch.device("cpu")


def batch(tokens: int, device: torch.device = CPU) -> Batch:
    numbers = torch.zeros(tokens, dtype=torch.int64, device=device)
    return Batch(tokens=numbers, positions=numbers, attention=[], cache=[])


def test_the_choices_of_each_layer_are_counted_but_not_those_of_padding_or_unwritten_ones():
    step = batch(4)
    (loads,) = LoadSampler(SIZES).tap(step, 3)
    assert step.routes is not None
    step.routes[:, 0] = torch.tensor([[0, 3], [3, 1], [0, 3], [2, 2]])  # the last token is padding
    step.routes[:1, 1] = torch.tensor([1, 2])  # the last layer computes one token alone
    loads.sample(None)
    loads.download(staging(CPU))
    result = StepResult([], [])
    loads.read(result)

    assert list(memoryview(result.expert_loads).cast("i")) == [2, 1, 0, 3, 0, 1, 1, 0]


@pytest.mark.parametrize(("sizes", "counted"), [(SIZES, 2), (None, 0)])
def test_other_steps_and_models_without_experts_write_and_count_nothing(sizes: ExpertSizes | None, counted: int):
    sampler, steps = LoadSampler(sizes), [batch(1) for _ in range(2 * PERIOD)]
    readings = [sampler.tap(step, 1) for step in steps]

    assert sum(map(len, readings)) == counted
    assert [step.routes is not None for step in steps] == [bool(each) for each in readings]


def test_counting_does_not_wait_for_the_device():
    """Nothing can be read from a tensor without storage."""
    (loads,) = LoadSampler(SIZES).tap(batch(3, torch.device("meta")), 3)
    loads.sample(None)
