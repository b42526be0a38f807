"""Channels: gpt-oss. An answer is a sequence of messages, each with a header and a body.

<|start|>assistant<|channel|>analysis<|message|> thought <|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|> arguments <|call|>
<|start|>assistant<|channel|>final<|message|> content <|return|>

The prompt ends with the beginning of the first header. A message whose header names a recipient other than assistant,
before or after the channel, is a call. Other messages of the channel analysis are thoughts. All remaining messages are
content, joined by newlines. A message also ends where the next message begins or the answer ends, because models omit
marks, and because the ids that end an answer add no text. Text without a header is content.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from infd.constraint import CallSyntax, Header, Thought
from infd.text.answers.frame import Frame, FramedParser
from infd.text.harmony_marks import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FINAL_HEADER,
    MARKS,
    MESSAGE,
    NAMESPACE,
    RETURN,
    START,
    THOUGHT_HEADER,
    THOUGHTS,
)
from infd.text.tools.scan import ObjectScan

if TYPE_CHECKING:
    from infd.text.chat import ChatTemplate
    from infd.text.markup import Asides
    from infd.text.tools.offered import Offered

_ENDS: Final = (END, RETURN, CALL)
_HEADERS: Final = (START, CHANNEL)
_FRAME: Final = Frame(closes=_ENDS, begin=START, within=(CHANNEL, MESSAGE), ends=(*_ENDS, *_HEADERS))
_HEADER_END: Final = re.compile("|".join(map(re.escape, (MESSAGE, START, *_ENDS))))
_HEADER_BEGINS: Final = (CHANNEL, MESSAGE, CONSTRAIN, "to=")
_HEADER_CHARACTERS: Final = 1024  # a longer header without <|message|> is content
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")


class Harmony:
    """See AnswerSyntax."""

    marks = MARKS
    grammar: CallSyntax | None = CallSyntax(
        call=f"{CHANNEL}commentary to={NAMESPACE}$name {CONSTRAIN}json{MESSAGE}$arguments",
        between=None,  # no call can follow, because <|call|> ends the answer
        trigger=CHANNEL,
        marks=MARKS,
    )

    def matches(self, template: ChatTemplate) -> bool:
        return template.mentions(THOUGHT_HEADER) and template.mentions(START)

    def thought(self, prompt: str, continued: str) -> Thought | None:
        header, opened, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        inside = bool(opened) and _channel(header) == THOUGHTS
        if continued.strip() or (opened and not inside):
            return None
        return Thought(THOUGHT_HEADER, END, inside=inside, newlines=0, marks=MARKS, after=f"{START}assistant")

    def header(self, prompt: str, continued: str) -> Header | None:
        header, opened, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        if continued.strip() or (opened and _channel(header) != THOUGHTS):
            return None
        return Header(FINAL_HEADER, MARKS)

    def ends(self, *, calls: bool) -> tuple[str, ...]:
        header = f"{END}{START}assistant{CHANNEL}"
        return f"{header}final{MESSAGE}", *([f"{header}commentary"] if calls else [])

    def start(self, prompt: str, continued: str, offered: Offered | None) -> HarmonyParser:
        header, opened, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        if START not in prompt:
            header, opened = "", ""
        parser = HarmonyParser(header, calls=offered is not None)
        if opened or continued.strip():
            parser.begin(thought=bool(opened) and _channel(header) == THOUGHTS and not continued.strip())
        return parser


class HarmonyParser(FramedParser):
    """Parses one answer."""

    def __init__(self, header: str, *, calls: bool) -> None:
        """Start within a header.

        header  the header's beginning in the prompt
        calls   whether tools are offered; if not, a call is content, its header included
        """
        super().__init__(_FRAME)
        self._calls = calls
        self._header = header
        self._calling = False  # whether the current body is the arguments of a call
        self._object = ObjectScan("<|")

    def _is_header(self, rest: str) -> bool:
        return (self._consumed + rest).lstrip().startswith((*_HEADERS, MESSAGE))

    def _in_header(self, asides: Asides) -> bool:
        pending = self._pending
        words = pending.lstrip()
        if self._first and not self._consumed and CHANNEL not in self._header:
            if words.startswith(START):
                self._pending, self._state = words, self._between
                self._header = ""
                return True
            begins = (*_HEADER_BEGINS, START)
            if not words.startswith(_HEADER_BEGINS) and not any(each.startswith(words) for each in begins):
                self.begin(thought=False)
                return True
        found = self._find(_HEADER_END, asides)
        if found is None and len(pending) <= _HEADER_CHARACTERS:
            return False
        header, self._header = self._header, ""
        if found is None or found[0] != MESSAGE:
            self.begin(thought=False)
            end = len(pending) if found is None else found.start()
            self._emit(self._consumed + pending[:end], asides)
            self._pending = pending[end:]
            return True
        text = header + pending[: found.start()]
        self._pending = pending[found.end() :]
        recipient = _RECIPIENT.search(text)
        name = "" if recipient is None else recipient[1].removeprefix(NAMESPACE)
        if not name or name == "assistant":
            self.begin(thought=_channel(text) == THOUGHTS)
        elif self._calls:
            asides.call(name)
            self.begin(thought=False)
            self._calling = True
            self._object = ObjectScan("<|")
            self._state = self._in_object
        else:
            self.begin(thought=False)
            self._emit(self._consumed + pending[: found.end()], asides)
        return True

    def _in_object(self, asides: Asides) -> bool:
        """Consume arguments that are an object. A mark within a string of the object is part of the string."""
        if self._object.depth == 0:
            words = self._pending.lstrip()
            if not words:
                return False
            if not words.startswith("{"):
                self._state = self._in_body
                return True
        read = self._object.scan(self._pending, until=0)
        self._emit(self._pending[:read], asides)
        self._pending = self._pending[read:]
        if self._object.depth > 0 and not self._object.ended:
            return False
        self._state = self._in_body
        return True

    def _emit(self, text: str, asides: Asides) -> None:
        if self._calling:
            asides.append_arguments(text)
        else:
            super()._emit(text, asides)

    def _end_body(self, asides: Asides) -> None:
        self._calling = False
        super()._end_body(asides)


def _channel(header: str) -> str:
    found = _CHANNEL.search(header)
    return "" if found is None else found[1]
