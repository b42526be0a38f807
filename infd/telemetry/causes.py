"""Name the stages in which a request spent most of its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

# The times by which requests are compared: of the whole answer, until the first token, until the first step.
Order = Literal["total", "ttft", "queue"]

LARGE: Final = 1 / 3  # a stage with more than this share of the time is named too
STAGES: Final[dict[Order, tuple[str, ...]]] = {
    "total": ("prepare_ms", "queue_ms", "prefill_ms", "decode_ms", "send_ms"),
    "ttft": ("prepare_ms", "queue_ms", "prefill_ms"),
    "queue": ("prepare_ms", "queue_ms"),
}


def cause(
    stages: Mapping[str, float], order: Order = "total", *, computed: int, generated: int, preemptions: int
) -> str:
    """Return the stage with the largest share of the time that `order` compares, and the others above LARGE.

    stages     milliseconds of each stage, as Ticket.stages gives them
    computed   prompt tokens that were not found in the cache
    generated  tokens delivered
    """
    of = {name: stages[name] for name in STAGES[order]}
    largest, least = max(of, key=of.__getitem__), LARGE * sum(of.values())
    took = {name: _time(stage_ms) for name, stage_ms in stages.items()}
    token_ms = stages["decode_ms"] / max(1, generated - 1)
    causes = {
        "prepare_ms": f"{took['prepare_ms']} to prepare its prompt, grammar or adapter, or the server was paused",
        "queue_ms": f"waited {took['queue_ms']}: all sequences (scheduler.max_num_seqs) or cache pages were busy",
        "prefill_ms": f"{took['prefill_ms']} for {computed} tokens of its prompt, beside the work of other requests",
        "decode_ms": f"{generated} tokens in {took['decode_ms']}, {token_ms:.1f} ms each",
        "send_ms": f"{took['send_ms']} until its client had read the answer",
    }
    text = "; then ".join(causes[name] for name, stage_ms in of.items() if name == largest or stage_ms > least)
    if preemptions:
        text += f"; preempted {preemptions} times, because pages ran out or a tenant was beyond its share"
    return text


def _time(took_ms: float) -> str:
    return f"{took_ms / 1e3:.1f} s" if took_ms >= 100 else f"{took_ms:.1f} ms"
