"""The common part of the parsers of calls that begin with a mark: it finds the marks, and emits the content.

White space around a call belongs to the call, so that an answer that consists of calls has no content. White space
after content is held back until more content follows; white space after a call is dropped.

An opening mark that counts only as a token (`Asides.tokens`) may be spelled in other tokens: by a model that quotes a
call, or by a checkpoint that always spells its marks. A model that quotes a call writes more text after it. So a
spelled call is held back until the answer ends; then it is a call. If other text follows, it is content.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, Final

from infd.text.markup import Asides, overlap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.text.markup import CallDelta


class MarkedCalls(ABC):
    """Parses one answer. The parser of each shape of syntaxes derives from this class, and adds states.

    Each state is a method that consumes text of `_pending`. The method returns True if the parser can continue with the
    rest of `_pending`, False if the parser needs more text. After an opening mark the state is `_opened`; after a call
    the state returns to `_between`.
    """

    def __init__(self, opens: Sequence[str]) -> None:
        """opens: the opening marks; no mark begins with another mark."""
        self._opens = opens
        self._begins = _first_characters(tuple(opens))
        self._pending = ""
        self._state: Callable[[Asides], bool] = self._between
        self._opening = ""  # the opening mark and the text consumed after it, which are content if no call follows
        self._content: list[str] = []
        self._held_space: list[str] = []  # white space after content, held back until more content follows
        self._has_content = False  # whether content was emitted
        self._after_call = False  # whether only white space has followed the last call
        self._spelled: _Spelled | None = None  # set while a spelled call is held back
        self._alone = False  # whether the parser stops at text outside of calls
        self._quiet = False  # whether the text so far ends outside of calls and marks

    def feed(self, text: str, asides: Asides) -> str:
        if self._quiet and self._begins.search(text) is None:
            self._emit_content(text)
        else:
            self._pending += text
            while self._state(asides):
                pass
            self._quiet = not self._pending and self._state == self._between
        return self._take_content()

    def finish(self, asides: Asides) -> str:
        rest, self._pending = self._pending, ""
        if self._state == self._between:
            self._emit_content(rest)
        elif self._spelled is not None:
            self._end_spelled(self._spelled, asides)
        else:
            self._cut(rest, asides)
        if not self._after_call:
            self._content += self._held_space
        self._held_space.clear()
        self._quiet = False
        self._state = self._between
        return self._take_content()

    @property
    def within_value(self) -> bool:
        """Whether the text so far ends within a value, where marks are ordinary text."""
        return False

    @abstractmethod
    def _opened(self, asides: Asides) -> bool:
        """Consume the text after the opening mark `_opening`."""

    @abstractmethod
    def _fresh(self) -> MarkedCalls:
        """Return a new parser of the same syntax."""

    @abstractmethod
    def _cut(self, rest: str, asides: Asides) -> None:
        """Handle an answer that ends after an opening mark or within a call. rest: text that no state has consumed."""

    def _between(self, asides: Asides) -> bool:
        """Consume content, up to an opening mark."""
        pending = self._pending
        if self._begins.search(pending) is None:
            if pending:
                self._emit_content(pending)
                self._pending = ""
            return False
        if self._alone:
            return self._consume_mark()
        found = [(place, each) for each in self._opens if (place := pending.find(each)) >= 0]
        start, mark = min(found, default=(-1, ""))
        if start >= 0:
            self._emit_content(pending[:start])
            if asides.tokens and not asides.counts(mark, pending, start + len(mark)):
                self._pending = pending[start:]
                self._spelled = _Spelled(self._fresh())
                self._state = self._in_spelled
                return True
            self._pending = pending[start + len(mark) :]
            self._opening = mark
            self._state = self._opened
            return True
        safe = len(pending) - max(overlap(pending, each) for each in self._opens)
        self._emit_content(pending[:safe])
        self._pending = pending[safe:]
        return False

    def _in_spelled(self, asides: Asides) -> bool:
        """Hold back a spelled call, up to text that follows the call or to the token of an opening mark."""
        assert self._spelled is not None
        pending = self._pending
        token = asides.token if asides.token in self._opens and asides.find(asides.token, pending) >= 0 else ""
        self._spelled.feed(pending[: len(pending) - len(token)])
        self._pending = token
        if not token and not self._spelled.refuted:
            return False
        text, rest = self._spelled.text()
        self._emit_content(text if not token else text + rest)
        self._pending = token or rest
        self._spelled = None
        self._state = self._between
        return True

    def _end_spelled(self, spelled: _Spelled, asides: Asides) -> None:
        """Emit the spelled calls that end the answer; content if they are no calls."""
        calls = spelled.finish()
        if not calls:
            self._emit_content("".join(spelled.text()))
        for call in calls:
            self._begin_call(call.name or "", asides, call.id)
            asides.append_arguments(call.arguments)
        self._spelled = None

    def _consume_mark(self) -> bool:
        """Consume an opening mark. Other text is not consumed; it refutes that the answer ends with calls."""
        words = self._pending.lstrip()
        if self._has_content:
            return False
        mark = next((each for each in self._opens if words.startswith(each)), None)
        if mark is not None:
            self._pending, self._opening, self._state = words[len(mark) :], mark, self._opened
            return True
        self._has_content = not any(each.startswith(words) for each in self._opens)
        return False

    def _take_content(self) -> str:
        text = "".join(self._content)
        self._content.clear()
        return text

    def _begin_call(self, name: str, asides: Asides, id: str | None = None) -> None:
        """Emit the beginning of a call."""
        asides.call(name, id)
        self._opening = ""
        self._after_call = True
        if not self._has_content:
            self._held_space.clear()

    def _refuse(self, text: str = "") -> None:
        """Emit the opening mark, the text consumed after it, and `text` as content."""
        self._emit_content(self._opening + text)
        self._opening = ""
        self._state = self._between

    def _emit_content(self, text: str) -> None:
        """Emit content, but hold back the white space at its end, and drop white space that follows a call."""
        if self._after_call:
            text = text.lstrip()
            if not text:
                return
            self._after_call = False
        words = text.rstrip()
        if words:
            self._content += self._held_space
            self._content.append(words)
            self._has_content = True
            self._held_space.clear()
        if len(words) < len(text):
            self._held_space.append(text[len(words) :])


class _Spelled:
    """Text from a spelled mark on, read as calls by a parser of its own."""

    def __init__(self, parser: MarkedCalls) -> None:
        self._parser = parser
        parser._alone, parser._begins = True, _ANY
        self._asides = Asides()
        self._parts: list[str] = []

    @property
    def refuted(self) -> bool:
        """Whether the text is not, or not only, calls."""
        return self._parser._has_content

    def feed(self, text: str) -> None:
        self._parts.append(text)
        self._parser.feed(text, self._asides)

    def text(self) -> tuple[str, str]:
        """Return the text up to where it was refuted, and the rest."""
        whole = "".join(self._parts)
        end = len(whole) - len(self._parser._pending)
        return whole[:end], whole[end:]

    def finish(self) -> list[CallDelta]:
        """Return the calls of which the text consists; empty if there is other text."""
        content = self._parser.finish(self._asides)
        aside = self._asides.take()
        return [] if content or aside is None else aside.calls


_ANY: Final = re.compile(r"\S")


@cache
def _first_characters(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the marks' first characters, for a quick test: most text contains none of them."""
    return re.compile(f"[{''.join(re.escape(mark[0]) for mark in marks)}]" if marks else r"(?!)")
