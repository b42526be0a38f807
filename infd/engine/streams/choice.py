"""The state of one choice between the queue and its terminal event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from infd.engine.streams.stream import Stream
    from infd.scheduler.sequence import Sequence


class ChoiceState(Struct, eq=False):
    """One choice: its sequence, its stream, and when it reached each stage (monotonic seconds)."""

    seq: Sequence
    stream: Stream
    admitted: float
    submitted: float
    prompt_tokens: int  # 0 for later choices of the same prompt
    started: float | None = None  # when the choice was first planned
    first: float | None = None  # when the first token was delivered
    last: float = 0.0  # when the latest token was delivered
