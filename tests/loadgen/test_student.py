from __future__ import annotations

import math

import pytest

from infd.loadgen.student import quantile, within


@pytest.mark.parametrize(
    ("freedom", "middle", "table"),  # Fisher and Yates, statistical tables: two-sided t
    [(1, 0.95, 12.706), (2, 0.99, 9.925), (4, 0.99, 4.604), (8, 0.95, 2.306), (8, 0.99, 3.355), (30, 0.999, 3.646)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, middle: float, table: float) -> None:
    assert quantile(middle, freedom) == pytest.approx(table, abs=6e-4)


def test_the_share_within_infinity_is_1_and_within_zero_0() -> None:
    assert [within(math.inf, 5), within(0.0, 5), within(0.0, 6)] == [1.0, 0.0, 0.0]
