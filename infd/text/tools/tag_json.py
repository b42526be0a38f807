"""Marks around JSON: one or several objects, or a list of them, or a name in plain text and its arguments in JSON.

A family is a `TagJson`, a row of a table. If an object's name precedes its arguments, and the arguments begin within
_HEAD_CHARACTERS, the call is emitted while the model writes the object; templates write calls in this order. Other
objects (arguments before the name, no arguments, arguments in a JSON string) are emitted once they are complete.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from infd.text.tools.marked import MarkedCalls
from infd.text.tools.scan import ObjectScan

if TYPE_CHECKING:
    from infd.constraint import CallSyntax
    from infd.text.markup import Asides
    from infd.text.tools.offered import Offered

_HEAD_CHARACTERS: Final = 1024  # maximum characters of a call's beginning, which each token scans again
_COULD_BE_AN_OBJECT: Final = re.compile(r'\s*+(?:\{\s*+"?|\Z)')
_COULD_BE_A_NAME: Final = re.compile(r"\s*+(?:\Z|[\w.:/-]++(?:\Z|[ \t]*+(?:\Z|\n\s*+\Z)))")
_SCALAR: Final = r'(?:"(?:[^"\\\x00-\x1f]|\\.)*+"|-?[\d.]++|null|true|false)'
_LETTERS: Final = string.ascii_letters + string.digits
_MEMBER: Final = re.compile(rf'"(?P<key>\w++)"\s*+:\s*+(?P<value>{_SCALAR})')


class TagJson(Struct, frozen=True, kw_only=True):
    """One family; see ToolSyntax.

    opens       marks before calls, of a section or of each call; no mark begins with another
    closes      marks after calls: first the mark of each call, then the mark of a section; the model may omit them
    inner       further marks that may be special tokens
    bare        whether the answer may begin with a call without a mark
    names       keys of a call's name
    arguments   keys of a call's arguments
    ids         keys of a call's id
    keyed       whether a call is an object whose only key is the name: {"name": {...}}
    head        if the name is outside of JSON: pattern of the text between mark and arguments, with the group `name`
                and optionally `id`; the pattern ends before the arguments' brace
    listed      whether a section may contain a list of calls
    separators  characters that may separate a section's calls outside of a list; None: every call has its own mark
    short_ids   whether templates of the family refuse ids that are not nine letters or digits
    unmarked    whether the answer may begin with `head` without a mark, if an offered tool has the name; a name is then
                alone on its line
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    grammar: CallSyntax | None = None
    bare: bool = False
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments",)
    ids: tuple[str, ...] = ("id",)
    keyed: bool = False
    head: str | None = None
    listed: bool = False
    separators: str | None = None
    short_ids: bool = False
    unmarked: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opens + self.closes + self.inner

    def start(self, offered: Offered) -> TagJsonParser:
        return TagJsonParser(self, offered)


class TagJsonParser(MarkedCalls):
    """Parses one answer."""

    def __init__(self, family: TagJson, offered: Offered) -> None:
        super().__init__(family.opens)
        self._family = family
        self._offered = offered
        self._bare = False  # whether the latest section began without a mark
        self._in_list = False
        self._in_object = False  # whether the arguments are a member of an object
        self._object = ObjectScan("")
        self._block: list[str] = []  # parts of an object that is emitted once it is complete
        if family.bare or family.unmarked:
            self._state = self._beginning

    @property
    def within_value(self) -> bool:
        return self._state in (self._arguments, self._members, self._collect) and self._object.in_string

    def _fresh(self) -> TagJsonParser:
        return TagJsonParser(self._family, self._offered)

    def _cut(self, rest: str, asides: Asides) -> None:
        if self._state == self._collect:
            self._parse_block(rest, asides)
        elif self._state == self._arguments:
            asides.append_arguments(rest)
        elif self._state == self._beginning:
            self._emit_content(rest)
        elif self._state in (self._opened, self._element):
            self._block.append("")
            self._parse_block(rest, asides)

    def _beginning(self, _: Asides) -> bool:
        """Decide whether the answer begins with a call without a mark."""
        words = self._pending.lstrip()
        if not words:
            if len(self._pending) > _HEAD_CHARACTERS:
                self._state = self._between
            return len(self._pending) > _HEAD_CHARACTERS
        if self._family.unmarked:
            self._state = self._between if words[0] == "{" else self._element
            return True
        bare = words[0] in ("{[" if self._family.listed else "{")
        self._bare = bare
        self._state = self._opened if bare else self._between
        return True

    def _opened(self, _: Asides) -> bool:
        """Consume the beginning of a section, up to its first call."""
        words = self._pending.lstrip()
        if not words and len(self._pending) <= _HEAD_CHARACTERS:
            return False
        self._in_list = False
        if self._family.listed and words.startswith("["):
            self._in_list = True
            used = len(self._pending) - len(words) + 1
            self._opening += self._pending[:used]
            self._pending = self._pending[used:]
        self._state = self._element
        return True

    def _element(self, asides: Asides) -> bool:
        """Consume the beginning of a call, until the parser can decide whether the text is a call."""
        pending, family = self._pending, self._family
        if family.head is not None and not self._in_list and not pending.lstrip().startswith("{"):
            return self._outside(asides)
        head = _head(family).match(pending)
        if head is not None and self._named(head, asides):
            self._pending = pending[head.end() :]
            self._begin_arguments(in_object=True)
            return True
        possible = _COULD_BE_AN_OBJECT.match(pending)
        if possible is None or (possible.end() < len(pending) and not possible[0].endswith('"')):
            self._refuse()
            return True
        # An answer in JSON that is no call must not be held back until the object ends.
        if self._bare and _cannot_begin(family).match(pending):
            self._refuse()
            return True
        if self._is_complete(pending) or len(pending) > _HEAD_CHARACTERS:
            self._object = ObjectScan(self._mark)
            self._state = self._collect
            return True
        return False

    def _outside(self, asides: Asides) -> bool:
        """Consume a name outside of JSON, up to the arguments."""
        pending = self._pending
        head = _outside_head(self._family.head or "").match(pending)
        if head is not None and (self._opening or not self._family.unmarked or head["name"] in self._offered):
            groups = head.groupdict()
            self._begin_call(head["name"], asides, groups.get("id") or self._new_id())
            self._pending = pending[head.end() :]
            self._begin_arguments(in_object=False)
            return True
        impossible = self._family.unmarked and (head is not None or _COULD_BE_A_NAME.match(pending) is None)
        if impossible or len(pending) > _HEAD_CHARACTERS or (self._mark and self._mark in pending):
            self._refuse()
            return True
        return False

    def _is_complete(self, pending: str) -> bool:
        scan = ObjectScan(self._mark)
        scan.scan(pending, until=0)
        return scan.ended or (scan.depth == 0 and "{" in pending)

    @property
    def _mark(self) -> str:
        """The mark that ends an object whose closing bracket is missing; empty: none."""
        return self._family.closes[0] if self._family.closes else ""

    def _named(self, head: re.Match[str], asides: Asides) -> bool:
        """Emit the beginning of the call in `head`. Returns False if the head lacks a name."""
        family = self._family
        if family.keyed:
            if name := _text(head["name"]):
                self._begin_call(name, asides, self._new_id())
            return bool(name)
        found = {member["key"]: _text(member["value"]) for member in _MEMBER.finditer(head[0])}
        name = next((found[key] for key in family.names if key in found), "")
        if name:
            id = next((found[key] for key in family.ids if key in found), None)
            self._begin_call(name, asides, id or self._new_id())
        return bool(name)

    def _new_id(self) -> str | None:
        """Return an id that the family's templates accept; None if they accept every id."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9)) if self._family.short_ids else None

    def _begin_arguments(self, *, in_object: bool) -> None:
        self._in_object = in_object
        self._object = ObjectScan(self._mark, depth=int(in_object))
        self._state = self._arguments

    def _arguments(self, asides: Asides) -> bool:
        """Consume the arguments of a call and emit them."""
        scan, until = self._object, int(self._in_object)
        read = scan.scan(self._pending, until=until)
        asides.append_arguments(self._pending[:read])
        self._pending = self._pending[read:]
        if scan.depth > until and not scan.ended:
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

    def _collect(self, asides: Asides) -> bool:
        """Consume an object that is parsed once it is complete."""
        scan = self._object
        read = scan.scan(self._pending, until=0)
        self._block.append(self._pending[:read])
        self._pending = self._pending[read:]
        if not scan.ended and (scan.depth > 0 or not read):
            return False
        self._parse_block("", asides)
        return True

    def _parse_block(self, rest: str, asides: Asides) -> None:
        """Parse the collected object, followed by `rest`. Emit a call, or, if the object is not a call, content."""
        text = "".join(self._block) + rest
        self._block.clear()
        call = self._read(text)
        if call is None:
            self._refuse(text)
            return
        name, arguments, id = call
        self._begin_call(name, asides, id or self._new_id())
        asides.append_arguments(arguments)
        self._state = self._closing

    def _closing(self, _: Asides) -> bool:
        """Consume closing marks, and separators between the calls of a section."""
        family = self._family
        pending = self._pending = self._pending.lstrip()
        if self._in_list:
            if not pending:
                return False
            self._in_list = pending[0] == ","
            if pending[0] in ",]":
                self._pending = pending[1:]
            self._state = self._element if self._in_list else self._closing
            return True
        for mark in family.closes:
            if pending.startswith(mark):
                self._pending = pending[len(mark) :]
                return True
        if any(mark.startswith(pending) for mark in family.closes):
            return False
        if family.separators is not None:
            words = pending.lstrip(family.separators + " \t\r\n")
            if not words:
                return False
            if words[0] == "{":
                self._pending = words
                self._state = self._element
                return True
        self._state = self._between
        return True

    def _read(self, block: str) -> tuple[str, str, str | None] | None:
        """Return name, arguments and id of a complete object, None if the object is not a call."""
        family = self._family
        name: Any
        try:
            members = msgspec.json.decode(block, type=dict[str, msgspec.Raw])
            if family.keyed:
                if len(members) != 1:
                    return None
                ((name, raw),) = members.items()
                id = None
            else:
                key = next((key for key in family.names if key in members), "")
                name = msgspec.json.decode(members.get(key, msgspec.Raw(b'""')))
                raw = next((members[key] for key in family.arguments if key in members), msgspec.Raw(b"{}"))
                written = next((members[key] for key in family.ids if key in members), None)
                id = None if written is None else _text(bytes(written).decode())
            arguments = bytes(raw).decode()
            value: Any = msgspec.json.decode(raw)
            if value is None:
                arguments, value = "{}", {}
            # The model wrote a JSON string that contains the arguments, the form of the API's `arguments` field.
            if isinstance(value, str):
                arguments, value = value, msgspec.json.decode(value)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        if not isinstance(name, str) or not name or not isinstance(value, dict):
            return None
        return name, arguments, id or None


@cache
def _head(family: TagJson) -> re.Pattern[str]:
    """Return a pattern of the beginning of a call's object, up to the brace of its arguments."""
    if family.keyed:
        return re.compile(r'\s*+\{\s*+(?P<name>"(?:[^"\\\x00-\x1f]|\\.)++")\s*+:\s*+(?=\{)')
    keys = "|".join(map(re.escape, family.arguments))
    other = rf'(?!(?:{keys})")\w++'
    return re.compile(rf'\s*+\{{(?:\s*+"{other}"\s*+:\s*+{_SCALAR}\s*+,)++\s*+"(?:{keys})"\s*+:\s*+(?=\{{)')


@cache
def _cannot_begin(family: TagJson) -> re.Pattern[str]:
    """Return a pattern of the beginning of objects that are no calls: without a key, or with another first key."""
    keys = "|".join(f'{re.escape(key)}"' for key in (*family.names, *family.arguments, *family.ids, "type"))
    return re.compile(rf'\s*+\{{\s*+(?:\}}|"(?!{keys})\w*+(?!\w|\Z))')


@cache
def _outside_head(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\s*+{pattern}(?=\{{)")


def _text(literal: str) -> str:
    """Return the text of a JSON string or number; empty for other constants and for malformed literals."""
    try:
        value = json.loads(literal)
    except ValueError:
        return ""
    return value if isinstance(value, str) else "" if value is None or isinstance(value, bool) else str(value)
