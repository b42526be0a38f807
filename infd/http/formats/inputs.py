"""Decode the input of a custom tool's call while it is generated: the model writes the arguments `{"input": "..."}`."""

from __future__ import annotations

import json
import re
from typing import Final

from infd.text.json_object import JsonObject

_OPENING: Final = re.compile(r'\{"input"[ \t\n\r]*+:[ \t\n\r]*+"')
_TEXT: Final = re.compile(r'(?:[^"\\]|\\.)*+')


class InputText:
    """The input of one call, whose arguments are fed in parts of any size.

    An input that is not the first argument, or no string, comes at the end, in one part; without one, it is empty.
    """

    __slots__ = ("_begun", "_ended", "_held", "_object")

    def __init__(self) -> None:
        self._object = JsonObject()
        self._held = ""  # JSON not decoded yet
        self._begun = self._ended = False

    def feed(self, arguments: str) -> str:
        """Append a part of the arguments; return the part of the input that it completes."""
        return self._read(self._object.feed(arguments))

    def finish(self) -> str:
        """End the arguments; return the rest of the input."""
        rest = self._read(self._object.finish())
        if self._begun:
            return rest
        given = json.loads(self._held).get("input", "")
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, separators=(",", ":"))

    def _read(self, part: str) -> str:
        if self._ended:
            return ""
        self._held += part
        if not self._begun:
            if (opening := _OPENING.match(self._held)) is None:
                return ""
            self._begun, self._held = True, self._held[opening.end() :]
        # JsonObject returns whole escapes, so no part ends within one.
        match = _TEXT.match(self._held)
        assert match is not None
        self._ended, self._held = match.end() < len(self._held), ""
        text: str = json.loads(f'"{match.group()}"')
        return text


def input_of(arguments: str) -> str:
    """Return the input of a call with complete arguments."""
    text = InputText()
    return text.feed(arguments) + text.finish()
