"""The engine's event log and metrics, and the clock that measures durations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.telemetry.events import Events
    from infd.telemetry.metrics import Metrics


class Telemetry(Struct, frozen=True):
    """The event log, metrics and clock that the engine's components share.

    now  returns monotonic seconds
    """

    events: Events
    metrics: Metrics
    now: Callable[[], float]
