"""What a request spent its time on, in words."""

from __future__ import annotations

from functools import partial

from infd.telemetry.causes import cause

WORK = {"computed": 350, "generated": 41, "preemptions": 0}
STAGES = {"prepare_ms": 10.0, "queue_ms": 12_400.0, "prefill_ms": 90.0, "decode_ms": 14_920.0, "send_ms": 0.0}


def test_each_large_part_of_the_time_that_is_compared_is_named():
    of = partial(cause, STAGES, **WORK)
    waited = "waited 12.4 s: all sequences (scheduler.max_num_seqs) or cache pages were busy"

    assert of("total") == f"{waited}; then 41 tokens in 14.9 s, 373.0 ms each"
    assert of("ttft") == of("queue") == waited


def test_small_parts_are_not_named_and_preemptions_are():
    stages = STAGES | {"queue_ms": 200.0, "prefill_ms": 2_000.0, "decode_ms": 800.0}
    text = cause(stages, **WORK | {"preemptions": 2})

    assert text.startswith("2.0 s for 350 tokens of its prompt")
    assert "waited" not in text
    assert "ms each" not in text
    assert "; preempted 2 times" in text
