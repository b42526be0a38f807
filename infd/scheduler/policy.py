"""Decide the order of the queue.

Each level of priority moves a request's place in the queue by `patience`
arrivals. Only a bounded number of later requests, of any priority, can therefore
overtake a request. A request's place does not change while the request waits,
runs or is preempted.

The prompts that a client sends together, such as 2,048 texts to embed, have places
one arrival apart, and an arrival comes after the places that have started. So the
prompts of several clients take turns: a single prompt waits behind one prompt of
each other client.

A prompt that is pooled comes an arrival later for every PASSED_TOKENS of its tokens,
at most half of `patience`. So short texts go before long ones that wait, which wait
for a bounded number of them, and a level of priority is worth more than any length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from infd.scheduler.sequence import QueuePlace, Sequence

LEVELS = 100  # levels of priority on each side of 0
PASSED_TOKENS: Final = 32  # tokens for which a pooled prompt is placed one arrival later


class Policy:
    """Assigns places in the queue; smaller places are earlier."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._latest = 0  # place of the latest arrival, or the latest that has started, without priorities
        self._placed = 0

    def place(self, seq: Sequence, number: int = 0) -> QueuePlace:
        """Return the place of `seq`, which arrives next. Lower priorities are earlier; they are clamped to ±LEVELS.

        number  of the prompt among those that arrive together; the first, 0, is placed first
        """
        if not number:
            self._latest += 1
        self._placed += 1
        return self._latest + number + self._shift(seq), self._placed

    def started(self, seq: Sequence) -> None:
        """Later arrivals come after the place of `seq`, but for priority and length."""
        self._latest = max(self._latest, seq.place[0] - self._shift(seq))

    def _shift(self, seq: Sequence) -> int:
        """Return the arrivals by which a sequence's priority and length move its place."""
        length = 0 if seq.pooling is None else min(seq.prompt_tokens // PASSED_TOKENS, self._patience // 2)
        return clamped(seq.request.priority) * self._patience + length

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
