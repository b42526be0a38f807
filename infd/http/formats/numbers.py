"""Write the numbers of pooled prompts: as JSON, or as base64 of their bytes in several types."""

from __future__ import annotations

import binascii
import struct
from array import array
from functools import cache
from itertools import pairwise
from math import inf
from sys import byteorder
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec import Struct

from infd.http.pieces import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from infd.request import Pooled

Dtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]

FLOAT_BYTES = 4
# Of float32, encoded as one piece of base64. Thirds of it are whole numbers of every type, so no piece needs padding.
BLOCK_BYTES: Final = 3 * 2**10 * FLOAT_BYTES
INFINITE_KEY: Final = 0x7F80  # upper half of an infinite float32
HALF_LARGEST = 65504.0


class Encoding(Struct, frozen=True):
    """How numbers are written. dtype, endianness: of base64, which OpenAI's clients read as little-endian float32."""

    base64: bool = False
    dtype: Dtype = "float32"
    endianness: Endianness = "little"

    def json(self, pooled: Pooled, *, by_token: bool) -> Iterable[bytes]:
        """Return the JSON of one input's numbers in pieces: a list, by token a list of lists, or a string of base64.

        Each piece takes about a millisecond, however many tokens the input has.
        """
        if self.base64:
            return self._base64(pooled.values)
        if by_token:
            return listed((msgspec.json.encode(row),) for row in rows(pooled))
        return (msgspec.json.encode(numbers(pooled)),)

    def _base64(self, values: bytes) -> Iterator[bytes]:
        yield b'"'
        for start in range(0, len(values), BLOCK_BYTES):
            yield binascii.b2a_base64(self._bytes(values[start : start + BLOCK_BYTES]), newline=False)
        yield b'"'

    def _bytes(self, values: bytes) -> bytes:
        order = byteorder if self.endianness == "native" else self.endianness
        if self.dtype == "float32":
            found, size = values, FLOAT_BYTES
        elif self.dtype in ("float16", "bfloat16"):
            found, size = (_halves if self.dtype == "float16" else _brains)(values), 2
        else:
            return _eighths(values, self.dtype)
        return found if order == "little" else _swapped(found, size)


def numbers(pooled: Pooled) -> tuple[float, ...]:
    """Return all numbers of an input, row after row."""
    return struct.unpack(f"<{len(pooled.values) // FLOAT_BYTES}f", pooled.values)


def rows(pooled: Pooled) -> Iterator[tuple[float, ...]]:
    """Yield the numbers of each row."""
    return struct.iter_unpack(f"<{pooled.width}f", pooled.values)


def _halves(values: bytes) -> bytes:
    """Convert to IEEE float16, ties to even; numbers beyond its range become infinite."""
    found = struct.unpack(f"<{len(values) // FLOAT_BYTES}f", values)
    try:
        return struct.pack(f"<{len(found)}e", *found)
    except OverflowError:
        limited = (each if abs(each) < HALF_LARGEST + 16 else each * inf for each in found)
        return struct.pack(f"<{len(found)}e", *limited)


def _brains(values: bytes) -> bytes:
    """Convert to bfloat16, ties to even: the upper half of a float32."""
    found = struct.unpack(f"<{len(values) // FLOAT_BYTES}I", values)
    return struct.pack(f"<{len(found)}H", *[(each + 0x7FFF + (each >> 16 & 1)) >> 16 & 0xFFFF for each in found])


def _eighths(values: bytes, dtype: Dtype) -> bytes:
    """Convert to 8-bit floats, ties to even, as torch does: numbers beyond the range become the largest number of
    e4m3, which has no infinity, and infinite in e5m2.
    """
    codes = _codes(dtype)
    found = struct.unpack(f"<{len(values) // FLOAT_BYTES}I", values)
    return bytes([codes[each >> 16 | (each & 0xFFFF != 0)] for each in found])


@cache
def _codes(dtype: Dtype) -> bytes:
    """Return the code of an 8-bit type by key: the upper half of a float32, its last bit set if the lower half has any.

    Every middle between two neighbours of the type is a float32 whose lower half and last bit are 0, so the key decides
    on which side of it a number is.
    """
    bits, bias, last, beyond = (3, 7, 0x7E, 0x7E) if dtype == "fp8_e4m3" else (2, 15, 0x7B, 0x7C)
    magnitudes = []
    for code in range(last + 2):  # one more, which is not finite, for the last middle
        exponent, fraction = code >> bits, code & ((1 << bits) - 1)
        scale = 2.0 ** (max(exponent, 1) - bias - bits)
        magnitudes.append((fraction + ((1 << bits) if exponent else 0)) * scale)
    codes = bytearray()
    for code, (low, high) in enumerate(pairwise(magnitudes)):
        middle = int.from_bytes(struct.pack(">f", (low + high) / 2)[:2])
        codes += bytes([code]) * (middle - len(codes))
        codes.append(code + (code & 1))  # a tie goes to the even code
    codes += bytes([beyond]) * (INFINITE_KEY + 1 - len(codes))
    codes += b"\x7f" * (INFINITE_KEY + 0x80 - len(codes))  # not a number
    return bytes(codes + bytes(code | 0x80 for code in codes))


def _swapped(values: bytes, size: int) -> bytes:
    found = array("I" if size == FLOAT_BYTES else "H", values)
    found.byteswap()
    return found.tobytes()
