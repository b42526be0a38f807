"""The loads of experts: sums of sampled steps, of which the latest count most."""

from __future__ import annotations

from array import array

from infd.telemetry.expert_loads import RECENT_CHOICES, ExpertLoads
from infd.telemetry.exposition import expose
from infd.telemetry.metrics import Metrics


def loads(*counts: int) -> bytes:
    return array("i", counts).tobytes()


def test_the_loads_of_each_layer_are_summed():
    experts = ExpertLoads(4)
    assert experts.layers() == []
    experts.add(loads(1, 2, 0, 1, 0, 0, 4, 0))
    experts.add(loads(1, 4, 0, 1, 2, 0, 2, 0))

    first, second = experts.layers()
    assert (first.counts, first.choices, first.unused, first.ratio) == ((2, 6, 0, 2), 10, 1, 2.4)
    assert (second.counts, second.choices, second.unused, second.ratio) == ((2, 0, 6, 0), 8, 2, 3.0)
    assert experts.steps == 2


def test_old_steps_count_for_less():
    experts = ExpertLoads(2)
    for _ in range(3):
        experts.add(loads(RECENT_CHOICES // 2, 0))
    for _ in range(9):
        experts.add(loads(0, RECENT_CHOICES // 2))

    (layer,) = experts.layers()
    assert layer.choices <= RECENT_CHOICES
    assert layer.counts[1] > 20 * layer.counts[0]


def test_a_scrape_has_one_series_a_layer():
    metrics = Metrics("m")
    assert b"infd_expert_load_ratio{" not in expose(metrics)
    metrics.expert_loads = ExpertLoads(2)
    metrics.expert_loads.add(loads(3, 1, 0, 5))
    scrape = expose(metrics.snapshot())

    assert b'infd_expert_load_ratio{layer="0",model_name="m"} 1.5\n' in scrape
    assert b'infd_expert_load_unused{layer="1",model_name="m"} 1.0\n' in scrape
    assert b'infd_expert_load_steps_total{model_name="m"} 1.0\n' in scrape
