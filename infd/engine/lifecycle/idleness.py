"""The time since the engine's last request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.engine.admission.admission import Admission
    from infd.engine.core import EngineCore
    from infd.engine.lifecycle.state import Lifecycle, State


class Idleness:
    """Measures the time since the last request or change of state, whichever is later.

    A request that begins and ends between two calls of `observe` is noticed by the count of accepted choices.
    """

    def __init__(self, lifecycle: Lifecycle, core: EngineCore, admission: Admission, now: Callable[[], float]) -> None:
        self._lifecycle = lifecycle
        self._core = core
        self._admission = admission
        self._now = now
        self._last: tuple[int, State] | None = None  # accepted choices and state at the last call
        self._since = 0.0

    def observe(self) -> float:
        """Return the idle seconds, 0.0 while a request is waiting or in flight. Called about once a second."""
        seen = (self._core.in_flight.accepted, self._lifecycle.state)
        if len(self._admission) or seen != self._last:
            self._last, self._since = seen, self._now()
        return self._now() - self._since
