"""JSON too large to be encoded, joined or sent at once, as a list of bytes objects.

Lists may share bytes objects: JSON that several choices repeat is encoded and stored once.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from msgspec import Struct

T = TypeVar("T")
Pieces = list[bytes]

# Tokens whose log-probabilities are encoded in one piece: with 20 alternatives each, about 30 KB in half a millisecond.
PIECE_TOKENS: Final = 16


def placeholder(name: str) -> Any:
    """Return a placeholder for a Struct's field that is encoded separately; `substitute` inserts the field's JSON.

    An encoded placeholder begins and ends with a byte that UTF-8 never contains, so no text equals a placeholder.
    """
    return msgspec.Raw(b"\xff%b\xff" % name.encode())


def substitute(struct: Struct, values: Mapping[str, Pieces]) -> Pieces:
    """Return the JSON of a Struct, with each placeholder replaced by the value of its name."""
    pieces: Pieces = []
    for number, piece in enumerate(msgspec.json.encode(struct).split(b"\xff")):
        pieces += values[piece.decode()] if number % 2 else (piece,)
    return pieces


def enclosed(struct: Struct, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of a Struct with one placeholder, which becomes the array of the items, each given in pieces."""
    before, _, after = msgspec.json.encode(struct).split(b"\xff")
    return listed(items, before, after)


def listed(items: Iterable[Iterable[bytes]], before: bytes = b"", after: bytes = b"") -> Iterator[bytes]:
    """Yield the JSON of an array of encoded items, each given in pieces, between `before` and `after`.

    Brackets and separators are parts of these pieces: a short answer has few, because each passes several generators.
    """
    opening, closing = before + b"[", before + b"[]" + after
    for item in items:
        for piece in item:
            yield opening + piece
            opening = b""
        opening, closing = b",", b"]" + after
    yield closing


def elements(blocks: Iterable[Sequence[Any]]) -> Pieces:
    """Return the JSON of an array's elements without the brackets, encoded block by block."""
    pieces: Pieces = []
    for block in blocks:
        add(pieces, block)
    return pieces


def add(pieces: Pieces, block: Sequence[Any]) -> None:
    """Encode a non-empty block and append it to an array's elements."""
    extend(pieces, [msgspec.json.encode(block)[1:-1]])


def extend(pieces: Pieces, elements: Pieces) -> None:
    """Append encoded elements to an array's elements."""
    if pieces and elements:
        pieces.append(b",")
    pieces += elements


def array(*lists: Pieces) -> Pieces:
    """Return the JSON of an array, given its elements in lists; a list may be empty."""
    pieces: Pieces = [b"["]
    for elements in lists:
        if elements and len(pieces) > 1:
            pieces.append(b",")
        pieces += elements
    pieces.append(b"]")
    return pieces


def arrays(elements: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """Return the JSON of several arrays by name, given the elements of each array by name."""
    return {name: array(pieces) for name, pieces in elements.items()}


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items; the last list may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def joined(pieces: Iterable[bytes], min_bytes: int) -> Iterator[bytes]:
    """Yield pieces joined to at least `min_bytes` bytes; the last item may be shorter."""
    waiting: Pieces = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= min_bytes:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
