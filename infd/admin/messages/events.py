"""The feed of events."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class ReadEvents(Struct, forbid_unknown_fields=True):
    """Read recent events, one JSON object per line.

    since   only events with a larger `seq`; all events if no event has reached this number, as after a restart
    follow  continue with new events until the subscriber disconnects or the daemon exits
    """

    since: Annotated[int, Meta(ge=0)] = 0
    follow: bool = False


class Event(Struct, rename={"message": "told"}):
    """An event.

    seq      consecutive number; a daemon's first event is 1
    time     Unix time
    kind     state, verb (caller, arguments and result of a mutating verb), rest (end of a transition: pause, resume,
             sleep, wake), weights, adapter, step or request
    message  for people; named `told` in JSON
    facts    values that depend on `kind`
    dropped  number of earlier events that were discarded unread
    """

    seq: int
    time: float
    kind: str
    message: str
    facts: dict[str, str | int | float | bool | None]
    dropped: int = 0
