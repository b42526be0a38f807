"""Texts that are encoded without the tokenizers library have its ids; all others are left to it."""

from __future__ import annotations

import string
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors

from infd.text.checkpoint import Additions
from infd.text.cutting import Cut, Encoded, Passage
from infd.text.tokenizer import Library
from infd.text.wordpiece import LONGEST_WORD, MOST_CHARACTERS, WordPieces, recognise

SPECIAL = ["[CLS]", "[SEP]", "[UNK]", "[MASK]"]
WORDS = [
    "a",
    "b",
    "ab",
    "abc",
    "no",
    "##a",
    "##b",
    "##bc",
    "##no",
    "A",
    "No",
    "-",
    ",",
    "[",
    "]",
    "##",
    "7",
    "##7",
    "un",
]
ADDED = Additions((), tuple(SPECIAL), split_special=False)
IDS = [("[CLS]", 0), ("[SEP]", 1)]
BERT = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=IDS)


def tokenizer(post: Any = BERT, **normalized: bool) -> tokenizers.Tokenizer:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(**normalized)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = post
    made.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def recognised(backend: tokenizers.Tokenizer) -> WordPieces:
    found = recognise(backend, backend.get_vocab(with_added_tokens=False))
    assert found is not None
    return found


LOWER, CASED = tokenizer(), tokenizer(lowercase=False)
WORDS_OF = {id(backend): recognised(backend) for backend in (LOWER, CASED)}
TEXTS = st.one_of(
    st.text(st.sampled_from("abcnoAN7[]-, \t\n")),
    st.lists(st.sampled_from([*SPECIAL, *WORDS, "abno", "noo", "x", "cls", "\u00e4", "\x00", "\x0b"])).map("".join),
    st.text(st.sampled_from(string.printable + "\u00e4\u4e2d\u2009\u200b\x7f\x85")),
)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.booleans(), st.sampled_from([LOWER, CASED]))
@example("", True, LOWER)
@example("a[CLS]b", True, LOWER)
@example("ab" * LONGEST_WORD, False, LOWER)
@example("abX" + "b" * 200, False, CASED)
def test_ids_are_those_of_the_library(text: str, special: bool, backend: tokenizers.Tokenizer):
    found = WORDS_OF[id(backend)].encode(text, add_special_tokens=special)

    assert found is None or found == backend.encode(text, add_special_tokens=special).ids


@pytest.mark.parametrize("text", ["ab abc, no-no 7!", "Ab\tNo\nb", "", "abno unx"])
def test_plain_texts_are_not_left_to_the_library(text: str):
    assert recognised(LOWER).encode(text, add_special_tokens=True) == LOWER.encode(text).ids


@pytest.mark.parametrize(
    "text", ["\u00e4", "a\x00b", "a\x0bb", "a [SEP] b", "x" * (LONGEST_WORD + 1), "a " * (MOST_CHARACTERS // 2 + 1)]
)
def test_the_library_encodes_what_is_not_plain(text: str):
    assert recognised(LOWER).encode(text, add_special_tokens=True) is None


def test_other_tokenizers_are_left_to_the_library():
    def no(backend: tokenizers.Tokenizer) -> bool:
        return recognise(backend, backend.get_vocab(with_added_tokens=False)) is None

    assert not no(tokenizer())
    level = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    level.normalizer, level.pre_tokenizer = LOWER.normalizer, LOWER.pre_tokenizer
    assert no(level)
    for name, part in (
        ("normalizer", normalizers.Lowercase()),
        ("normalizer", normalizers.Sequence([normalizers.BertNormalizer()])),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("model", models.WordPiece({"a": 0}, unk_token="[UNK]")),
        ("model", models.WordPiece({"[UNK]": 0, "a" * 9: 1, "a": 2}, unk_token="[UNK]", max_input_chars_per_word=8)),
    ):
        other = tokenizer()
        setattr(other, name, part)
        assert no(other), part
    normalized = tokenizer()
    normalized.add_tokens([tokenizers.AddedToken("new", normalized=True)])
    assert no(normalized)


@pytest.mark.parametrize("single", ["[CLS] $A $A", "[CLS]:1 $A [SEP]", "[CLS] $A:1 [SEP]"])
def test_a_template_that_does_more_than_enclose_a_text_is_left_to_the_library(single: str):
    post = processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=IDS)
    backend = tokenizer(post)
    assert recognise(backend, backend.get_vocab(with_added_tokens=False)) is None


def test_a_tokenizers_texts_are_encoded_so_unless_they_are_cut_or_pairs():
    backend = tokenizer()
    library = Library(backend, ADDED)
    pairs = library.encode_passages([Passage(("a", "b"))], add_special_tokens=True, cut=Cut())
    assert pairs == [Encoded([0, 4, 1, 5, 1], 3)]
    (cut,) = library.encode_passages([Passage(("a b ab no",))], add_special_tokens=True, cut=Cut(4))
    assert cut == Encoded([0, 4, 5, 1])
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    (whole,) = library.encode_passages([Passage(("a b",))], add_special_tokens=True, cut=Cut(4))
    assert whole == Encoded([0, 4, 5, 1])
