from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from infd.errors import NothingAllowed
from infd.request import SamplingParams
from infd.runner.pulse import Pulse, Stopped
from infd.scheduler.plan import Grant, StepPlan
from tests.runner.driving import config, join, load, span
from tests.runner.fake_model import FakeModel, continuation


def make(model: FakeModel | None = None, pulse: Pulse | None = None):
    return load(model or FakeModel(), config(), pulse or Pulse()).runner


def run(runner, plan, mask=None):
    with runner.active():
        return runner.read(runner.sample(runner.forward(plan), mask))


def test_a_step_yields_one_token_for_each_span_that_samples():
    runner = make()
    result = run(
        runner,
        StepPlan(
            0,
            [join(0, [3, 4, 5], [[1]]), join(1, list(range(9)), [[2, 3, 4]]), join(2, [8], [[5]])],
            [],
            [span(0, 0, 3), span(1, 0, 4, samples=0), span(2, 0, 1)],
        ),
    )
    assert result.accepted == [1, 0, 1]
    assert result.tokens == [*continuation([3, 4, 5], 1), *continuation([8], 1)]
    assert not result.failed


def test_a_step_that_samples_nothing_has_an_empty_result():
    runner = make()
    result = run(runner, StepPlan(0, [join(0, [3, 4, 5], [[1]])], [], [span(0, 0, 2, samples=0)]))
    assert (result.accepted, result.tokens, result.failed) == ([0], [], {})


def test_the_next_step_finds_the_sampled_token_without_the_host():
    runner = make()
    with runner.active():
        first = runner.sample(runner.forward(StepPlan(0, [join(0, [3, 4, 5], [[1]])], [], [span(0, 0, 3)])))
        second = runner.sample(runner.forward(StepPlan(1, [], [], [span(0, 3, 1)])))
        third = runner.sample(runner.forward(StepPlan(2, [], [Grant(0, 0, 1, 2)], [span(0, 4, 1)])))
    tokens = [runner.read(step).tokens[0] for step in (first, second, third)]
    assert tokens == continuation([3, 4, 5], 3)


def test_a_row_and_pages_given_away_in_the_next_plan_do_not_disturb_the_step_before():
    runner = make()
    with runner.active():
        first = runner.sample(runner.forward(StepPlan(0, [join(0, [3, 4, 5], [[1]])], [], [span(0, 0, 3)])))
        second = runner.sample(runner.forward(StepPlan(1, [join(0, [90, 91], [[1]])], [], [span(0, 0, 2)])))
    assert runner.read(first).tokens == continuation([3, 4, 5], 1)
    assert runner.read(second).tokens == continuation([90, 91], 1)


class Poisoned(FakeModel):
    """Its logits are not a number where the sum is that of the token 13 alone."""

    def logits(self, hidden: torch.Tensor, adapters: object = None) -> torch.Tensor:
        logits = super().logits(hidden)
        logits[hidden[:, 0] == 13 + 14] = torch.nan
        return logits


def test_logits_that_are_not_finite_fail_their_own_span():
    runner = make(Poisoned())
    plan = StepPlan(
        0,
        [join(0, [12], [[1]]), join(1, [13], [[2]]), join(2, [14], [[3]])],
        [],
        [span(0, 0, 1), span(1, 0, 1), span(2, 0, 1)],
    )
    result = run(runner, plan)
    assert result.accepted == [1, 0, 1]
    assert result.tokens == continuation([12], 1) + continuation([14], 1)
    assert result.failed[1].code == "RequestFailed"
    assert "finite" in result.failed[1].message


def test_a_request_that_allows_no_token_is_blamed_for_its_failure():
    result = run(make(), StepPlan(0, [join(0, [3, 4], [[1]])], [], [span(0, 0, 2)]), np.zeros((1, 4), dtype=np.int32))
    assert isinstance(result.failed[0].error(), NothingAllowed)


def test_a_mask_has_a_row_for_every_span_that_samples():
    runner = make()
    mask = np.zeros((3, 4), dtype=np.int32)
    for row, token in enumerate((40, 50, 60)):
        mask[row, token // 32] = 1 << token % 32
    plan = StepPlan(
        0,
        [join(0, [1], [[1]]), join(1, [9], [[2]]), join(2, [2, 3], [[3]]), join(3, [4], [[4]])],
        [],
        [span(0, 0, 1), span(1, 0, 1), span(2, 0, 1, samples=0), span(3, 0, 1)],
    )
    result = run(runner, plan, mask)
    assert result.tokens == [40, 50, 60]


def test_logprobs_belong_to_their_spans():
    runner = make()
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2)
    chosen_only = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    plan = StepPlan(
        0,
        [join(0, [1], [[1]]), join(1, [2], [[2]], asked), join(2, [3], [[3]], chosen_only)],
        [],
        [span(0, 0, 1), span(1, 0, 1), span(2, 0, 1)],
    )
    result = run(runner, plan)
    assert sorted(result.logprobs) == [1, 2]
    (both,), (one,) = result.logprobs[1], result.logprobs[2]
    assert both.top_ids[0] == result.tokens[1]
    assert both.top[0] == both.chosen > both.top[1]
    assert both.top_ids[1] == (result.tokens[1] + 1) % 101  # the fake model's second best
    assert one.top == one.top_ids == ()


def test_the_pulse_moves_with_every_layer_and_stops_the_step_between_two():
    pulse = Pulse()
    model = FakeModel()
    runner = make(model, pulse)
    before = pulse.count
    run(runner, StepPlan(0, [join(0, [1], [[1]])], [], [span(0, 0, 1)]))
    assert pulse.count >= before + 2

    pulse.stop()
    with pytest.raises(Stopped):
        run(runner, StepPlan(1, [], [], [span(0, 1, 1)]))


def test_a_model_with_a_window_group_reads_both_groups_tables():
    runner = make(FakeModel(window=3))
    prompt = [7, 1, 4, 4, 9]
    first = run(runner, StepPlan(0, [join(0, prompt, [[9, 4], [2, 7]])], [], [span(0, 0, 5)]))
    second = run(runner, StepPlan(1, [], [], [span(0, 5, 1)]))
    assert first.tokens + second.tokens == continuation(prompt, 2, window=3)


def test_a_runners_tensors_are_freed_with_it_without_a_collection():
    runner = make()
    run(runner, StepPlan(0, [join(0, [3, 4, 5], [[1]])], [], [span(0, 0, 3)]))
    rows = weakref.ref(runner.instance.rows)
    collecting = gc.isenabled()
    gc.disable()
    try:
        del runner
        assert rows() is None
    finally:
        if collecting:
            gc.enable()
