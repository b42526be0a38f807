"""The parts of a delta in the order in which the model generated them, for APIs whose answers are lists of parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.http.answer import ChoiceDelta
    from infd.text.markup import CallDelta


class ContentPart(Struct, frozen=True):
    text: str


class ThoughtPart(Struct, frozen=True):
    text: str


class CallPart(Struct, frozen=True):
    """New arguments of a call. `begun`: in the part that begins the call, the delta with its id and name; else None."""

    index: int
    arguments: str
    begun: CallDelta | None


Part = ContentPart | ThoughtPart | CallPart


def parts(delta: ChoiceDelta) -> Iterator[Part]:
    """Yield the parts of a delta, or of a whole choice's merged delta, in order."""
    aside = delta.aside
    if aside is None:
        if delta.text:
            yield ContentPart(delta.text)
        return
    calls = {call.index: call for call in aside.calls}
    places: dict[int, int] = {}
    content = thought = 0
    for run in aside.order:
        if run.kind == "content":
            yield ContentPart(delta.text[content : content + run.count])
            content += run.count
        elif run.kind == "thought":
            yield ThoughtPart(aside.thought[thought : thought + run.count])
            thought += run.count
        else:
            call, place = calls[run.call], places.get(run.call)
            begun = call if place is None and call.id is not None else None
            place = place or 0
            places[run.call] = place + run.count
            yield CallPart(run.call, call.arguments[place : place + run.count], begun)
