"""Parse the keys and values of a GGUF header without trusting them.

The header is read in steps, together at most HEADER_BYTES. Lists of texts, most of a header's bytes, are decoded on
request.
"""

from __future__ import annotations

import math
import os
import struct
from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from infd.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

HEADER_BYTES: Final = 2**26  # maximum bytes of a header; 260,000 tokens and twice as many merges take about 20 MiB
MOST_TEXTS: Final = 2**21  # maximum length of a list of texts: each text takes more memory than its bytes in the file
LONGEST_KEY: Final = 2**10
_STEP: Final = 2**20  # bytes of the first read
_TEXT: Final = 8
_LIST: Final = 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOLEAN: Final = 7


class Cursor:
    """Reads the values of a header in order."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        """size: of the file, in bytes."""
        self.path = path
        self.at = 0
        self._descriptor = descriptor
        self._size = size
        self._content = bytearray()

    def refuse(self, fault: str) -> NoReturn:
        """Raise the error for a fault of the header."""
        raise CheckpointError(f"{self.path}: {fault}")

    def number(self, code: str) -> Any:
        """Read a number; `code` is its format in `struct`."""
        begin = self.at
        self.skip(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self._content, begin)[0]

    def text(self, most: int = HEADER_BYTES) -> bytes:
        """Read a text of at most `most` bytes."""
        count = self.number("Q")
        if count > most:
            self.refuse(f"a text at byte {self.at} claims {count} bytes; at most {most} are read")
        return self.bytes(count)

    def bytes(self, count: int) -> bytes:
        """Read `count` bytes."""
        begin = self.at
        self.skip(count)
        return bytes(self._content[begin : self.at])

    def texts(self, count: int) -> Texts:
        """Read a list of `count` texts."""
        if count > MOST_TEXTS:
            self.refuse(f"a list at byte {self.at} claims {count} texts; at most {MOST_TEXTS} are read")
        # A start reads the header several times, and most of it are texts, so `skip` is not called for each.
        begin = at = self.at
        unpack, content = struct.Struct("<Q").unpack_from, self._content
        have = len(content)
        for _ in range(count):
            if at + 8 > have:
                self._read(at + 8)
                have = len(content)
            at += 8 + unpack(content, at)[0]
        self.skip(at - begin)
        return Texts(bytes(content[begin:at]), count)

    def skip(self, count: int) -> None:
        """Advance by `count` bytes, and read them from the file if they are not read yet."""
        end = self.at + count
        if end > len(self._content):
            self._read(end)
        self.at = end

    def _read(self, end: int) -> None:
        if end > self._size:
            self.refuse(f"the header needs {end} bytes or more; the file has {self._size}")
        if end > HEADER_BYTES:
            self.refuse(f"the header needs {end} bytes or more; at most {HEADER_BYTES} are read")
        wanted = min(max(end, 2 * len(self._content), _STEP), self._size, HEADER_BYTES)
        while len(self._content) < wanted:
            more = os.pread(self._descriptor, wanted - len(self._content), len(self._content))
            if not more:
                self.refuse("the file became shorter while it was read")
            self._content += more


class Texts(NamedTuple):
    """A list of texts as stored: each text's length, then its bytes."""

    content: bytes
    length: int

    def decode(self) -> list[str]:
        """Return the texts. Raises UnicodeDecodeError."""
        found, at, unpack = [], 0, struct.Struct("<Q").unpack_from
        for _ in range(self.length):
            begin = at + 8
            at = begin + unpack(self.content, at)[0]
            found.append(self.content[begin:at].decode())
        return found


class Metadata:
    """The keys and values of a header. Methods that return a value raise CheckpointError if it has another type."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    @classmethod
    def parse(cls, cursor: Cursor, count: int) -> Metadata:
        """Read `count` keys with their values. Raises CheckpointError."""
        values: dict[str, Any] = {}
        for _ in range(count):
            key = _decoded(cursor, cursor.text(LONGEST_KEY), f"a key before byte {cursor.at}")
            if key in values:
                cursor.refuse(f"{key} occurs twice")
            values[key] = _value(cursor, key, cursor.number("I"))
        return cls(cursor.path, values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> list[str]:
        return list(self._values)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer that is not negative. Without `default` the key must exist."""
        return int(self._get(key, default, "an integer", lambda value: type(value) is int and value >= 0))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number. Without `default` the key must exist."""
        return float(
            self._get(key, default, "a number", lambda value: type(value) in (int, float) and math.isfinite(value))
        )

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean. Without `default` the key must exist."""
        return bool(self._get(key, default, "true or false", lambda value: type(value) is bool))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text. Without `default` the key must exist."""
        return str(self._get(key, default, "a text", lambda value: type(value) is str))

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """Return a list of texts. Without `default` the key must exist."""
        if default is not None and key not in self._values:
            return default
        found: Texts = self._get(key, None, "a list of texts", lambda value: type(value) is Texts)
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {key}: a text is not UTF-8: {error.reason}") from error

    def numbers(self, key: str) -> array[Any]:
        """Return a list of numbers."""
        found: array[Any] = self._get(key, None, "a list of numbers", lambda value: type(value) is array)
        return found

    def each(self, key: str, count: int) -> list[int]:
        """Return an integer for each of `count` layers, from a list or from one integer for all."""
        if type(self._values.get(key)) is not array:
            return [self.integer(key)] * count
        found = self.numbers(key)
        if len(found) != count or found.typecode in "fd" or min(found, default=0) < 0:
            raise self.error(key, f"{count} integers", found.tolist()[:8])
        return list(found)

    def error(self, key: str, expected: str, found: object) -> CheckpointError:
        """Return the error for a wrong value of `key`."""
        return CheckpointError(f"{self.path}: {key}: expected {expected}, found {_shown(found)}")

    def _get(self, key: str, default: Any, expected: str, fits: Any) -> Any:
        if key not in self._values:
            if default is None:
                raise CheckpointError(f"{self.path}: {key} is missing")
            return default
        if not fits(value := self._values[key]):
            raise self.error(key, expected, value)
        return value


def _value(cursor: Cursor, key: str, kind: int) -> Any:
    if kind == _TEXT:
        return _decoded(cursor, cursor.text(), key)
    if kind == _LIST:
        inner, count = cursor.number("I"), cursor.number("Q")
        if inner == _TEXT:
            return cursor.texts(count)
        if inner not in _SCALARS:
            cursor.refuse(f"{key}: a list of type {inner}")
        found = array(_SCALARS[inner])
        found.frombytes(cursor.bytes(count * found.itemsize))
        return found
    if kind not in _SCALARS:
        cursor.refuse(f"{key}: a value of type {kind}")
    value = cursor.number(_SCALARS[kind])
    if kind != _BOOLEAN:
        return value
    if value > 1:
        cursor.refuse(f"{key}: expected 0 or 1, found {value}")
    return bool(value)


def _decoded(cursor: Cursor, content: bytes, what: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        cursor.refuse(f"{what}: not UTF-8: {error.reason}")


def _shown(value: object) -> str:
    if isinstance(value, Texts):
        return f"a list of {value.length} texts"
    if isinstance(value, array):
        return f"a list of {len(value)} numbers"
    shown = repr(value)
    return shown if len(shown) <= 64 else f"{shown[:60]}..."
