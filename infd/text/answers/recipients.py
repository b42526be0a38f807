"""Answers in parts, each after a line with its recipient: Functionary 3.2.

The recipient "all" is the user; every other recipient is a tool, whose arguments follow as a JSON object:

    >>>all
    Let me see.>>>weather
    {"city": "Paris"}

The prompt ends with the mark of the first part. A recipient's text is content if it is no JSON
object, for example Python code.

Source: the chat template of meetkai/functionary-medium-v3.2.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from infd.constraint import CallSyntax, Header
from infd.text.tools.marked import MarkedCalls
from infd.text.tools.scan import ObjectScan

if TYPE_CHECKING:
    from infd.constraint import Thought
    from infd.text.chat import ChatTemplate
    from infd.text.markup import Asides
    from infd.text.tools.offered import Offered

_MARK: Final = ">>>"
_USER: Final = "all\n"
_CALL: Final = re.compile(r"(?P<name>[\w.:-]{1,64}+)\n\s{0,64}+(?=\{)")
_COULD_BE_A_CALL: Final = re.compile(r"[\w.:-]{0,64}+(?:\n\s{0,64}+)?\Z")


class Recipients:
    """The AnswerSyntax of Functionary 3.2."""

    marks: tuple[str, ...] = ()  # ordinary text for the tokenizer
    grammar: CallSyntax | None = CallSyntax(
        call="$name\n$arguments", between=_MARK, trigger="", marks=(), otherwise=r"all\n(?s:.*)"
    )

    def matches(self, template: ChatTemplate) -> bool:
        return template.mentions(f"{_MARK}${{recipient}}")

    def thought(self, prompt: str, continued: str) -> Thought | None:
        return None

    def header(self, prompt: str, continued: str) -> Header | None:
        return None if continued.strip() or not prompt.endswith(_MARK) else Header(_USER, (_MARK,))

    def ends(self, *, calls: bool) -> tuple[str, ...]:
        return ()

    def start(self, prompt: str, continued: str, offered: Offered | None) -> RecipientsParser:
        return RecipientsParser(offered, begun=prompt.endswith(_MARK) and not continued.strip())


class RecipientsParser(MarkedCalls):
    """Parses one answer."""

    inside = False  # no answer contains a thought

    def __init__(self, offered: Offered | None, *, begun: bool) -> None:
        """begun: whether the prompt ends with the mark of the first part."""
        super().__init__((_MARK,))
        self._offered = offered
        self._object = ObjectScan("")
        if begun:
            self._state = self._opened

    @property
    def within_value(self) -> bool:
        return self._state == self._arguments and self._object.in_string

    def _opened(self, asides: Asides) -> bool:
        """Consume the line of a recipient."""
        pending = self._pending
        if pending.startswith(_USER):
            self._pending, self._opening, self._state = pending[len(_USER) :], "", self._between
            return True
        if self._offered is not None and (head := _CALL.match(pending)) is not None:
            self._begin_call(head["name"], asides)
            self._pending = pending[head.end() :]
            self._object = ObjectScan("")
            self._state = self._arguments
            return True
        if _COULD_BE_A_CALL.match(pending):
            return False
        self._refuse()
        return True

    def _arguments(self, asides: Asides) -> bool:
        read = self._object.scan(self._pending, until=0)
        asides.append_arguments(self._pending[:read])
        self._pending = self._pending[read:]
        if self._object.depth > 0 or not read:
            return False
        self._state = self._between
        return True

    def _fresh(self) -> RecipientsParser:
        return RecipientsParser(self._offered, begun=False)

    def _cut(self, rest: str, asides: Asides) -> None:
        if self._state == self._arguments:
            asides.append_arguments(rest)
        else:
            self._refuse(rest)
