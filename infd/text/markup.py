"""Parse an answer into thoughts, tool calls and content.

Parsers form a chain. Each parser is fed text in parts of any size, adds the thoughts or
tool calls in the text to `Asides`, and returns the other text. The next parser reads
the returned text; the text that the last parser returns is the answer's content.
Undecided text is held back; returned text is never revoked.

Some marks count only as tokens of the vocabulary (`Syntax.tokens`). The text of such a token is fed by itself
(`Reading.feed_token`); a parser ignores text that spells the mark in other tokens.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence


class CallDelta(Struct):
    """New parts of one tool call. Its first delta has the id and the name; each delta may append to the arguments.

    arguments  part of the arguments' JSON text
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Run(Struct):
    """Consecutive characters of one kind. A call's run begins the call or continues its arguments.

    count  characters of content or thought; of a call, the characters of its arguments
    call   index of the call; -1 for content and thoughts
    """

    kind: Literal["content", "thought", "call"]
    count: int
    call: int = -1


class Aside(Struct):
    """The parts of an answer that are not content.

    thought_tokens  number of the thought's tokens, including its marks
    order           the order of thoughts, calls and content; empty if there is no thought and no call
    """

    thought: str = ""
    thought_tokens: int = 0
    calls: list[CallDelta] = []
    order: list[Run] = []


class Asides:
    """Collects the thoughts and calls that parsers find in one answer.

    most_calls  number of calls after which further calls are dropped; None: no limit
    begun       number of calls that have begun
    tokens      marks that count only as tokens
    token       the mark whose token ends the text that the parsers are being fed; empty: none
    """

    __slots__ = (
        *("_arguments", "_calls", "_most_calls", "_order", "_thoughts"),
        *("begun", "thought_tokens", "token", "tokens"),
    )

    def __init__(self, most_calls: int | None = None, tokens: frozenset[str] = frozenset()) -> None:
        self.tokens = tokens
        self.token = ""
        self.thought_tokens = 0
        self._thoughts: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[list[str]] = []  # parts of the arguments of each call in _calls
        self._order: list[Run] = []
        self.begun = 0
        self._most_calls = most_calls

    def counts(self, mark: str, text: str, end: int) -> bool:
        """Return whether a mark counts that ends at index `end` of `text`, the text so far."""
        return mark not in self.tokens or (mark == self.token and end == len(text))

    def find(self, mark: str, text: str) -> int:
        """Return the index in `text`, the text so far, of the first mark that counts; -1 if there is none."""
        if mark not in self.tokens:
            return text.find(mark)
        return len(text) - len(mark) if mark == self.token and text.endswith(mark) else -1

    def think(self, text: str) -> None:
        if text:
            self._thoughts.append(text)
            self._extend("thought", len(text))

    def pass_content(self, text: str, *, before_call: bool) -> None:
        """Record the place of content that a parser returned.

        before_call  whether the content precedes the call that the parser began while it read the text
        """
        if not text:
            return
        if before_call and self._order and self._order[-1].kind == "call":
            run = self._order.pop()
            self._extend("content", len(text))
            self._order.append(run)
        else:
            self._extend("content", len(text))

    def call(self, name: str, id: str | None = None) -> None:
        """Begin a call."""
        self.begun += 1
        if self._wanted:
            self._calls.append(CallDelta(self.begun - 1, id=id or f"call_{secrets.token_hex(12)}", name=name))
            self._arguments.append([])
            self._order.append(Run("call", 0, self.begun - 1))

    def append_arguments(self, text: str) -> None:
        """Append to the arguments of the latest call."""
        if text and self._wanted:
            if not self._calls:
                self._calls.append(CallDelta(self.begun - 1))
                self._arguments.append([])
            self._arguments[-1].append(text)
            self._extend("call", len(text), self.begun - 1)

    def take(self) -> Aside | None:
        """Return the thoughts and tool calls added since the last `take`, None if there are none."""
        if not (self._thoughts or self.thought_tokens or self._calls):
            self._order.clear()
            return None
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        news = Aside("".join(self._thoughts), self.thought_tokens, self._calls, self._order)
        self._order = []
        self._thoughts, self._calls, self._arguments, self.thought_tokens = [], [], [], 0
        return news

    def _extend(self, kind: Literal["content", "thought", "call"], count: int, call: int = -1) -> None:
        order = self._order
        if order and order[-1].kind == kind and order[-1].call == call:
            order[-1].count += count
        else:
            order.append(Run(kind, count, call))

    @property
    def _wanted(self) -> bool:
        return self._most_calls is None or self.begun <= self._most_calls


class Parser(Protocol):
    """Parses one syntax in one answer."""

    def feed(self, text: str, asides: Asides) -> str:
        """Append text; add thoughts or calls to `asides`; return the text that is certainly outside this syntax."""

    def finish(self, asides: Asides) -> str:
        """End the text; return the text held back. A second call returns an empty text."""


class ThoughtParser(Parser, Protocol):
    """Parses thoughts.

    inside  whether the text so far ends within a thought
    """

    inside: bool


class Reading:
    """The parsers of one answer. The parser of thoughts reads first, so that no call is found within a thought."""

    __slots__ = ("_asides", "_calls", "_thoughts", "_was_inside")

    def __init__(
        self,
        thoughts: ThoughtParser | None = None,
        calls: Parser | None = None,
        *,
        most_calls: int | None = None,
        tokens: frozenset[str] = frozenset(),
    ) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self._asides = Asides(most_calls, tokens)
        self._was_inside = thoughts is not None and thoughts.inside

    def feed(self, text: str) -> str:
        """Append text; return the part that is certainly content."""
        asides = self._asides
        if self._thoughts is not None:
            text = self._thoughts.feed(text, asides)
        begun = asides.begun
        if self._calls is not None and text:
            text = self._calls.feed(text, asides)
        asides.pass_content(text, before_call=asides.begun > begun)
        return text

    def feed_token(self, text: str, mark: str) -> str:
        """Append text with which the token of `mark` ends; return the part that is certainly content."""
        self._asides.token = mark
        text = self.feed(text)
        self._asides.token = ""
        return text

    def count(self) -> None:
        """Count the token of the latest text as part of a thought if a thought was open before or after that text."""
        if self._thoughts is not None:
            inside = self._thoughts.inside
            if inside or self._was_inside:
                self._asides.thought_tokens += 1
            self._was_inside = inside

    def finish(self) -> str:
        """End the text; return the content that was held back."""
        asides = self._asides
        text = "" if self._thoughts is None else self._thoughts.finish(asides)
        if self._calls is not None:
            text = self._calls.feed(text, asides) + self._calls.finish(asides)
        asides.pass_content(text, before_call=False)
        return text

    def take(self) -> Aside | None:
        """Return the thoughts and tool calls found since the last `take`, None if there are none."""
        return self._asides.take()


def joined(asides: Sequence[Aside | None], texts: Sequence[str] = ()) -> Aside | None:
    """Join the asides of one answer. Returns None if every aside is None.

    texts  content that `Reading` returned along with each aside; empty: the result's `order` is empty
    """
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
        [run for aside, text in zip(asides, texts, strict=False) for run in _runs(aside, text)],
    )


def _runs(aside: Aside | None, text: str) -> Sequence[Run]:
    if aside is not None and aside.order:
        return aside.order
    return (Run("content", len(text)),) if text else ()


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0:
        if mark.startswith(text[place:]):
            return len(text) - place
        place = text.find(mark[0], place + 1)
    return 0
