"""Vocabularies from metadata alone: which tokens a tokenizer.json has, and which of them end an answer."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from infd.errors import CheckpointError
from infd.gguf import vocabulary
from infd.gguf.metadata import Metadata, Texts
from infd.gguf.vocabulary import CONTROL, UNUSED, control_ids, tokenizer_json


def texts(*found: str) -> Texts:
    encoded = [text.encode() for text in found]
    return Texts(b"".join(len(each).to_bytes(8, "little") + each for each in encoded), len(encoded))


def metadata(tokens: tuple[str, ...], **more: Any) -> Metadata:
    keys = {"tokens": texts(*tokens), **more}
    values = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return Metadata(Path("model.gguf"), {"general.architecture": "llama", **values})


def test_an_id_without_a_token_is_not_in_the_vocabulary() -> None:
    tokens = ("a", "[PAD1]", "[PAD2]", "[PAD7]")  # the second alone is a name of an unused id
    types = array("i", [1, UNUSED, 1, UNUSED])
    found = tokenizer_json(metadata(tokens, model="gpt2", token_type=types, merges=texts()))

    assert found["model"]["vocab"] == {"a": 0, "[PAD2]": 2, "[PAD7]": 3}


def test_only_control_tokens_end_an_answer() -> None:
    tokens = ("<|end|>", "<|im_end|>", "a")
    found = metadata(tokens, token_type=array("i", [1, CONTROL, CONTROL]))

    assert control_ids(found, tokens, ("<|end|>", "<|im_end|>")) == [1]


def test_merges_follow_from_scores_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ("a", "b", "ab", "aab", "aa")
    found = metadata(tokens, model="llama", scores=array("f", [0, 0, -2, -3, -1]))

    assert tokenizer_json(found)["model"]["merges"] == [("a", "a"), ("a", "b"), ("a", "ab"), ("aa", "b")]
    monkeypatch.setattr(vocabulary, "MOST_MERGES", 3)
    with pytest.raises(CheckpointError, match=r"model\.gguf: tokenizer\.ggml\.tokens: .* at most 3 pairs of tokens"):
        tokenizer_json(found)
