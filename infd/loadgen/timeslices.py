"""Rates over a run's time, in equal slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infd.loadgen.figures import Report


def output_rates(report: Report, slices: int) -> list[float]:
    """Return the output tokens per second in each slice of a run. A chunk of several tokens counts as that many."""
    counts = [0.0] * slices
    width_s = report.duration_s / slices
    for sample in report.samples:
        at_s = sample.due_s + sample.ttft_s
        share = sample.output_tokens / (1 + len(sample.gaps_s))
        for gap_s in (0.0, *sample.gaps_s):
            at_s += gap_s
            counts[min(int(at_s / width_s), slices - 1)] += share
    return [count / width_s for count in counts]
