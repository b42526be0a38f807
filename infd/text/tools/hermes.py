"""<tool_call>, an object with a name and arguments, </tool_call>: Hermes, Qwen and infd's own model.

An answer holds any number of blocks, with text before, between and after them. White space around a block belongs to
the block: an answer that consists of calls has no content. An object that begins with name and arguments, in this
order, as every template requires, is emitted while the model writes the object. Other objects (arguments before the
name, no arguments, a string of JSON) are emitted once their block is closed.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct

from infd.request import CallSyntax
from infd.text.markup import overlap
from infd.text.tools.scan import ObjectScan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.text.markup import Asides

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_HEAD: Final = re.compile(
    r'\s*+\{\s*+"name"\s*+:\s*+(?P<name>"(?:[^"\\\x00-\x1f]|\\.)++")\s*+,\s*+"arguments"\s*+:\s*+(?=\{)'
)
_HEAD_CHARACTERS: Final = 1024  # longer beginnings are not scanned again with every token
_COULD_BE_AN_OBJECT: Final = re.compile(r'\s*+(?:\{\s*+"?|\Z)')


class _Block(Struct):
    """The object in a closed block."""

    name: str
    arguments: Raw = Raw(b"{}")


class Hermes:
    """See ToolSyntax."""

    marks = (OPEN, CLOSE)
    grammar = CallSyntax(
        call=f'{OPEN}\n{{"name": "$name", "arguments": $arguments}}\n{CLOSE}', trigger=OPEN, marks=marks
    )

    def start(self, names: Sequence[str]) -> HermesParser:
        return HermesParser()


class HermesParser:
    """Parses one answer. Each state consumes pending text and returns whether the next state can continue."""

    def __init__(self) -> None:
        self._pending = ""
        self._state: Callable[[Asides], bool] = self._between
        self._content: list[str] = []
        self._held_space: list[str] = []  # white space, emitted only if more content follows
        self._has_content = False  # whether content was emitted
        self._after_block = False  # whether only white space came since the last block
        self._block: list[str] = []  # parts of a block that is emitted when it is closed
        self._object = ObjectScan(CLOSE)

    def feed(self, text: str, asides: Asides) -> str:
        self._pending += text
        while self._state(asides):
            pass
        return self._take_content()

    def finish(self, asides: Asides) -> str:
        rest, self._pending = self._pending, ""
        if self._state == self._between:
            self._emit_content(rest)
        elif self._state in (self._opened, self._collect):
            self._block.append(rest)
            self._parse_block(asides, "")
        elif self._state == self._arguments:
            asides.append_arguments(rest)
        if not self._after_block:
            self._content += self._held_space
        self._held_space.clear()
        self._state = self._between
        return self._take_content()

    def _take_content(self) -> str:
        text = "".join(self._content)
        self._content.clear()
        return text

    def _between(self, _: Asides) -> bool:
        """Consume content, up to a block."""
        pending = self._pending
        start = pending.find(OPEN)
        if start >= 0:
            self._emit_content(pending[:start])
            self._pending = pending[start + len(OPEN) :]
            self._state = self._opened
            return True
        safe = len(pending) - overlap(pending, OPEN)
        self._emit_content(pending[:safe])
        self._pending = pending[safe:]
        return False

    def _opened(self, asides: Asides) -> bool:
        """Consume the beginning of a block, until the block is known to be a call or not."""
        pending = self._pending
        head = _HEAD.match(pending)
        if head is not None and (name := _text(head["name"])):
            self._emit_call(name, asides)
            self._pending = pending[head.end() :]
            self._object = ObjectScan(CLOSE, depth=1)
            self._state = self._arguments
            return True
        possible = _COULD_BE_AN_OBJECT.match(pending)
        if possible is None or (possible.end() < len(pending) and not possible[0].endswith('"')):
            self._emit_content(OPEN)
            self._state = self._between
            return True
        if CLOSE in pending or len(pending) > _HEAD_CHARACTERS:
            self._state = self._collect
            return True
        return False

    def _collect(self, asides: Asides) -> bool:
        """Consume a block that is parsed once it is complete."""
        pending = self._pending
        end = pending.find(CLOSE)
        if end >= 0:
            self._block.append(pending[:end])
            self._pending = pending[end + len(CLOSE) :]
            self._parse_block(asides, CLOSE)
            return True
        safe = len(pending) - overlap(pending, CLOSE)
        self._block.append(pending[:safe])
        self._pending = pending[safe:]
        return False

    def _arguments(self, asides: Asides) -> bool:
        """Consume the arguments of a call and emit them."""
        read = self._object.scan(self._pending, until=1)
        asides.append_arguments(self._pending[:read])
        self._pending = self._pending[read:]
        if self._object.depth > 1 and not self._object.ended:
            return False
        self._state = self._members
        return True

    def _members(self, _: Asides) -> bool:
        """Consume the rest of the object; further members are ignored."""
        if not self._object.ended and self._object.depth > 0:
            self._pending = self._pending[self._object.scan(self._pending, until=0) :]
            if self._object.depth > 0 and not self._object.ended:
                return False
        self._state = self._closing
        return True

    def _closing(self, _: Asides) -> bool:
        """Consume the closing mark, which the model may omit."""
        pending = self._pending.lstrip()
        if not pending.startswith(CLOSE) and CLOSE.startswith(pending):
            self._pending = pending
            return False
        self._pending = pending.removeprefix(CLOSE)
        self._state = self._between
        return True

    def _emit_call(self, name: str, asides: Asides) -> None:
        """Emit the beginning of a call."""
        asides.call(name)
        self._after_block = True
        if not self._has_content:
            self._held_space.clear()

    def _parse_block(self, asides: Asides, mark: str) -> None:
        """Parse a complete block: a call, or content."""
        text = "".join(self._block)
        self._block.clear()
        self._state = self._between
        call = _read(text)
        if call is None:
            self._emit_content(OPEN + text + mark)
            return
        name, arguments = call
        self._emit_call(name, asides)
        asides.append_arguments(arguments)

    def _emit_content(self, text: str) -> None:
        """Emit content. White space before a block is emitted only if more content follows; after a block, never."""
        if self._after_block:
            text = text.lstrip()
            if not text:
                return
            self._after_block = False
        words = text.rstrip()
        if words:
            self._content += self._held_space
            self._content.append(words)
            self._has_content = True
            self._held_space.clear()
        if len(words) < len(text):
            self._held_space.append(text[len(words) :])


def _read(block: str) -> tuple[str, str] | None:
    """Return the name and arguments of a complete block's call, None if the block is not a call."""
    try:
        call = msgspec.json.decode(block, type=_Block)
        arguments = bytes(call.arguments).decode()
        value: Any = msgspec.json.decode(call.arguments)
        if value is None:
            arguments, value = "{}", {}
        if isinstance(value, str):  # the model wrote the object as a string, the form that clients expect
            arguments, value = value, msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return (call.name, arguments) if call.name and isinstance(value, dict) else None


def _text(literal: str) -> str:
    """Return the value of a JSON string; empty if it is malformed."""
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""
