"""Write the numbers of pooled prompts: as JSON, or as base64 of their bytes in several types."""

from __future__ import annotations

import binascii
import struct
from array import array
from bisect import bisect_left
from functools import cache
from itertools import pairwise
from math import inf, isnan
from sys import byteorder
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.request import Pooled

Dtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]

FLOAT_BYTES = 4
HALF_LARGEST = 65504.0


class Encoding(Struct, frozen=True):
    """How numbers are written. dtype, endianness: of base64, which OpenAI's clients read as little-endian float32."""

    base64: bool = False
    dtype: Dtype = "float32"
    endianness: Endianness = "little"

    def json(self, pooled: Pooled, *, by_token: bool) -> bytes:
        """Return the JSON of one input's numbers: a list, by token a list of lists, or a string of base64."""
        if self.base64:
            encoded = binascii.b2a_base64(self._bytes(pooled.values), newline=False)
            return b'"%b"' % encoded
        if not by_token:
            return msgspec.json.encode(numbers(pooled))
        return msgspec.json.encode(list(rows(pooled)))

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
    return struct.pack(f"<{len(found)}H", *((each + 0x7FFF + (each >> 16 & 1)) >> 16 & 0xFFFF for each in found))


def _eighths(values: bytes, dtype: Dtype) -> bytes:
    """Convert to 8-bit floats, ties to even, as torch does: numbers beyond the range become the largest number of
    e4m3, which has no infinity, and infinite in e5m2.
    """
    magnitudes, middles, beyond = _table(dtype)
    found = bytearray()
    for each in struct.unpack(f"<{len(values) // FLOAT_BYTES}f", values):
        size = abs(each)
        if isnan(size):
            code = 0x7F
        else:
            code = bisect_left(middles, size)
            if code < len(middles) and middles[code] == size:
                code += code & 1  # a tie goes to the even code
            if code >= len(magnitudes):
                code = beyond
        found.append(code | (0x80 if struct.pack("<f", each)[3] & 0x80 else 0))
    return bytes(found)


@cache
def _table(dtype: Dtype) -> tuple[Sequence[float], Sequence[float], int]:
    """Return the finite magnitudes of an 8-bit type by code, the middles between neighbours, and the code beyond."""
    bits, bias, last, beyond = (3, 7, 0x7E, 0x7E) if dtype == "fp8_e4m3" else (2, 15, 0x7B, 0x7C)
    magnitudes = []
    for code in range(last + 2):  # one more, which is not finite, for the last middle
        exponent, fraction = code >> bits, code & ((1 << bits) - 1)
        scale = 2.0 ** (max(exponent, 1) - bias - bits)
        magnitudes.append((fraction + ((1 << bits) if exponent else 0)) * scale)
    middles = [(low + high) / 2 for low, high in pairwise(magnitudes)]
    return magnitudes[:-1], middles, beyond


def _swapped(values: bytes, size: int) -> bytes:
    found = array("I" if size == FLOAT_BYTES else "H", values)
    found.byteswap()
    return found.tobytes()
