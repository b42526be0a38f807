"""The protocol of every syntax of thoughts, and the shape of most syntaxes: a block between two marks."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

from infd.text.markup import overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.constraint import Header, Thought
    from infd.text.chat import ChatTemplate
    from infd.text.markup import Asides, ThoughtParser


_MOST_LEADING_SPACE: Final = 256  # maximum characters of white space next to a mark; no model writes more


class ReasoningSyntax(Protocol):
    """How one family of models marks thoughts.

    marks  tokens that detokenizing must not skip, even if the tokenizer declares them special
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    def matches(self, template: ChatTemplate) -> bool:
        """Return whether a model with this template may write thoughts in this syntax."""

    def thought(self, prompt: str, continued: str) -> Thought | None:
        """Return how an answer marks its thought; None if the answer cannot contain a thought.

        prompt     the end of the prompt, where templates may open a thought, or write an empty one to forbid thoughts
        continued  the text of the assistant's message that the answer continues, usually empty
        """

    def header(self, prompt: str, continued: str) -> Header | None:
        """Return the text that the model writes before a constrained answer without calls; None: no text.

        prompt, continued  as in `thought`
        """

    def start(self, prompt: str, continued: str, ends: Sequence[str] = ()) -> ThoughtParser | None:
        """Start parsing an answer. Returns None if the answer cannot contain a thought.

        prompt, continued  as in `thought`
        ends               marks of a call: at the beginning of a line they end a thought that the model has left open
        """


class _State(Enum):
    START = auto()  # before the block: white space so far, or part of the opening mark
    INSIDE = auto()
    CLOSED = auto()  # after the closing mark: newlines so far, or part of the mark that opens the answer
    OPENED = auto()  # after the mark that opens the answer: newlines so far
    ANSWER = auto()  # between the marks before and after the answer
    CONTENT = auto()


class BlockParser:
    """Parses one block at the beginning of an answer.

    Newlines next to the marks belong to the marks: templates write these newlines, and strip them from the messages
    that clients send back. A closing mark at the beginning of an answer closes an empty thought. Models write such a
    thought if the template writes an empty thought in turns without a thought.

    A thought that the prompt or a mark's token has opened ends only with a mark's token, if the mark counts only as a
    token: models spell marks that they write about in other tokens. A checkpoint that spells the opening mark, at the
    beginning of the answer, spells the closing mark too.
    """

    __slots__ = (
        "_answer",
        "_at_line_start",
        "_closings",
        "_emitted",
        "_ends",
        "_newlines",
        "_openings",
        "_pending",
        "_spelled",
        "_state",
        "inside",
    )

    def __init__(
        self,
        thought: Thought,
        ends: Sequence[str] = (),
        *,
        variants: Sequence[tuple[str, str]] = (),
        answer: Sequence[str] = (),
        closed: bool = False,
        answering: bool = False,
    ) -> None:
        """Start before the block, inside a block that the prompt has opened, or after a block that the prompt contains.

        ends       marks of a call that end a thought left open
        variants   further pairs of marks of the block
        answer     marks before and after the answer that follows the block; the model may omit both; empty: none
        closed     whether the prompt has closed the block
        answering  whether the prompt has opened the answer
        """
        self.inside = thought.inside
        pairs = ((thought.opening, thought.closing), *variants)
        self._openings = tuple(dict.fromkeys(opening for opening, _ in pairs))
        self._closings = tuple(dict.fromkeys(closing for _, closing in pairs))
        self._ends = tuple(ends)
        self._answer = tuple(answer)
        self._at_line_start = True
        before = _State.ANSWER if answering else _State.CLOSED if closed else _State.START
        self._state = _State.INSIDE if thought.inside else before
        self._pending = ""  # text that may begin a mark
        self._spelled = False  # whether the opening mark should be a token, but is spelled in other tokens
        self._emitted = False  # whether part of the thought was emitted
        self._newlines = 0  # number of newlines that are held back until more of the thought follows

    def feed(self, text: str, asides: Asides) -> str:
        if self._state is _State.CONTENT:
            return text
        if self._state is _State.START:
            text = self._before(self._pending + text, asides)
        if self._state is _State.INSIDE:
            text = self._inside(self._pending + text, asides)
        if self._state is _State.CLOSED:
            text = self._after(self._pending + text)
        if self._state is _State.OPENED:
            text = text.lstrip("\n")
            if text:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER:
            text = self._answered(self._pending + text)
        return text

    def finish(self, asides: Asides) -> str:
        text, self._pending = self._pending, ""
        if self._state is _State.INSIDE:
            self._emit_thought(text, asides)
            return ""
        if self._state is _State.ANSWER and text.strip() == self._answer[1]:
            return ""
        return text

    def _before(self, text: str, asides: Asides) -> str:
        """Return the text after the block's first mark; all text if there is no mark; empty while undecided."""
        words = text.lstrip()
        self._pending = ""
        for mark in self._openings:
            if words.startswith(mark):
                self._state, self.inside = _State.INSIDE, True
                self._spelled = not asides.counts(mark, words, len(mark))
                return words[len(mark) :]
        for mark in self._closings:
            if words.startswith(mark):
                self._state = _State.CLOSED
                return words[len(mark) :]
        undecided = any(mark.startswith(words) for mark in (*self._openings, *self._closings))
        if undecided and len(text) <= _MOST_LEADING_SPACE:
            self._pending = text
            return ""
        self._state = _State.CONTENT
        return text

    def _after(self, text: str) -> str:
        """Remove the newlines after the thought, and the mark that opens the answer. Return the text that follows."""
        text = text.lstrip("\n")
        self._pending = ""
        if self._answer:
            opening = self._answer[0]
            if text.startswith(opening):
                self._state = _State.OPENED
                return text[len(opening) :]
            if opening.startswith(text):
                self._pending = text
                return ""
        if text:
            self._state = _State.CONTENT
        return text

    def _answered(self, text: str) -> str:
        """Return the text up to the mark that closes the answer, or up to characters that may begin this mark."""
        mark = self._answer[1]
        end = text.rfind(mark)
        if end < 0 or text[end + len(mark) :].strip():
            end = len(text) - overlap(text, mark)
        end -= text.endswith("\n", 0, end)
        if len(text) - end > _MOST_LEADING_SPACE:
            end = len(text)
        self._pending = text[end:]
        return text[:end]

    def _inside(self, text: str, asides: Asides) -> str:
        """Emit the thought. Return the text after its closing mark, or from a call's mark on; empty without a mark."""
        found = ((self._find(mark, text, asides), mark) for mark in self._closings)
        end, close = min(((place, mark) for place, mark in found if place >= 0), default=(-1, ""))
        if self._ends and (call := self._call_in(text if end < 0 else text[:end], asides)) is not None:
            self._emit_thought(text[:call].rstrip("\n"), asides)
            self._state, self.inside, self._pending = _State.CONTENT, False, ""
            return text[call:]
        if end >= 0:
            self._emit_thought(text[:end].rstrip("\n"), asides)
            self._state, self.inside, self._pending = _State.CLOSED, False, ""
            return text[end + len(close) :]
        safe = len(text) - max(overlap(text, mark) for mark in (*self._closings, *self._ends))
        if safe:
            self._at_line_start = text[safe - 1] == "\n"
        self._pending = text[safe:]
        self._emit_thought(text[:safe], asides)
        return ""

    def _find(self, mark: str, text: str, asides: Asides) -> int:
        return text.find(mark) if self._spelled else asides.find(mark, text)

    def _call_in(self, text: str, asides: Asides) -> int | None:
        """Return the index of the first mark of a call that begins a line; None if no mark does."""
        places = []
        for mark in self._ends:
            place = self._find(mark, text, asides)
            while place >= 0 and not (text[place - 1] == "\n" if place else self._at_line_start):
                place = text.find(mark, place + 1)
            if place >= 0:
                places.append(place)
        return min(places, default=None)

    def _emit_thought(self, text: str, asides: Asides) -> None:
        """Emit part of the thought, holding back newlines until more of the thought follows."""
        if not self._emitted:
            text = text.lstrip("\n")
        words = text.rstrip("\n")
        if words:
            asides.think("\n" * self._newlines + words)
            self._emitted, self._newlines = True, 0
        self._newlines += len(text) - len(words)
