"""Answers as models write them, and the messages expected of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from infd.text.markup import joined
from tests.thorough import THOROUGH

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
    content, asides = "", []
    for part in parts:
        content += reading.feed(part)
        asides.append(reading.take())
    content += reading.finish()
    asides.append(reading.take())
    assert reading.finish() == ""
    check_deltas([call for aside in asides if aside is not None for call in aside.calls])
    return message_of(content, asides)


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


# Texts of at most so many characters are cut at each pair of places.
SHORT = 100 if THOROUGH else 30


def cuts(text: str) -> Iterable[list[str]]:
    """Yield a text cut into characters, at each place, and, if it is SHORT, at each pair of places."""
    yield list(text)
    for first in range(len(text) + 1):
        yield [text[:first], text[first:]]
        if len(text) <= SHORT:
            for second in range(first + 1, len(text)):
                yield [text[:first], text[first:second], text[second:]]
