"""The fast loader builds the same tokenizer as the library."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from infd import embedded
from infd.text import bpe
from tests.text.vocabularies import KINDS, TEXT, byte_level


def described(**parts: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(byte_level().to_str())
    model = state["model"] | parts.pop("model", {})
    return state | parts | {"model": model}


def loaded(state: dict[str, Any]) -> bpe.Loaded | None:
    return bpe.load(json.dumps(state).encode())


def added(content: str, token_id: int, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": content, **usual, **flags}


def lines(state: dict[str, Any]) -> list[str]:
    return [" ".join(pair) for pair in state["model"]["merges"]]


CASES = {
    "as it is": described(),
    "lines instead of pairs": described(model={"merges": lines(described())}),
    "lines under a version": described(model={"merges": ["#version: 0.2", *lines(described())]}),
    "no merges": described(model={"merges": []}),
    "an unknown token": described(model={"unk_token": "<s>", "fuse_unk": True, "byte_fallback": True}),
    "affixes": described(model={"end_of_word_suffix": "</w>", "merges": []}),
    "merges ignored": described(model={"ignore_merges": True}),
    "dropout": described(model={"dropout": 0.5}),
    "ids that do not follow": described(added_tokens=[added("<late>", 999), added("<early>", 998, special=True)]),
    "an added token of the vocabulary": described(added_tokens=[added("the", 5, normalized=True), added("\u0120", 0)]),
    "special or not in turn": described(
        added_tokens=[
            added("<a>", 320, special=True),
            added("<b>", 321, lstrip=True),
            added("<c>", 322, special=True, rstrip=True),
            added("<d>", 323, single_word=True, normalized=True),
        ]
    ),
    "truncation and padding": described(
        truncation={"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_vocabulary_is_loaded_as_the_library_loads_it(case: str):
    theirs = tokenizers.Tokenizer.from_str(json.dumps(CASES[case]))

    ours = loaded(CASES[case])

    assert ours is not None
    assert ours.tokenizer.to_str() == theirs.to_str()
    assert ours.vocabulary == theirs.get_vocab(with_added_tokens=False)
    if case != "dropout":
        for text in TEXT:
            assert ours.tokenizer.encode(text).ids == theirs.encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_loaded_as_the_library_loads_it_or_left_to_it(kind: str):
    content = KINDS[kind]().to_str()

    ours = bpe.load(content.encode())

    assert (ours is None) == (json.loads(content)["model"]["type"] != "BPE")
    if ours is not None:
        assert ours.tokenizer.to_str() == tokenizers.Tokenizer.from_str(content).to_str()


def test_the_embedded_vocabulary_is_loaded_so():
    content = (embedded.path() / "tokenizer.json").read_bytes()

    ours = bpe.load(content)

    assert ours is not None
    assert ours.tokenizer.to_str() == tokenizers.Tokenizer.from_buffer(content).to_str()


@pytest.mark.parametrize(
    "state",
    [
        described(model={"merges": [["a", "nowhere"]]}),
        described(model={"merges": ["a  b"]}),
        described(model={"vocab": {"a": -1}, "merges": []}),
        described(model={"vocab": {"a": 2**40}, "merges": []}),
        described(model={"unheard_of": 1}),
        described(added_tokens=[{"id": 1, "content": "<a>"}]),
        described(version="9.9"),
        described(normalizer={"type": "Nothing"}),
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    ],
)
def test_a_file_in_another_form_is_left_to_the_library(state: dict[str, Any]):
    assert loaded(state) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_a_malformed_file_is_left_to_the_library(content: bytes):
    assert bpe.load(content) is None
