"""The text of a stream of ids equals the text of all ids, however the stream is cut."""

from __future__ import annotations

from functools import cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.text.pieces import BytePieces, TextPieces
from tests.text.vocabularies import KINDS, TEXT, wrap

if TYPE_CHECKING:
    from infd.text.tokenizer import Tokenizer

LARGEST = 400  # above every id of these vocabularies: a model's vocabulary may be padded


@cache
def tokenizer(kind: str) -> Tokenizer:
    return wrap(KINDS[kind]())


def in_parts(kind: str, ids: list[int], cuts: list[int], *, skip: bool) -> str:
    text = tokenizer(kind).detokenizer(skip_special_tokens=skip)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    parts = [text.feed(ids[begin:end]) for begin, end in pairwise(edges)]
    return "".join(parts) + text.flush()


def broken_runs(kind: str, ids: list[int], *, skip: bool) -> bool:
    """Say whether any run of byte tokens is not UTF-8."""
    pieces = tokenizer(kind).pieces(skip_special_tokens=skip)
    if not isinstance(pieces, TextPieces):
        return False
    present = [pieces.table[i] for i in ids if i < len(pieces.table) and pieces.table[i] is not None]
    for is_byte, run in groupby(present, key=lambda piece: isinstance(piece, int)):
        if is_byte:
            try:
                bytes(run).decode()
            except UnicodeDecodeError:
                return True
    return False


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, LARGEST), max_size=12), cuts=st.lists(st.integers(0, 12)), skip=st.booleans())
def test_random_ids_cut_anywhere_give_the_text_of_the_whole(kind: str, ids: list[int], cuts: list[int], skip: bool):
    if not broken_runs(kind, ids, skip=skip):
        assert in_parts(kind, ids, cuts, skip=skip) == tokenizer(kind).decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from("the dog🙂你é\n \t,.!<>|") | st.characters(codec="utf-8"), max_size=20),
    cuts=st.lists(st.integers(0, 40)),
)
def test_encoded_text_cut_anywhere_gives_the_text_of_the_whole(kind: str, text: str, cuts: list[int]):
    ids = tokenizer(kind).encode(text)

    assert in_parts(kind, ids, cuts, skip=True) == tokenizer(kind).decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "split_first", "sentencepiece", "sentencepiece_keeping_space"])
@pytest.mark.parametrize("text", TEXT)
def test_a_text_comes_back_as_it_was(kind: str, text: str):
    ids = tokenizer(kind).encode(text)

    assert in_parts(kind, ids, list(range(len(ids))), skip=True) == text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 330), max_size=8), cuts=st.lists(st.integers(0, 8)))
def test_where_a_run_of_bytes_is_not_utf8_the_cuts_still_do_not_matter(ids: list[int], cuts: list[int]):
    assert in_parts("sentencepiece", ids, cuts, skip=True) == in_parts("sentencepiece", ids, [], skip=True)


def byte_ids(data: bytes) -> list[int]:
    ids = [tokenizer("sentencepiece").id_of(f"<0x{byte:02X}>") for byte in data]
    return [token_id for token_id in ids if token_id is not None]


def test_a_bad_run_of_bytes_gives_one_replacement_a_byte_as_the_library_does():
    ids = [*byte_ids(b"\xff\xe4\xbd\xa0"), tokenizer("sentencepiece").encode("dog")[-1]]

    text = in_parts("sentencepiece", ids, [], skip=True)

    assert text == tokenizer("sentencepiece").decode(ids)
    assert text.startswith("\ufffd" * 4)


def test_characters_that_were_complete_before_a_bad_byte_stay():
    ids = byte_ids("你".encode() + b"\xff\x41")

    assert in_parts("sentencepiece", ids, [], skip=True) == "你\ufffd\ufffd"


def test_a_run_after_a_bad_one_is_read_afresh():
    word = tokenizer("sentencepiece").encode("dog")[-1]
    ids = [*byte_ids(b"\xff"), word, *byte_ids("你".encode())]

    text = in_parts("sentencepiece", ids, [], skip=True)

    assert text == tokenizer("sentencepiece").decode(ids)
    assert text.endswith("你")


def test_a_newline_that_is_a_byte_token_is_not_held_back():
    text = tokenizer("sentencepiece").detokenizer()

    assert text.feed(byte_ids(b"\n")) == "\n"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_in_several_tokens_comes_out_whole(kind: str):
    vocabulary = tokenizer(kind)
    ids = vocabulary.encode("👾", add_special_tokens=False)
    text = vocabulary.detokenizer()

    parts = [text.feed([token_id]) for token_id in ids]

    assert len(ids) > 1
    assert "\ufffd" not in "".join(parts)
    assert [part for part in parts if part.strip()] == ["👾"]


def test_half_a_character_at_the_end_becomes_a_replacement():
    vocabulary = tokenizer("byte_level")
    text = vocabulary.detokenizer()

    assert text.feed(vocabulary.encode("🙂", add_special_tokens=False)[:1]) == ""
    assert text.flush() == "\ufffd"
    assert text.flush() == ""


def test_the_known_decoders_are_recognised():
    known = {kind: type(tokenizer(kind).pieces(skip_special_tokens=True)) for kind in KINDS}

    assert known["byte_level"] is known["split_first"] is BytePieces
    assert known["sentencepiece"] is known["sentencepiece_keeping_space"] is known["unigram"] is TextPieces
    assert known["wordpiece"] is known["word_ends"] is type(None)


def test_a_decoder_that_writes_replacements_without_end_is_not_waited_for():
    backend = KINDS["wordpiece"]()
    backend.add_tokens(["\ufffd"])
    vocabulary = wrap(backend)
    text = vocabulary.detokenizer()

    shown = "".join(text.feed([vocabulary.id_of("\ufffd") or 0]) for _ in range(40))

    assert shown.count("\ufffd") >= 32
