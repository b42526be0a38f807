from __future__ import annotations

import numpy as np
import pytest

from infd.loadgen.arrivals import arrivals, replayed


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_are_gamma_distributed(burstiness: float) -> None:
    intervals = np.diff(arrivals(50.0, burstiness, 20_000, seed=3))

    assert intervals.mean() == pytest.approx(1 / 50, rel=0.05)
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_first_request_is_due_at_once_and_equal_seeds_give_equal_times() -> None:
    first = arrivals(1.0, 1.0, 5, seed=1)

    assert first[0] == 0.0
    assert first == arrivals(1.0, 1.0, 5, seed=1) != arrivals(1.0, 1.0, 5, seed=2)


def test_a_trace_starts_at_its_first_request_and_is_scaled() -> None:
    assert replayed([30.0, 31.0, 34.0], 0.5) == [0.0, 0.5, 2.0]
