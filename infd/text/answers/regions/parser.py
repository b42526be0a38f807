"""Parse one answer that consists of the regions of a response template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from infd.text.answers.regions.contents import MALFORMED, calls_of
from infd.text.answers.regions.fields import CALLS, REST, THOUGHTS
from infd.text.markup import Asides
from infd.text.patterns import Exhausted, Steps
from infd.text.tools import typed
from infd.text.tools.scan import ObjectScan

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from infd.text.answers.regions.fields import Field
    from infd.text.patterns import Found, Pattern
    from infd.text.tools.offered import Offered

STEPS: Final = 2**20  # steps granted to an answer at its beginning
_STEPS_PER_CHARACTER: Final = 256  # further steps granted for each character
_DELIMITER_CHARACTERS: Final = 256
_BODY_CHARACTERS: Final = 2**16  # maximum characters of a region that is not streamed


class RegionsParser:
    """Parses one answer."""

    def __init__(self, fields: Sequence[Field], begins: re.Pattern[str], offered: Offered | None) -> None:
        """begins: pattern of the beginnings of delimiters; text without one is passed on at once."""
        self._begins = begins
        self._fields = fields
        self.implicit = next((field for field in fields if field.opens is None), None)
        self._offered = offered
        self._steps = Steps(STEPS)
        self._pending = ""
        self._begun = True  # whether `_pending` is the beginning of the message
        self.current: Field | None = None
        self.inside = False
        self._opening = ""  # the text that opened the current region
        self._groups: dict[str, str] = {}  # named groups of that text
        self._body: list[str] = []  # parts of a region that is read once it is closed
        self._length = 0
        self._object = ObjectScan("")  # position in a region that contains JSON, after `_scanned` parts of its body
        self._scanned = 0
        self._unscanned = ""  # half an escape at the end of these parts
        self._held = ""  # white space of a text, held back until more text follows
        self._emitted = False  # whether part of the current region was emitted
        self._regions: set[str] = set()  # names of fields of which a part was emitted
        self._content: list[str] = []
        self._enter(self.implicit)

    def _enter(self, field: Field | None) -> None:
        self.current = field
        self.inside = field is not None and field.name in THOUGHTS

    def skip(self, text: str) -> None:
        """Consume the part of the message that the prompt contains."""
        self.feed(text, Asides())  # thoughts and calls of the prompt are dropped
        self._held, self._emitted = "", False

    def feed(self, text: str, asides: Asides) -> str:
        self._pending += text
        if not self._begun and self._begins.search(self._pending) is None:  # most text contains no delimiter
            self._append(self._consume(len(self._pending)), asides)
            return self._take()
        self._steps.left += _STEPS_PER_CHARACTER * len(text)
        self._read(asides, ended=False)
        return self._take()

    def finish(self, asides: Asides) -> str:
        self._read(asides, ended=True)
        self._close("", asides)
        self._enter(None)
        self._held = ""
        return self._take()

    def _take(self) -> str:
        text = "".join(self._content)
        self._content.clear()
        return text

    def _read(self, asides: Asides, *, ended: bool) -> None:
        while True:
            try:
                field, found = self._next(ended=ended)
            except Exhausted:
                self._fail()
                return
            if found is None or not found.decided:
                end = len(self._pending) if found is None else found.start
                self._append(self._consume(end), asides)
                return
            if not self._append(self._consume(found.start), asides):
                return
            delimiter = self._consume(found.end - found.start)
            if field is None and delimiter and self._in_string():
                if not self._append(delimiter, asides):
                    return
                continue
            empty = not delimiter and not self._emitted and not self._body
            self._close(delimiter if field is None else "", asides)
            self._enter(self.implicit if field is None else field)
            self._opening = "" if field is None else delimiter
            self._groups = {} if field is None else found.groups
            self._emitted, self._held, self._length = False, "", 0
            self._object, self._scanned, self._unscanned = ObjectScan(""), 0, ""
            if empty and (field is None or not self._pending):
                return

    def _consume(self, count: int) -> str:
        text, self._pending = self._pending[:count], self._pending[count:]
        self._begun = self._begun and not text
        return text

    def _next(self, *, ended: bool) -> tuple[Field | None, Found | None]:
        """Return the first delimiter, after the field that it opens; None in place of a field: it closes a region."""
        watched: list[tuple[Field | None, Pattern]] = []
        if self.current is self.implicit:
            watched = [(field, field.opens) for field in self._fields if field.opens is not None]
        if self.current is not None and self.current.closes is not None:
            watched.append((None, self.current.closes))
        best: tuple[tuple[int, int, bool, str], Field | None, Found] | None = None
        for field, pattern in watched:
            found = pattern.search(
                self._pending, 0, self._steps, ended=ended, begun=self._begun, most=_DELIMITER_CHARACTERS
            )
            if found is not None:
                # Of delimiters at one place, one that is undecided comes first, then the longest, then an opening one.
                length = found.end - found.start if found.decided else len(self._pending) + 1
                key = (found.start, -length, field is None, field.name if field is not None else "")
                if best is None or key < best[0]:
                    best = key, field, found
        return (None, None) if best is None else best[1:]

    def _in_string(self) -> bool:
        """Return whether the current region ends within a string of JSON, where a delimiter is ordinary text."""
        field = self.current
        if field is None or field.stated.content != "json" or field.stated.content_args.get("string_delims"):
            return False
        text = self._unscanned + "".join(self._body[self._scanned :])
        self._scanned = len(self._body)
        self._unscanned = text[self._object.scan(text, until=-_BODY_CHARACTERS) :]
        return self._object.in_string

    def _append(self, text: str, asides: Asides) -> bool:
        """Append to the current region. Returns False if the region is too long, so that the rest is content."""
        field = self.current
        if not text or field is None:
            return True
        if field.streams:
            self._stream(field, text, asides)
            return True
        self._body.append(text)
        self._length += len(text)
        if self._length <= _BODY_CHARACTERS:
            return True
        self._fail()
        return False

    def _stream(self, field: Field, text: str, asides: Asides) -> None:
        """Emit text of a field, without the white space at both ends."""
        if field.strips:
            text = self._held + text
            if not self._emitted:
                text = text.lstrip()
            words = text.rstrip()
            self._held, text = text[len(words) :], words
        if not text:
            return
        if not self._emitted:
            if field.name in self._regions:
                text = (field.stated.join or "") + text
            self._regions.add(field.name)
            self._emitted = True
        if field.name in THOUGHTS:
            asides.think(text)
        else:
            self._content.append(text)

    def _close(self, closing: str, asides: Asides) -> None:
        """Parse the body of a closed region, and emit its calls; a region that is no call is content."""
        field, body = self.current, "".join(self._body)
        self._body.clear()
        if field is None or field.streams or not (body or self._opening):
            return
        try:
            offered = field.name == CALLS and self._offered is not None
            calls = calls_of(field, body, self._groups, self._steps) if offered else None
        except (*MALFORMED, Exhausted):
            calls = None
        if calls is None:
            self._content.append(self._opening + body + closing)
            return
        for name, arguments in calls:
            asides.call(name)
            asides.append_arguments(self._arguments(name, arguments))

    def _arguments(self, name: str, arguments: Any) -> str:
        """Return the JSON text of a call's arguments; strings become values of the types that the schema allows."""
        if isinstance(arguments, str):
            return arguments
        if self._offered is not None and isinstance(arguments, dict):
            schema = self._offered.parameters(name)
            for key, value in arguments.items():
                if isinstance(value, str):
                    arguments[key] = json.loads(typed.to_json(value, typed.types_of(schema, key)))
        return json.dumps(arguments, ensure_ascii=False)

    def _fail(self) -> None:
        """Make the rest of the answer content."""
        body = self._opening + "".join(self._body) if self.current is not None and not self.current.streams else ""
        self._body.clear()
        self._content.append(body + self._pending)
        self._pending = ""
        self.implicit = REST
        self._enter(REST)
        self._fields = ()
