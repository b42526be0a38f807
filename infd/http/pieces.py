"""JSON too large to be encoded, joined or sent at once, as a list of bytes objects.

Lists may share bytes objects: a part that several choices repeat is encoded and stored once.
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


def hole(name: str) -> Any:
    """Return a placeholder for a Struct's field that is encoded separately; `filled` inserts the field's JSON.

    An encoded placeholder begins and ends with a byte that UTF-8 never contains, so no text equals a placeholder.
    """
    return msgspec.Raw(b"\xff%b\xff" % name.encode())


def filled(around: Struct, fillings: Mapping[str, Pieces]) -> Pieces:
    """Return the JSON of a Struct, with each hole replaced by the filling of its name."""
    pieces: Pieces = []
    for number, piece in enumerate(msgspec.json.encode(around).split(b"\xff")):
        pieces += fillings[piece.decode()] if number % 2 else (piece,)
    return pieces


def elements(blocks: Iterable[Sequence[Any]]) -> Pieces:
    """Return the JSON of an array's elements without the brackets, encoded block by block."""
    pieces: Pieces = []
    for block in blocks:
        add(pieces, block)
    return pieces


def add(pieces: Pieces, block: Sequence[Any]) -> None:
    """Encode a non-empty block and append it to an array's elements."""
    extend(pieces, [msgspec.json.encode(block)[1:-1]])


def extend(pieces: Pieces, more: Pieces) -> None:
    """Append encoded elements to an array's elements."""
    if pieces and more:
        pieces.append(b",")
    pieces += more


def array(*parts: Pieces) -> Pieces:
    """Return the JSON of an array, given its `elements` in parts; a part may be empty."""
    pieces: Pieces = [b"["]
    for part in parts:
        if part and len(pieces) > 1:
            pieces.append(b",")
        pieces += part
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


def joined(pieces: Pieces, least: int) -> Iterator[bytes]:
    """Yield pieces joined to at least `least` bytes; the last item may be shorter."""
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
