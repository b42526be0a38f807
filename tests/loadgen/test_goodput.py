from __future__ import annotations

import pytest

from infd.loadgen.goodput import goodput, parse
from infd.loadgen.samples import Sample


def sample(ttft_ms: float, gaps_ms: list[float]) -> Sample:
    return Sample(
        ttft_s=ttft_ms / 1000,
        e2e_s=(ttft_ms + sum(gaps_ms)) / 1000,
        gaps_s=[gap / 1000 for gap in gaps_ms],
        input_tokens=1,
        output_tokens=len(gaps_ms) + 1,
        counted=True,
    )


def test_a_request_is_good_if_it_meets_every_objective() -> None:
    samples = [
        sample(100, [10, 10]),  # good
        sample(300, [10, 10]),  # late
        sample(100, [70, 50]),  # slow: 60 ms a token
        sample(300, [90, 90]),  # both
        sample(200, [50, 50]),  # just good
        sample(50, []),  # one token has no time per token
    ]
    good = goodput({"ttft": 200, "tpot": 50}, samples, failed=2, duration_s=2.0)

    assert good is not None
    assert (good.met, good.missed) == (3, {"ttft": 2, "tpot": 2})
    assert (good.requests_s, good.share) == (1.5, 3 / 8)


def test_the_longest_gap_and_the_whole_time_are_objectives_too() -> None:
    good = goodput({"itl": 60, "e2el": 200}, [sample(100, [70, 10]), sample(100, [50, 50])], 0, 1.0)

    assert good is not None
    assert (good.met, good.missed) == (1, {"itl": 1, "e2el": 0})


def test_no_objectives_no_goodput() -> None:
    assert goodput({}, [sample(1, [])], 0, 1.0) is None


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "speed:3"])
def test_a_wrong_objective_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text.split(":", maxsplit=1)[0]):
        parse(text)


def test_objectives_are_milliseconds() -> None:
    assert (parse("ttft:200"), parse("e2e:1.5")) == (("ttft", 200.0), ("e2el", 1.5))
