"""Know from a JSON schema what an answer goes on with: names, brackets, and what stands between values.

`forcing` finds the same by masks, for any grammar. That takes most of a millisecond, on processors that compute the
model meanwhile, and the tokens are known a step later. An outline needs microseconds and no matcher, and goes on within
a name, too. It knows objects whose properties are listed and arrays with one schema of items; in other parts of a
schema forced tokens are sought by masks.

An answer is assumed to have each property in the schema's order, no empty array or object, and the white space that it
had in the same place before. Drafts change no answer, so assumptions may be wrong.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_SCHEMA: Final = 2**14  # characters of a schema that is read on the event loop: 0.2 ms
MOST_TEXTS: Final = 256  # encoded texts that are kept
MOST_OPEN: Final = 64  # arrays and objects within each other: each step copies them. Deeper answers have no outline
MOST_REFERENCES: Final = 8  # in a row; further ones may be a circle
FIRST_UNIT: Final = b"  "  # assumed until an answer's first line break, or a first bracket without one
TOKEN_BYTES: Final = 5  # bytes of text for each token that is wanted
_PLAIN: Final = {"string": "string", "number": "number", "integer": "number", "boolean": "word", "null": "word"}
# Keywords beside which the others do not tell what follows.
_OTHERS: Final = ("anyOf", "oneOf", "allOf", "enum", "const", "not", "if", "patternProperties", "prefixItems")
_OPENING: Final = {"object": b"{", "array": b"[", "string": b'"'}
_BEGINNINGS: Final = {"number": b"7", "word": b"true", "string": b"a"}  # of values
_BLANK: Final = frozenset(b" \t\n\r")
_QUOTE, _ESCAPE = ord('"'), ord("\\")
_SCALAR: Final = re.compile(rb"(?:[\w+-]|\.(?=\d))*")  # what may follow within a number or word
_SCALAR_ENDS: Final = frozenset(b" \t\n\r,}]")
_KINDS: Final = {byte: bytes([byte]) for byte in b"}],:"}  # other characters begin a name or value: b"v"


class At(Enum):
    """What is written at a place, or expected there behind white space."""

    VALUE = auto()
    ITEM = auto()  # an array's first item, or its end
    NAME = auto()  # an object's next name, or its end
    IN_NAME = auto()
    COLON = auto()
    IN_STRING = auto()  # a value
    IN_SCALAR = auto()  # a number or a word
    BEHIND = auto()  # a value
    LOST = auto()  # no JSON text


class Node(NamedTuple):
    """What is known of the values of a schema.

    kind      "object", "array", "string", "number", "word": true, false or null; "other": anything
    names     of an object's properties, as JSON texts
    children  schemas of the properties, or of the items
    """

    kind: str
    names: tuple[bytes, ...] = ()
    children: tuple[Any, ...] = ()


_OTHER: Final = Node("other")


class Outline:
    """The outline of a schema. Used on the event loop."""

    def __init__(
        self, schema: Any, tokens: Sequence[bytes], encode: Callable[[str], list[int]], *, whitespace: bool = True
    ) -> None:
        """Set up.

        schema          a JSON schema, as decoded from JSON
        tokens, encode  see Vocabulary
        whitespace      see JsonSchema
        """
        self.whitespace = whitespace
        self.tokens = tokens
        self._root = schema
        self._encode = encode
        self._nodes: dict[int, Node] = {}
        self._texts: dict[tuple[bytes, bytes], list[int]] = {}

    def node(self, schema: Any) -> Node:
        """Return what is known of a part of the schema."""
        if (found := self._nodes.get(id(schema))) is None:
            found = self._nodes[id(schema)] = self._read(schema)
        return found

    @property
    def root(self) -> Node:
        return self.node(self._root)

    def _read(self, schema: Any) -> Node:
        for _ in range(MOST_REFERENCES):
            if not isinstance(schema, dict) or any(each in schema for each in _OTHERS):
                return _OTHER
            if "$ref" not in schema:
                break
            schema = self._referred(schema["$ref"])
        else:
            return _OTHER
        kind = schema.get("type")
        if kind == "object" and isinstance(listed := schema.get("properties"), dict) and listed:
            names = tuple(json.dumps(name, ensure_ascii=False).encode(errors="surrogatepass") for name in listed)
            return Node("object", names, tuple(listed.values()))
        if kind == "array" and isinstance(schema.get("items"), dict):
            return Node("array", children=(schema["items"],))
        return Node(_PLAIN[kind]) if isinstance(kind, str) and kind in _PLAIN else _OTHER

    def _referred(self, reference: Any) -> Any:
        """Return the part of the schema that a reference names; None if it is not found."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._root
        for name in reference.split("/")[1:]:
            if not isinstance(found, dict):
                return None
            found = found.get(name)
        return found

    def encode(self, text: bytes, follows: bytes) -> list[int]:
        """Return the tokens of a text, without those that merge with what follows.

        follows  a text that may follow
        """
        if (found := self._texts.get((text, follows))) is None:
            found, size = [], 0
            for token in self._encode((text + follows).decode(errors="replace")):
                size += len(self.tokens[token]) if token < len(self.tokens) else len(text) + 1
                if size > len(text):
                    break
                found.append(token)
            # A tokenizer may add a space to the beginning of texts.
            if not text.startswith(b"".join([self.tokens[each] for each in found])):
                found = []
            if len(self._texts) >= MOST_TEXTS:
                self._texts.clear()
            self._texts[text, follows] = found
        return found


class _Open:
    """An array or object that is not closed yet.

    passed  number of an object's properties, in their order, up to the last whose name was written
    """

    __slots__ = ("named", "node", "passed")

    def __init__(self, node: Node, passed: int = 0, *, named: bool) -> None:
        """named: whether it is an object, whose values have names."""
        self.node = node
        self.passed = passed
        self.named = named

    @property
    def item(self) -> Any:
        """The schema of an array's items."""
        return self.node.children[0] if self.node.kind == "array" else None

    @property
    def done(self) -> bool:
        """Whether no further property of an object is known."""
        return self.passed >= len(self.node.names)


class Place:
    """A place in an answer, up to which its text is read byte by byte.

    known   whether the outline tells what may follow; otherwise it may be sought by masks. Any thread may ask
    likely  whether the last guess begins as the answer was written before; otherwise with assumptions
    """

    def __init__(self, outline: Outline) -> None:
        self.known = True
        self.likely = True
        self._outline = outline
        self._at = At.VALUE
        self._node = outline.root  # of the value that is expected or written
        self._open: list[_Open] = []
        self._name = b""  # the name that is being written, with its quotes
        self._escaped = False  # whether a string's last character was a backslash that escapes the next one
        self._last = b""  # the visible character before; b"v" behind a name or value
        self._space = b""  # behind it
        # White space by the characters around it and the number of open brackets; by the characters, the latest.
        self._gaps: dict[tuple[bytes, bytes, int], bytes] = {}
        self._latest: dict[tuple[bytes, bytes], bytes] = {}
        self._unit: bytes | None = None  # by which lines are indented; None: the answer has one line so far

    def copy(self) -> Place:
        """Return an independent place."""
        copied = Place.__new__(Place)
        copied.__dict__ = dict(self.__dict__)
        copied._open = [_Open(each.node, each.passed, named=each.named) for each in self._open]
        copied._gaps, copied._latest = dict(self._gaps), dict(self._latest)
        return copied

    @property
    def _in_value(self) -> bool:
        """Whether the place is within a string that is a value, a number or a word."""
        return self._at in (At.IN_STRING, At.IN_SCALAR)

    def read(self, tokens: Sequence[int]) -> None:
        """Read the answer's next tokens."""
        for token in tokens:
            text = self._text(token)
            if self._at in (At.IN_STRING, At.IN_NAME) and not self._escaped and b'"' not in text and b"\\" not in text:
                if self._at is At.IN_NAME:
                    self._name += text
                continue
            for byte in text:
                self._read(byte)
        self.known = self._knows()

    def guess(self, most: int) -> list[int]:
        """Return at most `most` tokens that probably follow; none if the outline does not tell."""
        if not self.known or self._in_value:
            return []
        text, follows = self._continued(most * TOKEN_BYTES)
        return self._outline.encode(text, follows)[:most] if text else []

    def extended(self, drafts: list[int], most: int) -> list[int]:
        """Return drafts of a value; behind the first that ends the value, what probably follows it.

        A number or word ends before the first draft that does not belong to it: the grammar allows nothing else there.
        """
        if self._at is At.IN_SCALAR:
            kept = self._belonging(drafts)
            return drafts if drafts and kept == len(drafts) else [*drafts[:kept], *self._behind(most - kept)]
        for place, token in enumerate(drafts if self._at is At.IN_STRING else [], 1):
            if b'"' in self._text(token):
                ahead = self.copy()
                ahead.read(drafts[:place])
                if not ahead._in_value:
                    return [*drafts[:place], *ahead.guess(most - place)] if ahead.known else drafts
        return drafts

    def _belonging(self, drafts: list[int]) -> int:
        """Return the number of drafts that belong to the number or word that is written."""
        texts = [self._text(token) for token in drafts]
        found = _SCALAR.match(b"".join(texts))
        left = found.end() if found else 0
        for number, text in enumerate(texts):
            left -= len(text)
            if left < 0:
                return number
        return len(texts)

    def _behind(self, most: int) -> list[int]:
        """Return at most `most` tokens that probably follow if the number or word ends here."""
        ahead = self.copy()
        ahead._at = At.BEHIND
        return ahead.guess(most)

    def _text(self, token: int) -> bytes:
        tokens = self._outline.tokens
        return tokens[token] if token < len(tokens) else b""

    def _knows(self) -> bool:
        if self._at is At.LOST:
            return False
        if self._at in (At.VALUE, At.IN_STRING, At.IN_SCALAR):
            return self._node.kind != "other"
        return not self._open or self._open[-1].node.kind != "other"

    def _read(self, byte: int) -> None:
        at = self._at
        if at is At.IN_STRING or at is At.IN_NAME:
            if at is At.IN_NAME:
                self._name += bytes([byte])
            if self._escaped:
                self._escaped = False
            elif byte == _ESCAPE:
                self._escaped = True
            elif byte == _QUOTE:
                self._last = b"v"
                if at is At.IN_STRING:
                    self._at = At.BEHIND
                else:
                    self._at, self._node = At.COLON, self._named()
            return
        if at is At.IN_SCALAR:
            if byte not in _SCALAR_ENDS:
                return
            self._at = At.BEHIND
        if byte in _BLANK:
            self._space += bytes([byte])
            return
        kind = _KINDS.get(byte, b"v")
        self._note(kind)
        if kind == b"v":
            self._begin(byte)
        elif kind == b",":
            self._go_on()
        elif kind == b":":
            self._at, self._last = (At.VALUE, b":") if self._at is At.COLON else (At.LOST, b"")
        else:
            self._close()

    def _note(self, kind: bytes) -> None:
        """Note the white space before a character."""
        space, depth, around = self._space, len(self._open), (self._last, kind)
        self._space = b""
        self._gaps[(*around, depth)] = self._latest[around] = space
        if self._unit is None and self._last in (b"{", b"[") and b"\n" in space:
            indented = space[space.rindex(b"\n") + 1 :]
            self._unit = indented[: len(indented) // depth] if depth else indented

    def _begin(self, byte: int) -> None:
        """Read the first character of a name or value."""
        at = self._at
        if at is At.NAME and byte == _QUOTE:
            self._at, self._name = At.IN_NAME, b'"'
        elif at not in (At.VALUE, At.ITEM):
            self._at = At.LOST
        elif byte == _QUOTE:
            self._at = At.IN_STRING
        elif byte in b"{[" and len(self._open) == MOST_OPEN:
            self._at = At.LOST
        elif byte in b"{[":
            named = byte == ord("{")
            known = self._node.kind == ("object" if named else "array")
            self._open.append(_Open(self._node if known else _OTHER, named=named))
            self._last, self._at = bytes([byte]), At.NAME if named else At.ITEM
            if not named:
                self._node = self._outline.node(self._open[-1].item)
        else:
            self._at, self._last = At.IN_SCALAR, b"v"

    def _go_on(self) -> None:
        """Read a comma."""
        if self._at is not At.BEHIND or not self._open:
            self._at = At.LOST
            return
        self._last, last = b",", self._open[-1]
        self._at = At.NAME if last.named else At.VALUE
        if not last.named:
            self._node = self._outline.node(last.item)

    def _close(self) -> None:
        """Read a closing bracket."""
        if not self._open or self._at not in (At.BEHIND, At.NAME, At.ITEM):
            self._at = At.LOST
            return
        self._open.pop()
        self._at, self._last = At.BEHIND, b"v"

    def _named(self) -> Node:
        """Return what is known of the value of the name that was written."""
        last = self._open[-1]
        if self._name not in last.node.names:
            return _OTHER
        number = last.node.names.index(self._name)
        last.passed = number + 1
        return self._outline.node(last.node.children[number])

    def _continued(self, most: int) -> tuple[bytes, bytes]:
        """Return about `most` bytes that probably follow, up to the next value that is not known, and how it begins."""
        ahead = self.copy()
        ahead.likely, text = True, b""
        while len(text) < most and (piece := ahead._next()):
            if ahead._at is At.NAME:  # quicker than to read it
                ahead._last, ahead._space = b"v", b""
                ahead._name, ahead._at = ahead._open[-1].node.names[ahead._open[-1].passed], At.COLON
                ahead._node = ahead._named()
            else:
                for byte in piece:
                    ahead._read(byte)
            if not text:
                self.likely = ahead.likely
            text += piece
        return text, _BEGINNINGS.get(ahead._node.kind, b"") if ahead._at in (At.VALUE, At.IN_STRING) else b""

    def _next(self) -> bytes:
        """Return what probably follows up to the end of a name or the next bracket, quote, colon or comma; or nothing.

        At a number or word that is white space alone.
        """
        at, last = self._at, self._open[-1] if self._open else None
        if at in (At.VALUE, At.ITEM):
            kind = self._node.kind
            return b"" if kind == "other" else self._gap(b"v") + _OPENING.get(kind, b"")
        if at is At.COLON:
            return self._gap(b":") + b":"
        if last is None:
            return b""
        if at is At.NAME:
            return b"" if last.done else self._gap(b"v") + last.node.names[last.passed]
        if at is At.IN_NAME:
            left = last.node.names[last.passed :]
            return next((each[len(self._name) :] for each in left if each.startswith(self._name)), b"")
        if at is not At.BEHIND:
            return b""
        if last.named:
            follows = b"," if not last.done else b"}"
            return self._gap(follows) + follows if last.node.names else b""
        # An array of objects is assumed to go on. Of other values nothing is assumed.
        self.likely = False
        return self._gap(b",") + b"," if self._outline.node(last.item).kind == "object" else b""

    def _gap(self, follows: bytes) -> bytes:
        """Return the white space that probably follows, before a character."""
        if not self._outline.whitespace:
            return b""
        depth, begun = len(self._open), self._space
        gap = self._gaps.get((self._last, follows, depth))
        if gap is None and self._last == b",":  # lines that an array or object begins with go on
            opened = self._gaps.get((b"{" if self._open[-1].named else b"[", follows, depth), b"")
            gap = opened if b"\n" in opened else None
        if gap is None:
            gap = self._gap_elsewhere(follows, depth)
        if gap.startswith(begun):
            return gap[len(begun) :]
        self.likely = False
        return b""

    def _gap_elsewhere(self, follows: bytes, depth: int) -> bytes:
        """Return the white space that probably is between characters that the answer had at no such depth."""
        last, ends = self._last, follows in (b"}", b"]")
        gap = self._latest.get((last, follows))
        if gap is not None and b"\n" not in gap:
            return gap
        if gap is None and last == b":":
            return b" "
        if gap is None and not ends and last not in (b"{", b"[", b","):
            return b""
        if self._unit is None and self._latest.get((b"{", b"v")) is not None:  # one line
            return b"" if ends or last != b"," else b" "
        self.likely = self.likely and self._unit is not None
        return b"\n" + (FIRST_UNIT if self._unit is None else self._unit) * (depth - ends)
