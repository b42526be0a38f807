"""Answers as models write them, and the messages that they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from infd.text.markup import joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infd.text.markup import Aside, CallDelta, Reading


class Said(NamedTuple):
    """A whole answer: its thought, its content, and the name and arguments of each call."""

    content: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def said(content: str, asides: Iterable[Aside | None]) -> Said:
    whole = joined(asides)
    if whole is None:
        return Said(content)
    return Said(content, whole.thought, tuple((call.name or "", call.arguments) for call in whole.calls))


def read(reading: Reading, parts: Iterable[str]) -> Said:
    """Return what an answer says that comes in these parts; each call's deltas are checked on the way."""
    content, asides = "", []
    for part in parts:
        content += reading.feed(part)
        asides.append(reading.take())
    content += reading.finish()
    asides.append(reading.take())
    check_deltas([call for aside in asides if aside is not None for call in aside.calls])
    return said(content, asides)


def check_deltas(deltas: Sequence[CallDelta]) -> None:
    """A call's first delta carries its id and name, no other does; calls come one after the other."""
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


def cuts(text: str) -> Iterable[list[str]]:
    """Cut a text into characters, at each place, and a short one at each pair of places."""
    yield list(text)
    for first in range(len(text) + 1):
        yield [text[:first], text[first:]]
        if len(text) <= 100:
            for second in range(first + 1, len(text)):
                yield [text[:first], text[first:second], text[second:]]
