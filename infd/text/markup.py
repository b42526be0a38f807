"""Take an answer's markup apart: what it thinks and which tools it calls, beside what it says.

A parser is fed text in whatever parts it comes, takes out what it knows, and
returns the rest: the next parser's text, and in the end the answer's content.
What it has not recognised yet it keeps until it has; what has been told is
never taken back.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable


class CallDelta(Struct):
    """What is new in one tool call: its id and name once, at its beginning, its arguments (JSON text) in parts."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Aside(Struct):
    """What an answer gives beside its content.

    thought_tokens  that the thought took, its marks included
    """

    thought: str = ""
    thought_tokens: int = 0
    calls: list[CallDelta] = []


class Asides:
    """Collects what parsers take out of one text, until somebody asks for it.

    most_calls  calls after so many are dropped
    """

    __slots__ = ("_arguments", "_begun", "_calls", "_most_calls", "_thoughts", "thought_tokens")

    def __init__(self, most_calls: int | None = None) -> None:
        self.thought_tokens = 0
        self._thoughts: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[list[str]] = []  # of each of these
        self._begun = 0
        self._most_calls = most_calls

    def think(self, text: str) -> None:
        self._thoughts.append(text)

    def call(self, name: str, id: str | None = None) -> None:
        """A call begins. Its arguments follow."""
        self._begun += 1
        if self._wanted:
            self._calls.append(CallDelta(self._begun - 1, id=id or f"call_{secrets.token_hex(12)}", name=name))
            self._arguments.append([])

    def argue(self, text: str) -> None:
        """The latest call's arguments go on."""
        if text and self._wanted:
            if not self._calls:
                self._calls.append(CallDelta(self._begun - 1))
                self._arguments.append([])
            self._arguments[-1].append(text)

    def take(self) -> Aside | None:
        """Return what is new, None if nothing is."""
        if not (self._thoughts or self.thought_tokens or self._calls):
            return None
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        news = Aside("".join(self._thoughts), self.thought_tokens, self._calls)
        self._thoughts, self._calls, self._arguments, self.thought_tokens = [], [], [], 0
        return news

    @property
    def _wanted(self) -> bool:
        return self._most_calls is None or self._begun <= self._most_calls


class Parser(Protocol):
    """Reads one syntax in one answer."""

    def feed(self, text: str, asides: Asides) -> str:
        """Return what is certain to be none of this syntax's; what is, goes to `asides`."""

    def finish(self, asides: Asides) -> str:
        """Decide on all that was kept, as nothing follows. A second time there is nothing."""


class ThoughtParser(Parser, Protocol):
    """One that takes out thoughts.

    inside  whether the text so far ends within a thought
    """

    inside: bool


class Reading:
    """One answer's parsers in a row: thoughts are taken out first, so that nothing in them is a call."""

    __slots__ = ("_asides", "_calls", "_thoughts", "_was_inside")

    def __init__(
        self, thoughts: ThoughtParser | None = None, calls: Parser | None = None, *, most_calls: int | None = None
    ) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self._asides = Asides(most_calls)
        self._was_inside = thoughts is not None and thoughts.inside

    def feed(self, text: str) -> str:
        """Return what is certain to be content."""
        asides = self._asides
        if self._thoughts is not None:
            text = self._thoughts.feed(text, asides)
        if self._calls is not None and text:
            text = self._calls.feed(text, asides)
        return text

    def count(self) -> None:
        """A token's text has been fed. It is part of a thought if the thought was open before it, or is now."""
        if self._thoughts is not None:
            inside = self._thoughts.inside
            self._asides.thought_tokens += inside or self._was_inside
            self._was_inside = inside

    def finish(self) -> str:
        """Return the content that was kept, as nothing follows."""
        asides = self._asides
        text = "" if self._thoughts is None else self._thoughts.finish(asides)
        if self._calls is not None:
            text = self._calls.feed(text, asides) + self._calls.finish(asides)
        return text

    def take(self) -> Aside | None:
        """Return what was taken out of the text since the last time, None if nothing was."""
        return self._asides.take()


def joined(asides: Iterable[Aside | None]) -> Aside | None:
    """Return one answer's asides as one."""
    news = [aside for aside in asides if aside is not None]
    if not news:
        return None
    arguments: dict[int, list[str]] = {}
    calls: dict[int, CallDelta] = {}
    for aside in news:
        for delta in aside.calls:
            calls.setdefault(delta.index, delta)
            arguments.setdefault(delta.index, []).append(delta.arguments)
    return Aside(
        "".join(aside.thought for aside in news),
        sum(aside.thought_tokens for aside in news),
        [CallDelta(index, "".join(arguments[index]), call.id, call.name) for index, call in calls.items()],
    )


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of a mark that goes on."""
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0:
        if mark.startswith(text[place:]):
            return len(text) - place
        place = text.find(mark[0], place + 1)
    return 0
