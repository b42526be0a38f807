"""The common part of parsers of answers that are a sequence of messages, each with a header, a body and a closing mark.

The body is a thought, a call or content. Contents are joined by newlines, and so are thoughts. A message also ends
where the next message begins or the answer ends. Text without a header is content.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from infd.text.markup import overlap

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.text.markup import Asides


class Frame(NamedTuple):
    """The marks between messages.

    closes  marks after a body
    begin   mark before a header; the model may omit it
    within  further marks with which a header may begin
    ends    marks that end a body
    """

    closes: tuple[str, ...]
    begin: str
    within: tuple[str, ...]
    ends: tuple[str, ...]


class FramedParser(ABC):
    """Parses one answer.

    Each state is a method that consumes text of `_pending`. The method returns True if the parser can continue with the
    rest of `_pending`, False if the parser needs more text.
    """

    def __init__(self, frame: Frame) -> None:
        """Start before a header."""
        self.inside = False
        self._frame = frame
        self._ends, self._first_characters = _patterns(frame)
        self._pending = ""
        self._consumed = ""  # the mark `begin`, if the answer contains it before the current header
        self._content: list[str] = []
        self._had_content = self._had_thought = False
        self._begins = True  # whether the current body has not emitted any text yet
        self._first = True  # whether no body has begun
        self._spelled = False  # whether the model spells marks that should be tokens
        self._state: Callable[[Asides], bool] = self._in_header

    def feed(self, text: str, asides: Asides) -> str:
        self._pending += text
        while self._pending and self._state(asides):
            pass
        return self._take_content()

    def finish(self, asides: Asides) -> str:
        rest, self._pending = self._pending, ""
        if self._state == self._in_header:
            if not self._is_header(rest):
                self._emit(rest, asides)
        elif self._state != self._between:
            self._emit(rest, asides)
        self._end_body(asides)
        self._state = self._between
        return self._take_content()

    @abstractmethod
    def _in_header(self, asides: Asides) -> bool:
        """Consume a header and the mark after it, and begin the body."""

    @abstractmethod
    def _is_header(self, rest: str) -> bool:
        """Return whether the end of an answer, in which no header ends, is part of a header, which is dropped."""

    def begin(self, *, thought: bool) -> None:
        """Begin a body: a thought or content."""
        self.inside, self._begins, self._first, self._state = thought, True, False, self._in_body

    def _end_body(self, asides: Asides) -> None:
        """End the current body."""
        self.inside = False

    def _between(self, asides: Asides) -> bool:
        """Consume the marks and white space between two messages."""
        frame = self._frame
        words = self._pending = self._pending.lstrip()
        marks = (*frame.closes, frame.begin, *frame.within)
        mark = next((each for each in marks if words.startswith(each)), "")
        if mark and self._counts(mark, words, len(mark), asides):
            if mark not in frame.closes:
                self._consumed = mark if mark == frame.begin else ""
                self._state = self._in_header
            if mark not in frame.within:
                self._pending = words[len(mark) :]
            return True
        if not mark and any(each.startswith(words) for each in marks):
            return False
        self.begin(thought=False)
        return True

    def _in_body(self, asides: Asides) -> bool:
        """Consume a body up to the next mark."""
        pending = self._pending
        found = self._find(self._ends, asides)
        end = self._safe(pending) if found is None else found.start()
        self._emit(pending[:end], asides)
        self._pending = pending[end:]
        if found is None:
            return False
        self._end_body(asides)
        self._state = self._between
        return True

    def _find(self, marks: re.Pattern[str], asides: Asides) -> re.Match[str] | None:
        """Return the first mark of `_pending` that counts."""
        found = marks.search(self._pending)
        while found is not None and not self._counts(found[0], self._pending, found.end(), asides):
            found = marks.search(self._pending, found.end())
        return found

    def _counts(self, mark: str, text: str, end: int, asides: Asides) -> bool:
        """Return whether a mark counts that ends at index `end` of `text`.

        A checkpoint that spells the marks of the first header in other tokens spells all its marks.
        """
        if not self._spelled and not asides.counts(mark, text, end):
            self._spelled = self._first
            return self._spelled
        return True

    def _safe(self, text: str) -> int:
        """Return the length of a text without the beginning of a mark at its end."""
        if self._first_characters.search(text) is None:
            return len(text)
        return len(text) - max(overlap(text, mark) for mark in self._frame.ends)

    def _emit(self, text: str, asides: Asides) -> None:
        """Emit a part of a body: content or a thought."""
        if not text:
            return
        if self.inside:
            asides.think("\n" + text if self._begins and self._had_thought else text)
            self._had_thought = True
        else:
            self._content.append("\n" + text if self._begins and self._had_content else text)
            self._had_content = True
        self._begins = False

    def _take_content(self) -> str:
        text = "".join(self._content)
        self._content.clear()
        return text


@cache
def _patterns(frame: Frame) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of the marks that end a body, and of their first characters."""
    ends = sorted(frame.ends, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ends))), re.compile(f"[{''.join(re.escape(mark[0]) for mark in ends)}]")
