"""Tell from a text's length how many tokens it has at least, so that one far too long is refused unread.

No token stands for more characters than the longest piece of the vocabulary.
That holds where every byte of a text ends up in some token: for byte-level BPE,
and for SentencePiece with bytes to fall back to. Where text may be dropped, or
swallowed by an unknown token, nothing is said.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.rounding import ceil_div
from infd.text.pieces import BytePieces, TextPieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import tokenizers

    Piece = bytes | str | int | None

_COMPOSED: Final = 4  # the longest sequence of characters that Unicode composes into one
_SPACES: Final = tuple(chr(code) for code in range(0x3001) if chr(code).isspace())
_BYTES: Final = 256
_CONTINUING: Final = bytes(range(0x80, 0xC0))  # in UTF-8 every other byte begins a character


class Bound(Struct, frozen=True):
    """What one token may stand for at most.

    longest  characters of text
    strips   some token takes the spaces beside it along, however many
    """

    longest: int
    strips: bool

    def least_tokens(self, text: str) -> int:
        """Return the fewest tokens that `text` can have."""
        size = len(text)
        if self.strips:
            size -= sum(text.count(space) for space in _SPACES)
        return ceil_div(size, self.longest)


def bound(backend: tokenizers.Tokenizer, pieces: BytePieces | TextPieces | None) -> Bound | None:
    """Return what is known of a tokenizer, None if it may lose text."""
    if pieces is None or not _has_all_bytes(backend, pieces):
        return None
    if not all(_keeps_all(step) for step in _steps(backend.pre_tokenizer, "pretokenizers")):
        return None
    composed = 1
    for step in _steps(backend.normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                composed = _COMPOSED
            case {"type": "NFD" | "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass  # as many characters as before, or more
            case _:
                return None
    added = backend.get_added_tokens_decoder().values()
    longest = max([_longest(pieces.table), *(len(token.content) for token in added)])
    return Bound(longest * composed, strips=any(token.lstrip or token.rstrip for token in added))


def _steps(part: Any, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    pending = [] if part is None else [json.loads(part.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending[:0] = step[inner]
        else:
            yield step


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
    return False


def _has_all_bytes(backend: tokenizers.Tokenizer, pieces: BytePieces | TextPieces) -> bool:
    from tokenizers import models  # only here: whoever has no tokenizer need not import the library

    if not isinstance(backend.model, models.BPE):
        return False
    if isinstance(pieces, BytePieces):
        return len({piece for piece in pieces.table if len(piece) == 1}) == _BYTES
    return backend.model.byte_fallback and len({piece for piece in pieces.table if isinstance(piece, int)}) == _BYTES


def _longest(table: Iterable[Piece]) -> int:
    """Return how many characters the longest piece has, at least 1."""
    longest = 1
    for piece in table:
        if isinstance(piece, bytes | str) and len(piece) > longest:  # a character is a byte or more
            longest = max(longest, _characters(piece))
    return longest


def _characters(piece: bytes | str) -> int:
    return len(piece.translate(None, _CONTINUING)) if isinstance(piece, bytes) else len(piece)
