"""Messages: an answer is a sequence of messages, each with a header, a body, and a mark that ends it.

A family is an instance of `Messages`, an entry of FAMILIES. The prompt ends with the mark before the first header. The
header, and the mark after it, determine whether the body is a thought, a call or content.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from infd.constraint import CallSyntax, Header, Thought
from infd.text.answers.frame import Frame, FramedParser
from infd.text.tools.families_json import INKLING
from infd.text.tools.families_values import MUSE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infd.text.chat import ChatTemplate
    from infd.text.markup import Asides
    from infd.text.tools.marked import MarkedCalls
    from infd.text.tools.offered import Offered

_HEADER_CHARACTERS: Final = 256  # maximum characters of a header, which each token scans again


class Messages(Struct, frozen=True, kw_only=True):
    """One family; see AnswerSyntax.

    begin        text before a header
    label        pattern of a header's text
    label_begun  pattern of the beginnings of this text
    bodies       marks between header and body
    thoughts     pattern of a thought's header, with the mark after it
    called       pattern of a call's header, with the mark after it
    closes       marks after a body; the first is that of a thought
    headers      header of a thought and header of an answer without calls, each with the mark after it
    calling      beginning of the headers of calls; may be empty
    calls        starts the parser of a call's body
    grammar      see ToolSyntax
    tokens       marks that are single tokens
    mentioned    texts that identify the family: its templates contain all of them
    """

    begin: str
    label: str
    label_begun: str
    bodies: tuple[str, ...]
    thoughts: str
    called: str
    closes: tuple[str, ...]
    headers: tuple[str, str]
    calls: Callable[[Offered], MarkedCalls]
    grammar: CallSyntax
    tokens: tuple[str, ...]
    mentioned: tuple[str, ...]
    calling: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.tokens

    @property
    def frame(self) -> Frame:
        return Frame(self.closes, self.begin, within=self.bodies, ends=(*self.closes, self.begin))

    def matches(self, template: ChatTemplate) -> bool:
        return all(map(template.mentions, self.mentioned))

    def thought(self, prompt: str, continued: str) -> Thought | None:
        kind = self._opened(prompt)
        if continued.strip() or kind not in ("", "thought"):
            return None
        inside = kind == "thought"
        return Thought(self.headers[0], self.closes[0], inside, newlines=0, marks=self.tokens, after=self.begin)

    def header(self, prompt: str, continued: str) -> Header | None:
        if continued.strip() or self._opened(prompt) not in ("", "thought"):
            return None
        return Header(self.headers[1], self.tokens)

    def ends(self, *, calls: bool) -> tuple[str, ...]:
        next_message = self.closes[0] + self.begin
        return next_message + self.headers[1], *([next_message + self.calling] if calls else [])

    def start(self, prompt: str, continued: str, offered: Offered | None) -> MessagesParser:
        kind = "content" if continued.strip() else self._opened(prompt)
        return MessagesParser(self, offered, kind)

    def _opened(self, prompt: str) -> str:
        """Return the kind of the body in which the prompt ends; empty if it ends before a header."""
        _, begun, header = prompt.rpartition(self.begin)
        found = _patterns(self).header.match(header) if begun else None
        return "" if found is None else _kind(self, found[0])


class MessagesParser(FramedParser):
    """Parses one answer."""

    def __init__(self, family: Messages, offered: Offered | None, kind: str) -> None:
        """Start within a body, or before a header.

        kind     kind of the body, see `_kind`; empty: start before a header
        offered  tools that the model may call; None: a call is content, its header included
        """
        super().__init__(family.frame)
        self._family = family
        self._patterns = _patterns(family)
        self._offered = offered
        self._call: MarkedCalls | None = None  # parser of the body, if the message is a call
        if kind:
            self.begin(thought=kind == "thought")

    def _is_header(self, rest: str) -> bool:
        calling = self._family.calling.strip()
        return bool(self._consumed) or "<|" in rest or (bool(calling) and rest.lstrip().startswith(calling))

    def _in_header(self, asides: Asides) -> bool:
        pending, family = self._pending, self._family
        found = self._patterns.header.match(pending)
        if found is not None and not self._counts(found["mark"], pending, found.end(), asides):
            found = None
        elif found is None:
            if pending.lstrip().startswith((family.begin, *family.closes)) and not self._consumed:
                self._state = self._between
                return True
            possible = self._patterns.header_begun.match(pending) or self._may_begin(pending)
            if possible and len(pending) <= _HEADER_CHARACTERS:
                return False
        self._pending = pending if found is None else pending[found.end() :]
        kind = "content" if found is None else _kind(family, found[0])
        written = self._consumed + ("" if found is None else found[0])
        self._consumed = ""
        self.begin(thought=kind == "thought")
        if kind == "call" and self._offered is not None:
            self._call = family.calls(self._offered)
            self._state = self._in_call
        elif found is None or kind == "call":
            self._emit(written, asides)
        return True

    def _may_begin(self, pending: str) -> bool:
        """Return whether an answer may begin with a mark instead of a header."""
        words = pending.lstrip()
        return not self._consumed and any(mark.startswith(words) for mark in (self._family.begin, *self._family.closes))

    def _in_call(self, asides: Asides) -> bool:
        """Consume the body of a call. A mark within a value is part of the value."""
        assert self._call is not None
        pending = self._pending
        found = self._find(self._ends, asides)
        end = self._safe(pending) if found is None else found.start()
        self._emit(pending[:end], asides)
        self._pending = pending[end:]
        if found is None:
            return False
        if self._call.within_value:
            self._emit(found[0], asides)
            self._pending = pending[found.end() :]
            return True
        self._end_body(asides)
        self._state = self._between
        return True

    def _emit(self, text: str, asides: Asides) -> None:
        super()._emit(text if self._call is None else self._call.feed(text, asides), asides)

    def _end_body(self, asides: Asides) -> None:
        if self._call is not None:
            call, self._call = self._call, None
            self._emit(call.finish(asides), asides)
        super()._end_body(asides)


class _Patterns(NamedTuple):
    """Patterns of one family.

    header        a header and the mark after it
    header_begun  a text that may become a header
    """

    header: re.Pattern[str]
    header_begun: re.Pattern[str]


@cache
def _patterns(family: Messages) -> _Patterns:
    marks = "|".join(map(re.escape, family.bodies))
    begun = "|".join(re.escape(mark[:end]) for mark in family.bodies for end in range(len(mark)))
    return _Patterns(
        re.compile(f"(?:{family.label})(?P<mark>{marks})"),
        re.compile(rf"(?:{family.label_begun})(?:{begun})?\Z"),
    )


def _kind(family: Messages, header: str) -> str:
    """Return the kind of a message: "thought", "call" or "content"."""
    if re.fullmatch(family.thoughts, header):
        return "thought"
    return "call" if re.fullmatch(family.called, header) else "content"


_INKLING_CALL: Final = "<|content_invoke_tool_json|>"
_INKLING_TOKENS: Final = (
    *("<|message_model|>", "<|content_thinking|>", "<|content_text|>", _INKLING_CALL),
    *("<|end_message|>", "<|content_model_end_sampling|>"),
)
_MUSE_TOKENS: Final = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")

FAMILIES: Final[Mapping[str, Messages]] = {
    "muse_glimmer": Messages(
        begin="<|start|>assistant",
        label=r"[ \t]*+(?:to=[\w.-]++)?",
        label_begun=r"[ \t]*+(?:to=[\w.-]*+|to|t|)",
        bodies=("<|message|>",),
        thoughts=r"[ \t]*to=self<\|message\|>",
        called=r"[ \t]*to=(?!user<)[^<]+<\|message\|>",
        closes=("<|eom|>", "<|eot|>"),
        headers=(" to=self<|message|>", " to=user<|message|>"),
        calling=" to=",
        calls=MUSE.start,
        tokens=_MUSE_TOKENS,
        mentioned=("<atem:function_calls>", "to=self<|message|>"),
        grammar=CallSyntax(
            call=(
                ' to=$name<|message|><atem:function_calls>\n<atem:invoke name="$name">\n'
                "$arguments</atem:invoke>\n</atem:function_calls>"
            ),
            between="<|eom|><|start|>assistant",
            parameter='<atem:parameter name="$key">$value</atem:parameter>\n',
            excluded=("</atem:invoke>",),
            trigger=" to=",
            marks=_MUSE_TOKENS,
        ),
    ),
    "inkling": Messages(
        begin="<|message_model|>",
        label=r"[\w.-]*+",
        label_begun=r"[\w.-]*+",
        bodies=("<|content_thinking|>", "<|content_text|>", _INKLING_CALL),
        thoughts=r"[^<]*<\|content_thinking\|>",
        called=r"[^<]*<\|content_invoke_tool_json\|>",
        closes=("<|end_message|>", "<|content_model_end_sampling|>"),
        headers=("<|content_thinking|>", "<|content_text|>"),
        calls=INKLING.start,
        tokens=_INKLING_TOKENS,
        mentioned=(_INKLING_CALL,),
        grammar=CallSyntax(
            call=f'$name{_INKLING_CALL}{{"name":"$name","args":$arguments}}<|end_message|>',
            between="<|message_model|>",
            trigger="",
            marks=_INKLING_TOKENS,
        ),
    ),
}
ALIASES: Final[Mapping[str, str]] = {"muse": "muse_glimmer"}
