"""Answers as models write them, and the messages expected of them."""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from infd.text.markup import joined
from tests.thorough import SOAK, THOROUGH, among

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infd.text.markup import Aside, CallDelta, Reading


class Message(NamedTuple):
    """An expected message: thought, content, and the name and arguments of each call."""

    content: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def message_of(content: str, asides: Iterable[Aside | None]) -> Message:
    whole = joined(asides)
    if whole is None:
        return Message(content)
    return Message(content, whole.thought, tuple((call.name or "", call.arguments) for call in whole.calls))


def read(reading: Reading, parts: Iterable[str]) -> Message:
    """Parse an answer that arrives in these parts, and check the deltas of each call."""
    arriving = Arriving(reading)
    for part in parts:
        arriving.feed(part)
    return arriving.finish()


class Arriving:
    """A message whose answer arrives in parts.

    shared  immutable objects to which the parsers refer, which `so_far` need not copy
    """

    def __init__(self, reading: Reading, *shared: object) -> None:
        self._reading = reading
        self._shared = shared
        self._content = ""
        self._asides: list[Aside | None] = []

    def feed(self, part: str) -> None:
        self._content += self._reading.feed(part)
        self._asides.append(self._reading.take())

    def so_far(self) -> Message:
        """Return the message as if the answer ended here; more parts may follow."""
        return deepcopy(self, {id(each): each for each in (*self._shared, *self._asides)}).finish()

    def finish(self) -> Message:
        """End the answer, and check the deltas of each call."""
        self._content += self._reading.finish()
        self._asides.append(self._reading.take())
        assert self._reading.finish() == ""
        check_deltas([call for aside in self._asides if aside is not None for call in aside.calls])
        return message_of(self._content, self._asides)


def check_deltas(deltas: Sequence[CallDelta]) -> None:
    """Check that only a call's first delta carries its id and name, and that calls do not interleave."""
    latest = -1
    ids = set()
    for delta in deltas:
        first = delta.index != latest
        assert delta.index == latest + first
        assert first == (delta.id is not None) == (delta.name is not None)
        if delta.id is not None:
            ids.add(delta.id)
        latest = delta.index
    assert len(ids) == latest + 1


SHORT = 100  # texts of at most so many characters are cut at each pair of places in `make soak`
DRAWN = 16  # cuts at one place in `make test`


def cuts(text: str) -> Iterable[list[str]]:
    """Yield a text cut into characters, at each place, and at some pairs of places; if it is SHORT, at each pair.

    `make test` draws some of the places, and the pairs are all taken in `make soak` only. Tests that call this are
    marked `histories`.
    """
    yield list(text)
    draw, places = random.Random(text), range(len(text) + 1)
    for first in places if THOROUGH else draw.sample(places, min(DRAWN, len(places))):
        yield [text[:first], text[first:]]
    every = len(text) <= SHORT and SOAK
    for first, second in combinations(places, 2) if every else _pairs(draw, places):
        yield [text[:first], text[first:second], text[second:]]


def _pairs(draw: random.Random, places: Sequence[int]) -> Iterable[tuple[int, int]]:
    for _ in range(among(DRAWN, 4 * DRAWN)):
        first, second = sorted(draw.choices(places, k=2))
        yield first, second
