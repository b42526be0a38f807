"""Find the tokens that contain, or begin, the strings that end a repetition (DRY's sequence breakers).

As in llama.cpp: a token that contains the string is a breaker; a token that ends with the string's beginning is one if
the tokens of the string's rest follow it.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import OrderedDict
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Final

from infd.errors import InvalidRequest, Unsupported
from infd.request import Breakers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SEPARATOR: Final = b"\xff"  # no byte of UTF-8
LONGEST_TAIL: Final = 20  # tokens
MOST_TAILS: Final = 31
KEPT: Final = 64  # sets of strings whose breakers are kept


class BreakerIndex:
    """Finds breakers in a vocabulary. The methods may be called on any thread."""

    def __init__(self, spellings: Sequence[bytes], encode: Callable[[str], list[int]]) -> None:
        """Index the vocabulary.

        spellings  the bytes of each token
        encode     returns the tokens of a text, without special tokens
        """
        tokens = [spelling.replace(SEPARATOR, b"\xfe") for spelling in spellings]
        self._text = SEPARATOR + SEPARATOR.join(tokens) + SEPARATOR
        self._begins = list(accumulate((len(token) + 1 for token in tokens[:-1]), initial=1))
        self._encode = encode
        self._found: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()
        self._lock = Lock()

    def known(self, strings: tuple[str, ...]) -> Breakers | None:
        """Return the breakers of strings that were found before."""
        with self._lock:
            if strings in self._found:
                self._found.move_to_end(strings)
            return self._found.get(strings)

    def find(self, strings: tuple[str, ...]) -> Breakers:
        """Return the breakers for any of the strings, in about a millisecond per byte. Raises InvalidRequest."""
        whole: set[int] = set()
        heads: dict[tuple[int, ...], set[int]] = {}
        for text in strings:
            within = self._ids(text.encode())
            whole |= within
            for split in range(1, len(text)):
                ending = self._ids(text[:split].encode() + SEPARATOR) - within
                if ending:
                    heads.setdefault(tuple(self._encode(text[split:])[:LONGEST_TAIL]), set()).update(ending)
        heads.pop((), None)
        if len(heads) > MOST_TAILS:
            raise InvalidRequest(
                f"dry_sequence_breakers may begin in one token and end in others in {MOST_TAILS} ways; these do in"
                f" {len(heads)}: shorten them",
                param="dry_sequence_breakers",
            )
        ids = (b"".join(token.to_bytes(4, "little") for token in sorted(each)) for each in (whole, *heads.values()))
        found = Breakers(tuple(ids), tuple(heads))
        with self._lock:
            self._found[strings] = found
            if len(self._found) > KEPT:
                self._found.popitem(last=False)
        return found

    def _ids(self, part: bytes) -> set[int]:
        """Return the ids of the tokens that contain `part`, or end with it if it ends with SEPARATOR."""
        return {bisect(self._begins, match.start()) - 1 for match in re.finditer(re.escape(part), self._text)}


def index_of(spellings: Sequence[bytes] | None, encode: Callable[[str], list[int]]) -> BreakerIndex:
    """Return the index of a vocabulary. Raises Unsupported if `spellings` is None."""
    if spellings is None:
        raise Unsupported("dry_multiplier (this tokenizer's tokens have no text of their own)", param="dry_multiplier")
    return BreakerIndex(spellings, encode)
