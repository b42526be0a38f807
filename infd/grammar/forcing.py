"""Find the tokens that a grammar forces, from its masks: all allowed tokens begin with the same bytes.

The tokens become drafts. A model writes a text in the tokens in which its tokenizer encodes it, so the forced text is
encoded as a whole. If its last token may merge with the text that follows, that token is left to the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from infd.errors import GrammarFailed
    from infd.grammar.protocol import Matcher, Vocabulary

    Fill = Callable[[Sequence[Matcher], NDArray[np.int32]], list[GrammarFailed | None]]

MOST_ALLOWED: Final = 48  # allowed tokens of a mask that is examined
TOKEN_BYTES: Final = 5  # bytes that are sought for each token; each byte takes a mask, 0.1 ms in all


def narrow(row: NDArray[np.int32]) -> bool:
    """Return whether a mask allows few enough tokens to be examined. Takes microseconds."""
    import numpy as np

    return int(np.count_nonzero(row)) <= MOST_ALLOWED and int(np.bitwise_count(row).sum()) <= MOST_ALLOWED


def forced(fill: Fill, vocabulary: Vocabulary, matcher: Matcher, row: NDArray[np.int32], most: int) -> list[int]:
    """Return at most `most` tokens that the grammar forces; none if the model has a choice. `matcher` does not change.

    fill  see Compiler.fill
    row   mask of the next token
    """
    ahead, rows, text = matcher.copy(), row[None].copy(), b""
    allowed: dict[int, list[int]] = {}  # by offset in the text
    while len(text) < most * TOKEN_BYTES and narrow(rows[0]):
        choices = _allowed(rows[0])
        if any(each in vocabulary.end_ids or each in vocabulary.special for each in choices):
            if len(choices) == 1 and not text and choices[0] not in vocabulary.end_ids:
                return choices
            break
        shortest = min(choices, key=lambda each: len(vocabulary.tokens[each]), default=None)
        if shortest is None:
            break
        begin = vocabulary.tokens[shortest]
        if not all(vocabulary.tokens[each].startswith(begin) for each in choices):
            break
        allowed[len(text)] = choices
        text += begin
        ahead.advance([shortest])
        if ahead.stopped:
            return _tokens(text, allowed, vocabulary)[:most]
        if fill([ahead], rows)[0] is not None:
            break
    found = _tokens(text, allowed, vocabulary)
    if found and _merges(len(vocabulary.tokens[found[-1]]), text, allowed, vocabulary):
        del found[-1]
    return found[:most]


def _allowed(row: NDArray[np.int32]) -> list[int]:
    """Return the tokens that a mask allows."""
    import numpy as np

    words = np.flatnonzero(row)
    bits = np.unpackbits(row[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    tokens: list[int] = (words[word] * 32 + bit).tolist()
    return tokens


def _tokens(text: bytes, allowed: dict[int, list[int]], vocabulary: Vocabulary) -> list[int]:
    """Return the tokens in which the tokenizer encodes a forced text.

    If the tokenizer adds a space to the beginning of texts, or the text ends within a character, return the longest
    tokens that the grammar allows, one behind the other.
    """
    try:
        encoded = vocabulary.encode(text.decode())
    except UnicodeDecodeError:
        encoded = []
    if b"".join(vocabulary.tokens[each] for each in encoded if each < len(vocabulary.tokens)) == text:
        return encoded
    found: list[int] = []
    at = 0
    while at in allowed:
        fitting = [each for each in allowed[at] if text.startswith(vocabulary.tokens[each], at)]
        found.append(max(fitting, key=lambda each: len(vocabulary.tokens[each])))
        at += len(vocabulary.tokens[found[-1]])
    return found


def _merges(last: int, text: bytes, allowed: dict[int, list[int]], vocabulary: Vocabulary) -> bool:
    """Return whether a longer token than the text's last one, of `last` bytes, is allowed in its place."""
    return any(len(vocabulary.tokens[each]) > last for each in allowed.get(len(text) - last, ()))
