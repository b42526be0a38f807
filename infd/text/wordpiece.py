"""Encode short ASCII texts of BERT's tokenizers: one regular expression for the words, one look-up for most of them.

The tokenizers library keeps the origin of every character through each of its stages, which ids do not need: 30 words
take it 70 us, more than any other part of a short text to embed but the model's layers. The library encodes all other
texts: those with other characters or an added token, long texts, and texts with long words that are not in the
vocabulary.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from tokenizers import models, normalizers, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import tokenizers

MOST_CHARACTERS: Final = 1024  # of a text; its encoding holds the GIL for at most 2 ms
LONGEST_WORD: Final = 16  # characters of a word that is divided into pieces, in time that grows with their square

_PLAIN: Final = re.compile(r"[\t\n\r -~]*")  # characters that BERT's normalizer neither removes nor divides
_WORDS: Final = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
_PROBE: Final = "a"


class WordPieces:
    """The vocabulary of a tokenizer that `recognise` has recognised.

    prefix         of pieces that continue a word
    unknown        id of words that cannot be divided into pieces
    lower          whether texts are converted to lower case
    added          contents of added tokens
    before, after  ids of the special tokens around a text
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        *,
        prefix: str,
        unknown: int,
        lower: bool,
        added: Sequence[str],
        before: Sequence[int],
        after: Sequence[int],
    ) -> None:
        self._vocabulary = vocabulary
        self._prefix = prefix
        self._unknown = unknown
        self._lower = lower
        self._added = added
        self._before, self._after = before, after

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Return the ids of a text; None: the library must encode this text."""
        if len(text) > MOST_CHARACTERS or not _PLAIN.fullmatch(text) or any(token in text for token in self._added):
            return None
        ids = [*self._before] if add_special_tokens else []
        for word in _WORDS.findall(text.lower() if self._lower else text):
            if (found := self._vocabulary.get(word)) is not None:
                ids.append(found)
            elif len(word) <= LONGEST_WORD:
                ids += self._pieces(word)
            else:
                return None
        if add_special_tokens:
            ids += self._after
        return ids

    def _pieces(self, word: str) -> list[int]:
        """Divide a word into the longest pieces of the vocabulary, from left to right."""
        ids: list[int] = []
        begin, prefix = 0, ""
        while begin < len(word):
            for end in range(len(word), begin, -1):
                if (found := self._vocabulary.get(prefix + word[begin:end])) is not None:
                    break
            else:
                return [self._unknown]
            ids.append(found)
            begin, prefix = end, self._prefix
        return ids


def recognise(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> WordPieces | None:
    """Return the vocabulary of a tokenizer with BERT's model, normalizer and pre-tokenizer; None for any other.

    vocabulary  ids by token, without added tokens
    """
    model, normalizer = backend.model, backend.normalizer
    if not (
        type(model) is models.WordPiece
        and type(normalizer) is normalizers.BertNormalizer
        and type(backend.pre_tokenizer) is pre_tokenizers.BertPreTokenizer
        and model.unk_token in vocabulary
        and max(map(len, vocabulary)) <= model.max_input_chars_per_word  # else the library knows no longer words
    ):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.normalized for token in added):  # sought in the normalized text
        return None
    around = _around(backend)
    if around is None:
        return None
    return WordPieces(
        vocabulary,
        prefix=model.continuing_subword_prefix,
        unknown=vocabulary[model.unk_token],
        lower=normalizer.lowercase,
        added=[token.content for token in added],
        before=around[0],
        after=around[1],
    )


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the special tokens before and after a text; None if the post-processor does more than add them."""
    plain = backend.encode(_PROBE, add_special_tokens=False)
    whole = backend.encode(_PROBE, add_special_tokens=True)
    if len(plain.ids) != 1 or whole.ids.count(*plain.ids) != 1 or any(plain.type_ids + whole.type_ids):
        return None
    at = whole.ids.index(*plain.ids)
    return whole.ids[:at], whole.ids[at + 1 :]
