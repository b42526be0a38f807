"""Measurements at start, on a runner with prescribed step times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from infd.runner.start import trial
from infd.runner.start.calibration import SPIN_STEPS, choose_spin, row_costs
from infd.runner.start.trial import TrialPlans, TrialRunner
from infd.scheduler.layout import CacheLayout, PageGroup

PLANS = TrialPlans(
    CacheLayout((PageGroup(layers=(0,), page_tokens=4, window=None),)), pages=8, rows=2, max_model_len=16
)


class Paced:
    """In a runner's place. slept, spun: the seconds of a step that is slept for, and of one that is asked for"""

    def __init__(self, slept: float, spun: float, *, overlaps: bool = True) -> None:
        self.now, self.spin_s, self.attended = 0.0, 0.0, False
        self.overlaps = overlaps
        self._slept, self._spun = slept, spun

    def prepare_to_wait(self):
        self.attended = True

    def spin(self, seconds):
        self.spin_s = seconds

    def forward(self, plan):
        return plan

    def sample(self, plan):
        return plan

    def read(self, plan):
        self.now += self._spun if self.spin_s else self._slept
        return SimpleNamespace(failed={})


@pytest.mark.parametrize(
    ("runner", "spin_s"),
    [
        (Paced(500e-6, 400e-6), SPIN_STEPS * 500e-6),
        (Paced(500e-6, 490e-6), 0.0),  # it gains too little
        (Paced(500e-6, 600e-6), 0.0),  # it uses the others' memory
        (Paced(20e-3, 10e-3), 0.0),  # the step is long
        (Paced(500e-6, 400e-6, overlaps=False), 0.0),  # nothing is waited for
    ],
)
def test_the_end_of_a_step_is_asked_for_where_that_ends_short_steps_sooner(monkeypatch, runner, spin_s):
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: runner.now))
    assert choose_spin(TrialRunner(runner, PLANS)) == pytest.approx(spin_s)
    assert runner.spin_s == pytest.approx(spin_s)
    assert runner.attended == runner.overlaps


def test_a_disturbed_measurement_makes_no_other_steps_dearer():
    durations = {1: 1.0, 2: 1.0, 3: 1.1, 4: 9.0, 5: 1.3, 6: 1.2, 8: 2.0}
    plans = SimpleNamespace(room=8, verifying=lambda rows: rows)
    measured = row_costs(SimpleNamespace(plans=plans, time_of=durations.__getitem__))  # type: ignore[arg-type]
    assert dict(measured) == durations | {4: 1.2, 5: 1.2}
