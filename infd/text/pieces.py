"""The text that each token id adds.

Nearly all generating models use one of two families of decoders. This module recognises
these decoders by their configuration and converts them to a table, so that decoding a
token is one look-up. The tokenizers library runs other decoders.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class BytePieces(Struct, frozen=True, tag=True):
    """Byte-level BPE: each id decodes to bytes, an id without a token to none; the joined bytes are UTF-8 text."""

    table: list[bytes]

    def without(self, ids: Collection[int]) -> BytePieces:
        return BytePieces([b"" if token_id in ids else piece for token_id, piece in enumerate(self.table)])

    def bytes_of(self, token_id: int) -> bytes:
        return self.table[token_id] if token_id < len(self.table) else b""


class TextPieces(Struct, frozen=True, tag=True):
    """SentencePiece and similar decoders: an id decodes to text, or to one byte (an int) of a run of bytes in UTF-8.

    The table maps ids without a token to None; such an id does not end a run of bytes.

    first       table for the first id of a text, which adds no leading space; None: `table` applies to all ids
    drop_space  whether decoding removes one space at the start of a text
    """

    table: list[str | int | None]
    first: list[str | None] | None = None
    drop_space: bool = False

    def without(self, ids: Collection[int]) -> TextPieces:
        table = [None if token_id in ids else piece for token_id, piece in enumerate(self.table)]
        return TextPieces(table, self.first, self.drop_space)

    def bytes_of(self, token_id: int) -> bytes:
        piece = self.table[token_id] if token_id < len(self.table) else None
        if piece is None:
            return b""
        return piece.encode() if isinstance(piece, str) else bytes([piece])


def recognise(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> BytePieces | TextPieces | None:
    """Return the table of a known decoder, None for any other decoder.

    vocabulary  ids by token, without added tokens
    """
    if backend.decoder is None:
        return None
    tokens = _tokens(backend, vocabulary)
    match _steps(json.loads(backend.decoder.__getstate__())):
        case [{"type": "ByteLevel"}]:
            return BytePieces(_byte_level(tokens))
        case [{"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}]:
            return TextPieces(
                list(_replaced(tokens, mark, " ")), None if scheme == "never" else _replaced(tokens, mark, "")
            )
        case [{"type": "Replace", "pattern": {"String": mark}, "content": space}, {"type": "ByteFallback"}, *rest]:
            pieces = [None if text is None else _text_or_byte(text) for text in _replaced(tokens, mark, space)]
            match rest:
                case [] | [{"type": "Fuse"}]:
                    return TextPieces(pieces)
                case [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
                    return TextPieces(pieces, drop_space=True)
    return None


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _tokens(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> list[str | None]:
    """Return tokens by id. An added token replaces a token of the vocabulary with the same id."""
    added = backend.get_added_tokens_decoder()
    by_id: list[str | None] = [None] * (1 + max(chain(vocabulary.values(), added), default=-1))
    for token, token_id in vocabulary.items():
        by_id[token_id] = token
    for token_id, added_token in added.items():
        by_id[token_id] = added_token.content
    return by_id


def _replaced(tokens: list[str | None], mark: str, text: str) -> list[str | None]:
    return [None if token is None else token.replace(mark, text) for token in tokens]


def _text_or_byte(token: str) -> str | int:
    byte = _BYTE_TOKEN.fullmatch(token)
    return token if byte is None else int(byte[1], 16)


def _byte_level(tokens: list[str | None]) -> list[bytes]:
    """Decode tokens of byte-level BPE, which writes bytes as printable characters.

    A byte whose Latin-1 character is printable is written as this character. The other
    68 bytes are written, in order, as the characters from code point 256 on. A token
    with any other character is plain text.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}
    not_latin_1 = 0xFFFF
    alphabet |= dict.fromkeys(others, not_latin_1)

    def spelled(token: str | None) -> bytes:
        if token is None:
            return b""
        try:
            return token.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()

    return [spelled(token) for token in tokens]
