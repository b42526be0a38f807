from __future__ import annotations

from infd.loadgen.datasets.spec import File
from infd.loadgen.settings import Settings
from infd.loadgen.sweep import sweep


def loads(limits: list[int | None], rates: list[float | None], **fields: File) -> list[tuple[int | None, float | None]]:
    return [(load.concurrency, load.request_rate) for load in sweep(Settings(url="u", **fields), limits, rates)]


def test_each_rate_is_measured_at_each_limit() -> None:
    assert loads([1, 2], []) == [(1, None), (2, None)]
    assert loads([], [3.0, 5.0]) == [(None, 3.0), (None, 5.0)]
    assert loads([1, None], [3.0, None]) == [(1, 3.0), (1, None), (None, 3.0), (None, None)]


def test_without_a_load_eight_requests_are_in_flight_and_a_trace_comes_as_it_is() -> None:
    assert loads([], []) == loads([], [None]) == [(8, None)]
    assert loads([], [], dataset=File(path="p", shape="mooncake")) == [(None, None)]
    assert loads([], [], dataset=File(path="p", shape="prompts")) == [(8, None)]


def test_no_two_loads_have_one_seed_and_further_runs_take_all_loads_in_turn() -> None:
    first, second = (sweep(Settings(url="u", seed=seed), [1, 2, 4], [], runs=2) for seed in (7, 8))
    assert len({load.seed for load in (*first, *second)}) == 12
    assert [load.concurrency for load in first] == [1, 2, 4, 1, 2, 4]
