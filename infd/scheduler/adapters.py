"""Decide which adapter stands in which slot of the device.

At most `per_step` adapters have running sequences, so every step can compute
all that run. The device holds `slots` of them: one that nobody uses stays until
another one needs its place. Slot 0 is the model itself.

Steps run in order, so a slot may be granted anew in the very next plan.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from infd.scheduler.plan import Load

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infd.request import Adapter


class AdapterSlots:
    """Slots 1..slots, and how many running sequences use each adapter."""

    def __init__(self, slots: int, per_step: int) -> None:
        self.total = slots
        self.per_step = min(per_step, slots)
        self._free = list(range(slots, 0, -1))
        self._slots: dict[Adapter, int] = {}
        self._idle: dict[Adapter, None] = {}  # in a slot and not used; the one let go longest ago first
        self._users: Counter[Adapter] = Counter()

    @property
    def running(self) -> list[Adapter]:
        return list(self._users)

    def fits(self, adapter: Adapter | None) -> bool:
        """Say whether a sequence of this adapter may run beside those that run now."""
        return adapter is None or adapter in self._users or len(self._users) < self.per_step

    def take(self, adapter: Adapter | None, loads: list[Load]) -> int:
        """Return the slot for one more running sequence; the caller has asked `fits`. What it takes goes into loads."""
        if adapter is None:
            return 0
        self._users[adapter] += 1
        self._idle.pop(adapter, None)
        if adapter not in self._slots:
            if not self._free:
                self.drop(next(iter(self._idle)))
            self._slots[adapter] = self._free.pop()
            loads.append(Load(self._slots[adapter], adapter))
        return self._slots[adapter]

    def release(self, adapter: Adapter | None) -> None:
        """A sequence runs no more."""
        if adapter is None:
            return
        self._users[adapter] -= 1
        assert self._users[adapter] >= 0, f"{adapter} was released more often than taken"
        if not self._users[adapter]:
            del self._users[adapter]
            if adapter in self._slots:
                self._idle[adapter] = None

    def undo(self, loads: Iterable[Load]) -> None:
        """These were not loaded, or perhaps not: whoever wants such an adapter has it loaded again."""
        for load in loads:
            if self._slots.get(load.adapter) == load.slot:
                self.drop(load.adapter)

    def drop(self, adapter: Adapter) -> int | None:
        """Empty the slot of an adapter that nobody uses, and return it; None if it is in none."""
        slot = self._slots.pop(adapter, None)
        if slot is not None:
            assert adapter not in self._users, f"{adapter} is in use"
            self._idle.pop(adapter, None)
            self._free.append(slot)
        return slot

    def verify(self, running: Iterable[Adapter | None]) -> None:
        """Assert that every slot is accounted for, given the adapters of all running sequences."""
        users = Counter(adapter for adapter in running if adapter is not None)
        assert users == self._users, "adapters in use are miscounted"
        assert len(users) <= self.per_step, "more adapters run than a step takes"
        assert users.keys() <= self._slots.keys(), "a running adapter has no slot"
        assert self._slots.keys() == users.keys() | self._idle.keys(), "a slot is held by nobody"
        assert not users.keys() & self._idle.keys(), "an adapter in use is up for eviction"
        assert sorted([*self._free, *self._slots.values()]) == list(range(1, self.total + 1)), "a slot is lost"
