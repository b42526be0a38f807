"""Decide who goes first.

Priority is a head start in the queue, not a class: each level of priority is
worth `patience` arrivals. A request is therefore overtaken by a bounded number
of later ones, whatever their priority, and the order never changes while it
waits, runs or is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infd.scheduler.sequence import Sequence

Order = tuple[int, int]
LEVELS = 100  # of priority, on each side of 0


class Policy:
    """Places in the queue; the smaller goes first."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._arrivals = 0

    def place(self, priority: int) -> Order:
        """Return the place of the next arrival. A lower priority is earlier; beyond LEVELS all are alike."""
        self._arrivals += 1
        return self._arrivals + max(-LEVELS, min(priority, LEVELS)) * self._patience, self._arrivals

    def may_pass(self, seq: Sequence, waiting: Sequence) -> bool:
        """Say whether a later arrival may run before one that waits for something that it does not want."""
        return seq.order[0] <= waiting.order[0] + self._patience


def by_order(seq: Sequence) -> Order:
    return seq.order


def by_need(running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Return the running sequences that decode, being owed one token, and the others.

    The former draw first from a step's tokens: a prompt fills what they leave,
    so it never pauses a stream. Within both parts the order of arrival holds.
    """
    decoding: list[Sequence] = []
    others: list[Sequence] = []
    for seq in running:
        (decoding if len(seq.tokens) + seq.in_flight - seq.computed == 1 else others).append(seq)
    return decoding, others
