"""JSON that is too large to be encoded, joined or sent at once, as a list of bytes.

A list may hold bytes that other lists hold, too: what several choices repeat is encoded once, and kept once.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from msgspec import Struct

T = TypeVar("T")
Pieces = list[bytes]


def hole(name: str) -> Any:
    """Return a value of a Struct whose JSON is encoded apart; `filled` puts that in its place.

    Encoded, it begins and ends with a byte that UTF-8 does not have, so no text is taken for one.
    """
    return msgspec.Raw(b"\xff%b\xff" % name.encode())


def filled(around: Struct, fillings: Mapping[str, Pieces]) -> Pieces:
    """Return the JSON of a Struct with what belongs into its holes, by their names."""
    pieces: Pieces = []
    for number, piece in enumerate(msgspec.json.encode(around).split(b"\xff")):
        pieces += fillings[piece.decode()] if number % 2 else (piece,)
    return pieces


def elements(blocks: Iterable[Sequence[Any]]) -> Pieces:
    """Return the JSON of an array's elements without its brackets, encoded block by block."""
    pieces: Pieces = []
    for block in blocks:
        add(pieces, block)
    return pieces


def add(pieces: Pieces, block: Sequence[Any]) -> None:
    """Add some to an array's elements; at least one."""
    if pieces:
        pieces.append(b",")
    pieces.append(msgspec.json.encode(block)[1:-1])


def array(*parts: Pieces) -> Pieces:
    """Return the JSON of an array, given its `elements` in parts, of which some may be empty."""
    pieces: Pieces = []
    for part in parts:
        if part:
            pieces += b",", *part
    return [b"[", *pieces[1:], b"]"]


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of so many items; the last one has what is left."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def joined(pieces: Pieces, least: int) -> Iterator[bytes]:
    """Yield pieces joined until they have `least` bytes; the last ones may have fewer."""
    waiting: Pieces = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= least:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
