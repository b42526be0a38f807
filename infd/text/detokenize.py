"""Convert a stream of token ids to text, in whole characters.

Returned text is never revoked, and all returned texts joined are the text of all ids.
Every generated token passes through this module, so its speed matters.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING, Protocol

from infd.text.pieces import BytePieces, TextPieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one stream of ids.

    drops_space  whether a space at the start of the next text is removed
    """

    @property
    def drops_space(self) -> bool: ...

    def feed(self, ids: Sequence[int]) -> str:
        """Append ids; return the text that is now complete. Ids without a token add nothing."""

    def flush(self) -> str:
        """End the stream; return replacement characters for an incomplete character."""


def with_table(pieces: BytePieces | TextPieces) -> Detokenizer:
    """Return a detokenizer that looks each id up in a table."""
    return _ByteText(pieces) if isinstance(pieces, BytePieces) else _PieceText(pieces)


class _ByteText:
    """A detokenizer of ids that decode to bytes of UTF-8; a character may span several ids."""

    __slots__ = ("_table", "_tail")

    drops_space = False

    def __init__(self, pieces: BytePieces) -> None:
        self._table = pieces.table
        self._tail = b""

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        try:
            data = table[ids[0]] if len(ids) == 1 else b"".join([table[token_id] for token_id in ids])
        except IndexError:  # the model's vocabulary may be padded beyond the tokenizer's
            data = b"".join([table[token_id] for token_id in ids if token_id < len(table)])
        if self._tail:
            data = self._tail + data
        text, used = utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._tail, "replace", True)
        self._tail = b""
        return text


class _PieceText:
    """A detokenizer of ids that each decode to text or to one byte.

    If a run of bytes is not UTF-8, the tokenizers library replaces each byte of the run
    with a replacement character. This class replaces bytes only from the end of the last
    complete character before the run's first bad byte, because earlier characters
    have been sent. Waiting for the end of each run instead would delay stop strings by a
    token, because in many models a newline is a byte.
    """

    __slots__ = ("_broken", "_drop_space", "_first", "_run", "_table")

    def __init__(self, pieces: TextPieces) -> None:
        self._table = pieces.table
        self._first = pieces.first
        self._drop_space = pieces.drop_space
        self._run = b""
        self._broken = False

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        parts: list[str] = []
        for token_id in ids:
            piece = table[token_id] if token_id < len(table) else None
            if piece is None:
                continue
            if isinstance(piece, int):
                parts.append(self._byte(piece))
                continue
            if self._run or self._broken:
                parts.append(self._end_run())
            if self._first is not None:
                piece = self._first[token_id] or ""
                self._first = None
            parts.append(piece)
        return self._opened("".join(parts))

    def flush(self) -> str:
        return self._opened(self._end_run())

    @property
    def drops_space(self) -> bool:
        return self._first is not None or self._drop_space

    def _byte(self, byte: int) -> str:
        if self._broken:
            return _REPLACEMENT
        run = self._run + bytes([byte])
        try:
            text, used = utf_8_decode(run, "strict", False)
        except UnicodeDecodeError:
            self._broken, self._run = True, b""
            return _REPLACEMENT * len(run)
        self._run = run[used:]
        return text

    def _end_run(self) -> str:
        text = _REPLACEMENT * len(self._run)
        self._broken, self._run = False, b""
        return text

    def _opened(self, text: str) -> str:
        if text and self._drop_space:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


class WindowText:
    """A detokenizer for a decoder without a table. Decodes the latest ids again, together with the new ids."""

    __slots__ = ("_decode", "_returned", "_returned_text", "_visible", "_window")

    drops_space = False  # not known for such a decoder

    # Text that ends with a replacement character is held back while it has fewer ids than PATIENCE. No character spans
    # PATIENCE ids, so the replacement character is then final.
    PATIENCE = 16

    def __init__(self, decode: Callable[[Sequence[int]], str], visible: Callable[[int], bool]) -> None:
        """`decode` converts ids to text. `visible` returns whether an id adds text; other ids are dropped."""
        self._decode = decode
        self._visible = visible
        self._window: list[int] = []
        self._returned = 0  # number of the window's ids whose text has been returned
        self._returned_text = ""

    def __copy__(self) -> WindowText:
        text = WindowText(self._decode, self._visible)
        text._window = list(self._window)
        text._returned, text._returned_text = self._returned, self._returned_text
        return text

    def feed(self, ids: Sequence[int]) -> str:
        # The window contains only visible ids, because decoders treat the first token of a text differently.
        visible = [token_id for token_id in ids if self._visible(token_id)]
        if not visible:
            return ""
        self._window += visible
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._returned < self.PATIENCE:
            return ""
        return self._return(text)

    def flush(self) -> str:
        if len(self._window) == self._returned:
            return ""
        return self._return(self._decode(self._window))

    def _return(self, text: str) -> str:
        added = text[len(self._returned_text) :]
        del self._window[: self._returned]
        self._returned = len(self._window)
        self._returned_text = self._decode(self._window)
        return added
