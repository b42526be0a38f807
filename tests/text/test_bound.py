"""No text has fewer tokens than its bound."""

from __future__ import annotations

import unicodedata

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from infd.text.bound import _COMPOSED
from tests.text.vocabularies import KINDS, TEXT, byte_level, sentencepiece, wrap

KNOWN = ("byte_level", "split_first", "sentencepiece", "sentencepiece_keeping_space")
ODD = "the dog <think>two words</s> \u3000\n\u0301\u0308\u1fbe\u212b\u1100\u1161\u11a8é你👍🏽"


def greedy() -> tokenizers.Tokenizer:
    """A tokenizer with long pieces: runs of spaces, and a token that includes the white space beside it."""
    backend = byte_level()
    backend.add_tokens([" " * 64])
    backend.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True)])
    backend.normalizer = normalizers.NFC()
    return backend


MADE = {name: wrap(KINDS[name]()) for name in KNOWN} | {"greedy": wrap(greedy())}


@given(
    name=st.sampled_from(sorted(MADE)),
    parts=st.lists(st.sampled_from([*TEXT, *ODD, *ODD.split(), "<|end|>", " " * 90])),
)
@example(name="greedy", parts=["<|end|>", " " * 5000])
@example(name="greedy", parts=["\u03b1\u0313\u0300\u0345"] * 100)
@example(name="greedy", parts=["\u1100\u1161\u11a8"] * 100)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_a_text_has_at_least_the_tokens_that_its_length_promises(name: str, parts: list[str]):
    text = "".join(parts)

    assert MADE[name].least_tokens(text) <= len(MADE[name].encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", KNOWN)
def test_the_bound_of_a_long_text_is_large(name: str):
    assert MADE[name].least_tokens("x" * 10**6) > 10**4


@pytest.mark.parametrize("name", sorted(KINDS.keys() - set(KNOWN)))
def test_without_lossless_text_there_is_no_bound(name: str):
    assert wrap(KINDS[name]()).least_tokens("x" * 10**6) == 0


def without_spaces() -> tokenizers.Tokenizer:
    backend = byte_level()
    split = pre_tokenizers.Split(" ", "removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def stripped() -> tokenizers.Tokenizer:
    backend = sentencepiece()
    backend.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", "\u2581")])
    return backend


@pytest.mark.parametrize("make", [without_spaces, stripped])
def test_a_step_that_drops_text_is_noticed(make):
    tokenizer = wrap(make())

    assert tokenizer.least_tokens(" " * 10**6) == 0
    assert len(tokenizer.encode(" " * 1000, add_special_tokens=False)) <= 1


def test_no_character_is_composed_of_more():
    assert max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000)) == _COMPOSED
