"""Calls with arguments in braces, and with strings between marks: call:f{a:<|"|>text<|"|>,b:[1,true],c:{d:2}}.

A family is a `Braces`, a row of a table. The parser translates arguments into JSON while the model writes them. Keys
are words or strings. JSON's strings are read too. A word that is neither a number nor a constant is a string.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.constraint import CallSyntax
from infd.text.markup import overlap
from infd.text.tools.marked import MarkedCalls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.text.markup import Asides
    from infd.text.tools.offered import Offered

_HEAD_CHARACTERS: Final = 512
_WORD_CHARACTERS: Final = 256  # longer words are strings, emitted in parts, so that no token scans all of them again
_HEAD: Final = re.compile(r"\s*+call:\s*+(?P<name>[^\s{}:,]++)\s*+\{")
_COULD_BE_A_HEAD: Final = re.compile(r"\s*+(?:c?+|ca|cal|call|call:\s*+(?:[^\s{}:,]++\s*+)?+)\Z")
_JSON_STRING: Final = re.compile(r'[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_CHARACTERS: Final = 6
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_CLOSING: Final = {"{": "}", "[": "]"}


class Braces(Struct, frozen=True, kw_only=True):
    """One family; see ToolSyntax.

    close   mark after a call; the model may omit it
    quote   mark on both sides of a string
    closes  further marks after calls
    """

    open: str
    close: str
    quote: str
    closes: tuple[str, ...] = ()

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.open, self.close, self.quote, *self.closes)

    @property
    def grammar(self) -> CallSyntax | None:
        return CallSyntax(
            call=f"{self.open}call:$name{{$arguments}}{self.close}",
            between="",
            parameter=f"$key:{self.quote}$value{self.quote}",
            document="$key:$value",
            separator=",",
            trigger=self.open,
            marks=(self.open, self.close, self.quote),
        )

    def start(self, offered: Offered) -> BracesParser:
        return BracesParser(self)


class BracesParser(MarkedCalls):
    """Parses one answer."""

    def __init__(self, family: Braces) -> None:
        super().__init__(family.opens)
        self._family = family
        self._object = BracedObject(family.quote, family.close)

    def _fresh(self) -> BracesParser:
        return BracesParser(self._family)

    def _cut(self, rest: str, asides: Asides) -> None:
        if self._state == self._opened:
            self._refuse(rest)
        elif self._state == self._arguments:
            asides.append_arguments(self._object.cut(rest))

    def _opened(self, asides: Asides) -> bool:
        """Consume a name, up to the arguments."""
        head = _HEAD.match(self._pending)
        if head is not None:
            self._begin_call(head["name"], asides)
            asides.append_arguments("{")
            self._pending = self._pending[head.end() :]
            self._object = BracedObject(self._family.quote, self._family.close)
            self._state = self._arguments
            return True
        if _COULD_BE_A_HEAD.match(self._pending) and len(self._pending) <= _HEAD_CHARACTERS:
            return False
        self._refuse()
        return True

    def _arguments(self, asides: Asides) -> bool:
        read, text = self._object.feed(self._pending)
        asides.append_arguments(text)
        self._pending = self._pending[read:]
        if self._object.ended:
            self._state = self._closing
        return self._object.ended

    def _closing(self, _: Asides) -> bool:
        """Consume marks after a call."""
        pending = self._pending = self._pending.lstrip()
        marks = (self._family.close, *self._family.closes)
        for mark in marks:
            if pending.startswith(mark):
                self._pending = pending[len(mark) :]
                return True
        if any(mark.startswith(pending) for mark in marks):
            return False
        self._state = self._between
        return True


class BracedObject:
    """Translates an object into JSON, from the text after its opening brace, in parts of any size.

    ended  whether the object is complete, or the mark after the call has ended it
    """

    __slots__ = ("_brackets", "_close", "_comma", "_key", "_quote", "_string", "_word", "ended")

    def __init__(self, quote: str, close: str) -> None:
        self.ended = False
        self._quote, self._close = quote, close
        self._word = re.compile(rf'(?:(?!{re.escape(close)})[^,{{}}\[\]":])++')
        self._brackets = ["{"]
        self._string = ""  # the mark that ends the open string; a space: the string is a long word; empty: none is open
        self._comma = False  # whether a comma is held back, because a closing bracket may follow
        self._key = True  # whether the next value is a key

    def feed(self, text: str) -> tuple[int, str]:
        """Return the number of characters translated, and their JSON. Pass the remaining text again with more text."""
        at, parts = 0, list[str]()
        while at < len(text) and not self.ended:
            used = self._in_string(text, at, parts) if self._string else self._token(text, at, parts)
            if not used:
                break
            at += used
        return at, "".join(parts)

    def cut(self, rest: str) -> str:
        """Return the end of an object that is cut: the text of a value that `feed` has not translated."""
        if self._string:
            return _encoded(rest[: len(rest) - overlap(rest, self._string)])
        held = max(overlap(rest, mark) for mark in (self._quote, self._close))
        word = rest[: len(rest) - held].strip()
        return (", " if self._comma else "") + word if word and not self._key else ""

    def _token(self, text: str, at: int, parts: list[str]) -> int:
        """Translate one token outside of strings. Returns the token's length; 0 for an incomplete token or the end."""
        for mark in (self._quote, self._close):
            if text.startswith(mark, at):
                if mark == self._quote:
                    self._begin_string(mark, parts)
                    return len(mark)
                parts += [_CLOSING[bracket] for bracket in reversed(self._brackets)]
                self.ended = True
                return 0
            if mark.startswith(text[at:]):
                return 0
        character = text[at]
        match character:
            case " " | "\t" | "\r" | "\n":
                return 1
            case '"':
                self._begin_string(character, parts)
            case "{" | "[":
                self._separate(parts)
                self._brackets.append(character)
                parts.append(character)
                self._key = character == "{"
            case "}" | "]":
                self._comma = False
                parts.append(_CLOSING[self._brackets.pop()])
                self._key = False
                self.ended = not self._brackets
            case ",":
                self._comma = True
                self._key = self._brackets[-1] == "{"
            case ":":
                parts.append(": ")
                self._key = False
            case _:
                return self._bare(text, at, parts)
        return 1

    def _bare(self, text: str, at: int, parts: list[str]) -> int:
        """Translate a key or a value without marks."""
        found = self._word.match(text, at)
        assert found is not None
        if len(found[0]) >= _WORD_CHARACTERS:
            self._begin_string(" ", parts)
            return self._in_string(text, at, parts)
        if found.end() + len(self._close) > len(text) and (
            found.end() == len(text) or self._close.startswith(text[found.end() :])
        ):
            return 0
        self._separate(parts)
        parts.append(_literal(found[0].strip(), key=self._key))
        self._key = False
        return len(found[0])

    def _begin_string(self, mark: str, parts: list[str]) -> None:
        self._separate(parts)
        parts.append('"')
        self._string = mark

    def _end_string(self, parts: list[str]) -> None:
        parts.append('"')
        self._string = ""
        self._key = False

    def _in_string(self, text: str, at: int, parts: list[str]) -> int:
        """Translate part of a string. Returns the number of characters translated."""
        if self._string == '"':
            return self._in_json_string(text, at, parts)
        if self._string == " ":
            found = self._word.match(text, at)
            if found is None:
                self._end_string(parts)
                return self._token(text, at, parts)
            end = found.end() if found.end() < len(text) else len(text) - overlap(text, self._close)
            parts.append(_encoded(text[at:end]))
            return end - at
        place = text.find(self._string, at)
        end = place if place >= 0 else max(at, len(text) - overlap(text, self._string))
        parts.append(_encoded(text[at:end]))
        if place < 0:
            return end - at
        used = end + len(self._string) - at
        self._end_string(parts)
        return used

    def _in_json_string(self, text: str, at: int, parts: list[str]) -> int:
        if text[at] == '"':
            self._end_string(parts)
            return 1
        found = _JSON_STRING.match(text, at)
        if found is not None:
            parts.append(found[0])
            return len(found[0])
        if text[at] == "\\" and len(text) - at < _ESCAPE_CHARACTERS:
            return 0
        parts.append(_encoded(text[at]))
        return 1

    def _separate(self, parts: list[str]) -> None:
        """Emit the comma before a value."""
        if self._comma:
            parts.append(", ")
            self._comma = False


def _literal(word: str, *, key: bool) -> str:
    """Return the JSON of a word: a number, a constant, or a string."""
    literal = _WORDS.get(word, word)
    try:
        value = json.loads(literal, parse_constant=_no_constant)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return json.dumps(word, ensure_ascii=False) if key or isinstance(value, str) else literal


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _encoded(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


FAMILIES: Final[Mapping[str, Braces]] = {
    "gemma4": Braces(open="<|tool_call>", close="<tool_call|>", quote='<|"|>', closes=("<|tool_response>",)),
    "functiongemma": Braces(open="<start_function_call>", close="<end_function_call>", quote="<escape>"),
}
