"""Marks around each value: a call is a name and parameters, each with a key and a value that is not quoted.

A family is a `TagValues`, a row of a table. The parser translates values into JSON. Strings are emitted while the model
writes them. Values of other types, which the tool's schema states (`typed`), are emitted once they are complete.

A value ends at its closing mark, so the value may contain other marks. A value without a closing mark ends at the mark
that ends the call, if the mark that ends the section follows.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Struct

from infd.text.markup import overlap
from infd.text.tools import typed
from infd.text.tools.marked import MarkedCalls

if TYPE_CHECKING:
    from infd.constraint import CallSyntax
    from infd.text.markup import Asides
    from infd.text.tools.elements import Elements
    from infd.text.tools.offered import Offered

NAME: Final = "$name"
KEY: Final = "$key"
TAG: Final = "$tag"  # a key that is the name of an element
SPACE: Final = "$space"  # optional white space, of any length
ATTRIBUTES: Final = "$attributes"


class Marked(NamedTuple):
    """Attributes between two marks, followed by optional white space; the model may omit all of it."""

    opening: str
    closing: str


_CLASSES: Final = {
    NAME: r"""(?:(?P<name>[^\s<>{}"'=]++)%s|\Z)""",
    KEY: r"""(?:(?P<key>[^<>"]++)%s|\Z)""",
    TAG: r"""(?:(?P<key>[^<>"/\s][^<>"]*+)%s|\Z)""",
    SPACE: r"\s*+%s",
    ATTRIBUTES: r"(?P<attributes>[^<>]*+)%s",
}
_HEAD_CHARACTERS: Final = 1024  # maximum characters up to a call's or a value's beginning, which each token scans again

# Texts, the constants above, `Marked`, and other tuples of texts. For such a tuple, the pattern requires that one of
# its texts follows, but does not consume this text.
Parts = tuple[str | Marked | tuple[str, ...], ...]


class TagValues(Struct, frozen=True, kw_only=True):
    """One family; see ToolSyntax.

    sections    marks before the first call of a section, or before each call, in order; the model may omit any of them
    between     texts between these marks and the call, in order; the model may omit any of them
    head        the beginning of a call; its first part is a mark
    parameter   the beginning of a parameter, up to its value
    value_end   mark after a value; may contain $key
    call_end    mark after a call
    closes      marks after calls; the model may omit them
    newlines    whether the model writes one newline before each value and one after it, which are not part of the value
    strings     attributes of a parameter whose value is a string
    documents   attributes of a parameter whose value is JSON
    verbatim    marks around a string that may contain `value_end`; empty: there are none
    elements    how objects and arrays are written as nested elements; None: as JSON
    doubled     whether the model may write a tool's name twice: name.name
    tokens      marks that may be single tokens; empty: all marks
    """

    head: Parts
    parameter: Parts
    value_end: str
    call_end: str
    sections: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    newlines: bool = False
    strings: frozenset[str] = frozenset()
    documents: frozenset[str] = frozenset()
    verbatim: tuple[str, str] | tuple[()] = ()
    elements: Elements | None = None
    doubled: bool = False
    tokens: tuple[str, ...] = ()
    grammar: CallSyntax | None = None

    @property
    def opens(self) -> tuple[str, ...]:
        return (*self.sections, str(self.head[0]))

    @property
    def marks(self) -> tuple[str, ...]:
        if self.tokens:
            return self.tokens
        parts = self.head + self.parameter
        inner = [part for part in parts if isinstance(part, str) and part not in _CLASSES]
        inner += [mark for part in parts if isinstance(part, Marked) for mark in part]
        return tuple(
            dict.fromkeys((*self.sections, *self.between, *inner, self.value_end, self.call_end, *self.closes))
        )

    def start(self, offered: Offered) -> TagValuesParser:
        return TagValuesParser(self, offered)


class TagValuesParser(MarkedCalls):
    """Parses one answer."""

    def __init__(self, family: TagValues, offered: Offered) -> None:
        super().__init__(family.opens)
        self._family = family
        self._offered = offered
        self._head, self._parameter, self._unclosed = _patterns(family)
        self._name = ""
        self._first = True  # whether the next parameter is the first of its call
        self._key = ""
        self._types = typed.STRING
        self._quoted = False
        self._nested = False  # whether the value is written as elements
        self._value_mark = family.value_end  # `value_end`; for a verbatim string, its closing mark and `value_end`
        self._value: list[str] = []  # parts of a value that is emitted once it is complete

    @property
    def within_value(self) -> bool:
        return self._state in (self._value_begun, self._string, self._undecided, self._document)

    def _fresh(self) -> TagValuesParser:
        return TagValuesParser(self._family, self._offered)

    def _cut(self, rest: str, asides: Asides) -> None:
        """Handle an answer that ends within a call: emit the unfinished value without a partial mark at its end.

        A call whose name is unfinished is refused.
        """
        if self._state == self._opened:
            self._refuse(rest)
        elif self._state in (self._undecided, self._document):
            asides.append_arguments("".join(self._value) + rest[: self._value_end(rest)[0]])
        self._value.clear()

    def _opened(self, asides: Asides) -> bool:
        """Consume the beginning of a call."""
        begun = self._opening + self._pending
        found = self._head.match(begun)
        if found is None or (found["whole"] is None and len(begun) > _HEAD_CHARACTERS):
            self._refuse()
            return True
        if found["whole"] is None:
            return False
        self._pending = begun[found.end() :]
        self._name = found["name"]
        if self._family.doubled and self._name not in self._offered:
            first, _, second = self._name.partition(".")
            if first == second and first in self._offered:
                self._name = first
        self._first = True
        self._begin_call(self._name, asides)
        asides.append_arguments("{")
        self._state = self._parameters
        return True

    def _parameters(self, asides: Asides) -> bool:
        """Consume the beginning of a parameter, or the end of the call."""
        family = self._family
        pending = self._pending = self._pending.lstrip()
        found = self._parameter.match(pending)
        if found is not None and found["whole"] is not None:
            self._pending = pending[found.end() :]
            self._begin_value(found["key"].strip(), found.groupdict().get("attributes") or "", asides)
            return True
        ends = (family.call_end, *family.closes)
        possible = found is not None or any(mark.startswith(pending) for mark in ends)
        if possible and not pending.startswith(ends) and len(pending) <= _HEAD_CHARACTERS:
            return False
        self._pending = pending.removeprefix(family.call_end)
        asides.append_arguments("}")  # even if the mark is missing
        self._state = self._closing
        return True

    def _begin_value(self, key: str, attributes: str, asides: Asides) -> None:
        asides.append_arguments(("" if self._first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._first = False
        self._key, self._nested = key, False
        self._quoted = attributes.strip() in self._family.documents
        if self._quoted:
            self._types = typed.ANY
        elif attributes.strip() in self._family.strings:
            self._types = typed.STRING
        else:
            self._types = typed.types_of(self._offered.parameters(self._name), key)
        self._state = self._value_begun

    def _value_begun(self, asides: Asides) -> bool:
        """Consume the newline or the verbatim mark before a value, and choose how the value is read."""
        if not self._pending:
            return False
        self._value_mark = self._family.value_end.replace(KEY, self._key)
        if self._family.elements is not None:
            begins = self._family.elements.begins(self._pending)
            if begins is None and not self._pending.startswith(self._value_mark):
                return False
            if begins:
                self._nested = True
                self._state = self._document
                return True
        if self._family.verbatim:
            opening, closing = self._family.verbatim
            if self._pending.startswith(opening):
                self._pending = self._pending[len(opening) :]
                self._value_mark = closing + self._value_mark
                self._types = typed.STRING
            elif opening.startswith(self._pending):
                return False
        if self._family.newlines:
            self._pending = self._pending.removeprefix("\n")
        if self._types == typed.STRING:
            self._begin_string(asides)
        else:
            self._state = self._document if self._quoted or "string" not in self._types else self._undecided
        return True

    def _begin_string(self, asides: Asides) -> None:
        asides.append_arguments('"')
        self._state = self._string

    def _string(self, asides: Asides) -> bool:
        """Consume a string and emit it."""
        end, after = self._value_end(self._pending)
        asides.append_arguments(msgspec.json.encode(self._pending[:end])[1:-1].decode())
        self._pending = self._pending[end if after is None else after :]
        if after is None:
            return False
        asides.append_arguments('"')
        self._state = self._parameters
        return True

    def _undecided(self, asides: Asides) -> bool:
        """Wait until the value is certainly a string, or until only the complete value can decide its type."""
        end, after = self._value_end(self._pending)
        if not typed.may_be_typed(self._pending[:end], self._types):
            self._begin_string(asides)
            return True
        if after is None and self._pending[:end].lstrip()[:1] not in ("{", "["):
            return False
        self._state = self._document
        return True

    def _document(self, asides: Asides) -> bool:
        """Consume a value that is emitted once it is complete."""
        end, after = self._value_end(self._pending)
        self._value.append(self._pending[:end])
        self._pending = self._pending[end if after is None else after :]
        if after is None:
            return False
        text = "".join(self._value)
        if self._nested and self._is_open(text):
            self._value.append(self._value_mark)
            return True
        asides.append_arguments(self._converted(text))
        self._value.clear()
        self._state = self._parameters
        return True

    def _is_open(self, text: str) -> bool:
        """Return whether a value, up to a closing mark, contains more opening than closing marks of its own key."""
        opening = self._value_mark.replace("</", "<", 1)
        return text.count(opening) > text.count(self._value_mark)

    def _converted(self, text: str) -> str:
        """Return the JSON text of a complete value."""
        if self._family.elements is not None and (self._nested or not text):
            root = self._offered.parameters(self._name)
            return self._family.elements.to_json(text, typed.member(root, self._key, root), root)
        return typed.to_json(text, self._types, quoted=self._quoted)

    def _value_end(self, text: str) -> tuple[int, int | None]:
        """Return the index at which the value ends, and the index after its closing mark.

        If the value may continue, the second is None, and the first ends the text that certainly belongs to the value.
        """
        family = self._family
        mark = self._value_mark
        place, after = text.find(mark), len(mark)
        at = text.find(family.call_end) if self._unclosed is not None else -1
        while at >= 0 and self._unclosed is not None and not 0 <= place < at:
            found = self._unclosed.match(text, at)
            if found is not None:
                if found["whole"] is None:
                    return self._without_newline(text, at), None
                place, after = at, 0
                break
            at = text.find(family.call_end, at + 1)
        if place < 0:
            held = overlap(text, mark)
            if self._unclosed is not None:
                held = max(held, overlap(text, family.call_end))
            return self._without_newline(text, len(text) - held), None
        return self._without_newline(text, place), place + after

    def _without_newline(self, text: str, end: int) -> int:
        return end - (self._family.newlines and text[end - 1 : end] == "\n")

    def _closing(self, _: Asides) -> bool:
        """Consume marks after a call."""
        pending = self._pending = self._pending.lstrip()
        for mark in self._family.closes:
            if pending.startswith(mark):
                self._pending = pending[len(mark) :]
                return True
        if any(mark.startswith(pending) for mark in self._family.closes):
            return False
        self._state = self._between
        return True


@cache
def _patterns(family: TagValues) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str] | None]:
    """Return patterns of a call's beginning, a parameter's beginning, and the call's end after an unclosed value.

    The last one is None for a family without marks after calls.
    """
    unclosed = None
    if family.closes:
        unclosed = re.compile(_pattern((family.call_end, SPACE, family.closes)).replace(r"\s*+", r"\s{0,8}+"))
    return (
        re.compile(_pattern(family.head, family.sections + family.between)),
        re.compile(_pattern(family.parameter)),
        unclosed,
    )


def _pattern(parts: Parts, optional: tuple[str, ...] = ()) -> str:
    """Return a pattern of the text of all parts, or of a beginning of it; `whole` is set for the complete text only."""
    found = "(?P<whole>)"
    for part in reversed(parts):
        if isinstance(part, Marked):
            opening, closing = map(re.escape, part)
            begun = rf"(?:{_beginnings(part.opening)})\Z|{opening}[^<>]*+(?:{_beginnings(part.closing)})\Z"
            found = rf"(?:{begun}|(?:{opening}(?P<attributes>[^<>]*+){closing}\s*+)?+{found})"
        elif isinstance(part, tuple):
            found = rf"(?:(?={'|'.join(map(re.escape, part))}){found}|(?:{'|'.join(map(_beginnings, part))})\Z)"
        elif part in _CLASSES:
            found = _CLASSES[part] % found
        else:
            found = rf"(?:{re.escape(part)}{found}|(?:{_beginnings(part)})\Z)"
    for mark in reversed(optional):
        found = rf"(?:(?:{_beginnings(mark)})\Z|(?:{re.escape(mark)})?+\s*+{found})"
    return found


def _beginnings(text: str) -> str:
    """Return a pattern of all proper prefixes of a text, including the empty prefix."""
    return "|".join(re.escape(text[:end]) for end in range(len(text) - 1, -1, -1))
