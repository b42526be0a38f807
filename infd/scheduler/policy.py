"""Decide the order of the queue.

Each level of priority moves a request's place in the queue by `patience`
arrivals. Only a bounded number of later requests, of any priority, can therefore
overtake a request. A request's place does not change while the request waits,
runs or is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infd.scheduler.sequence import QueuePlace, Sequence

LEVELS = 100  # levels of priority on each side of 0


class Policy:
    """Assigns places in the queue; smaller places are earlier."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._arrivals = 0

    def place(self, priority: int) -> QueuePlace:
        """Return the place of the next arrival. Lower priorities are earlier; priorities are clamped to ±LEVELS."""
        self._arrivals += 1
        return self._arrivals + clamped(priority) * self._patience, self._arrivals

    def may_pass(self, seq: Sequence, waiting: Sequence) -> bool:
        """Return whether `seq` may be admitted before `waiting`, an earlier sequence that lacks a resource.

        `seq` may if its place is at most `patience` after that of `waiting`.
        """
        return seq.place[0] <= waiting.place[0] + self._patience


def clamped(priority: int) -> int:
    return max(-LEVELS, min(priority, LEVELS))


def by_place(seq: Sequence) -> QueuePlace:
    return seq.place


def split_decoding(running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Return the running sequences that decode (one token to compute), and the other sequences, both in order.

    Decoding sequences use a step's token budget first, and prompts the rest, so
    a prompt never pauses a stream.
    """
    decoding: list[Sequence] = []
    others: list[Sequence] = []
    for seq in running:
        (decoding if len(seq.tokens) + seq.in_flight - seq.computed == 1 else others).append(seq)
    return decoding, others
