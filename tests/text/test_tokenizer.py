"""Ids equal those of transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from infd.errors import CheckpointError, InvalidRequest
from infd.text import conversion
from infd.text.tokenizer import LARGEST_BYTES, Tokenizer
from infd.untrusted import SMALL_BYTES
from tests.text.vocabularies import KINDS, TEXT, byte_level, wrap, write

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    *TEXT,
    "",
    " ",
    "  leading and trailing  ",
    "line\r\nline\n\n\n\tline",
    "</s> and <s>, <think>in the text</think> two words",
    "naïve café — “quotes” ½ ﬁ Å",
    "0123456789 3.14159 1e-5",
    "\x00\x01 \u200b\u202e \ufffd",
    "한국어 العربية हिन्दी ไทย 🏳️‍🌈",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_is_dropped_at_the_start_of_all_text_only(kind: str, tmp_path: Path):
    tokenizer = Tokenizer.load(write(tmp_path, KINDS[kind]()))
    (letter,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    special = sorted(tokenizer.special_ids)[:1]
    assert tokenizer.drops_space_after([], skip_special_tokens=True) == tokenizer.drops_space
    assert tokenizer.drops_space_after(special, skip_special_tokens=True) == tokenizer.drops_space
    assert not tokenizer.drops_space_after([letter], skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_equal_those_of_transformers(kind: str, tmp_path: Path):
    directory = write(tmp_path, KINDS[kind]())
    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)

    for text in CORPUS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize(
    "config",
    [
        {"pad_token": "<pad>"},
        {"additional_special_tokens": ["<|extra|>", "dog"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"add_bos_token": False, "add_eos_token": True},
        {"split_special_tokens": True},
        {"eos_token": {"__type": "AddedToken", "content": "<eos>", "normalized": False}},
        {"added_tokens_decoder": {"900": {"content": "<late>", "special": True, "normalized": False}}},
    ],
    ids=lambda config: next(iter(config)),
)
def test_tokens_of_tokenizer_config_are_added(config: dict[str, Any], tmp_path: Path):
    directory = write(tmp_path, byte_level(), **config)
    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    text = "the dog <pad> <|extra|> <image> </s> <eos> <late> 👍"

    ids = ours.encode(text)

    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_ids >= set(theirs.all_special_ids)


def test_special_tokens_map_counts_only_for_older_checkpoints(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    for directory in (old, new):
        directory.mkdir()
        write(directory, byte_level(), **({"added_tokens_decoder": {}} if directory is new else {}))
        (directory / "special_tokens_map.json").write_text('{"eos_token": {"content": "<s>"}}')

    assert [Tokenizer.load(old).eos, Tokenizer.load(new).eos] == ["<s>", "</s>"]
    assert [AutoTokenizer.from_pretrained(path).eos_token for path in (old, new)] == ["<s>", "</s>"]


def test_truncation_and_padding_left_in_the_file_are_off(tmp_path: Path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)

    assert Tokenizer.load(write(tmp_path, backend)).encode("the lazy dog jumps", add_special_tokens=False) == (
        byte_level().encode("the lazy dog jumps", add_special_tokens=False).ids
    )


def test_end_ids_are_those_of_all_files_and_of_the_templates_turns(tmp_path: Path):
    backend = byte_level()
    backend.add_special_tokens(["<|im_end|>"])
    directory = write(tmp_path, backend, chat_template="{{ messages[0].content }}<|im_end|>")
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (directory / "config.json").write_text('{"eos_token_id": 9}')

    tokenizer = Tokenizer.load(directory)

    assert tokenizer.end_ids == {7, 8, 9, tokenizer.id_of("</s>"), tokenizer.id_of("<|im_end|>")}


def test_a_checkpoint_without_end_ids_has_none(tmp_path: Path):
    (write(tmp_path, byte_level()) / "tokenizer_config.json").unlink()

    assert Tokenizer.load(tmp_path).end_ids == frozenset()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"word_ends"}))  # there the next token shows a token's space
def test_pieces_put_together_spell_the_text(kind: str, tmp_path: Path):
    tokenizer = Tokenizer.load(write(tmp_path, KINDS[kind]()))
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False)

    spelled = b"".join(tokenizer.piece(token_id) for token_id in ids).decode()

    assert spelled.strip() == tokenizer.decode(ids)


def test_a_piece_of_a_split_character_is_its_bytes(tmp_path: Path):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))

    pieces = [tokenizer.piece(token_id) for token_id in tokenizer.encode("👾", add_special_tokens=False)]

    assert len(pieces) > 1
    assert b"".join(pieces) == "👾".encode()
    assert tokenizer.piece(10**6) == b""
    assert tokenizer.piece(tokenizer.id_of("</s>") or 0) == b"</s>"


def test_threads_may_encode_at_once(tmp_path: Path):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    expected = [tokenizer.encode(text) for text in CORPUS]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(tokenizer.encode, CORPUS * 20))

    assert found == expected * 20


def test_a_lone_surrogate_is_the_clients_mistake(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="not valid Unicode at character 2"):
        Tokenizer.load(write(tmp_path, byte_level())).encode("ok\ud800")


def write_bpe(directory: Path, kind: str) -> Path:
    """Write a byte-level BPE as the two files used before tokenizer.json."""
    model = json.loads(byte_level().to_str())["model"]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_older_files_are_converted(kind: str, tmp_path: Path):
    directory = write_bpe(tmp_path, kind)
    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)

    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.eos == "</s>"
    assert ours.pieces(skip_special_tokens=True) is not None


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_is_converted(kind: str, tmp_path: Path):
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    file = tmp_path / "tokenizer.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(TEXT * 4).split("\n")),
        model_prefix=str(file.with_suffix("")),
        model_type=kind,
        vocab_size=330,  # 256 of them bytes, the fallback of rare characters
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    model = sentencepiece.SentencePieceProcessor(model_file=str(file))

    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        # transformers merges the mark before a text with a space at its beginning; and a token's name
        # in a text is that token.
        if text and not text.startswith(" ") and "<" not in text:
            assert ids == [model.bos_id(), *model.encode(text)]
    assert ours.eos == "</s>"
    assert ours.pieces(skip_special_tokens=True) is not None


@pytest.mark.parametrize("added", [False, True])
def test_one_far_id_does_not_buy_a_table_up_to_it(tmp_path: Path, added: bool):
    path = write(tmp_path, byte_level()) / "tokenizer.json"
    described = json.loads(path.read_text())
    if added:
        described["added_tokens"][-1]["id"] = 10**9
    described["model"]["vocab"][described["added_tokens"][-1]["content"] if added else "far"] = 10**9
    path.write_text(json.dumps(described))

    with pytest.raises(CheckpointError, match=r"tokenizer\.json: a token has the id 1000000000; at most 16777216"):
        Tokenizer.load(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing, and so is any of tokenizer\.model"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("start", "packages"), [(b"\n\x0e\n", "sentencepiece protobuf"), (b"IQ== 0\n", "tiktoken")], ids=str
)
def test_a_conversion_names_its_missing_packages(
    start: bytes, packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    (tmp_path / "tokenizer.model").write_bytes(start)

    with pytest.raises(CheckpointError, match=f"to convert tokenizer.model: pip install {packages}$"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_that_its_class_does_not_read_is_not_ignored(tmp_path: Path):
    write_bpe(tmp_path, "BertTokenizer")

    with pytest.raises(CheckpointError, match=r"BertTokenizer cannot read vocab\.json"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_that_is_broken_is_named(tmp_path: Path):
    (write_bpe(tmp_path, "GPT2Tokenizer") / "vocab.json").write_text("{")

    with pytest.raises(CheckpointError, match=r"transformers cannot convert vocab\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", json.dumps({"added_tokens_decoder": {"x": {}}})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default"}]})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": None}]})),
        ("tokenizer_config.json", json.dumps({"chat_template": {"default": 5}})),
        ("tokenizer_config.json", json.dumps({"extra_special_tokens": 5})),
        ("generation_config.json", "\xff"),
    ],
)
def test_a_broken_file_is_named(name: str, content: str, tmp_path: Path):
    directory = write(tmp_path, byte_level())
    (directory / name).write_bytes(content.encode("latin-1"))

    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Tokenizer.load(directory)


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
        *("config.json", "chat_template.jinja"),
    ],
)
def test_a_pipe_does_not_hold_up_the_start(name: str, tmp_path: Path):
    directory = write(tmp_path, byte_level())
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)

    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: not a regular file"):
        Tokenizer.load(directory)


def test_a_pipe_is_not_converted_either(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("a")
    os.mkfifo(tmp_path / "merges.txt")

    with pytest.raises(CheckpointError, match=r"merges\.txt: not a regular file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("name", "most"), [("tokenizer.json", LARGEST_BYTES), ("tokenizer_config.json", SMALL_BYTES)])
def test_a_file_too_large_is_not_read(name: str, most: int, tmp_path: Path):
    directory = write(tmp_path, byte_level())
    with (directory / name).open("wb") as sparse:
        sparse.truncate(most + 1)

    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: {most + 1} bytes; at most {most}"):
        Tokenizer.load(directory)


def test_neither_torch_nor_transformers_is_imported():
    program = (
        "import sys; from infd import embedded; from infd.text.tokenizer import Tokenizer; "
        "from infd.text.chat import ChatTemplate; from infd.text.reply import Reply; "
        "ChatTemplate.load(Tokenizer.load(embedded.path())).render([{'role': 'user', 'content': 'hi'}]); "
        "print([name for name in ('torch', 'transformers', 'numpy', 'huggingface_hub') if name in sys.modules])"
    )

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("wordpiece", "word_ends")])
def test_spellings_joined_are_the_text(kind: str):
    tokenizer = wrap(KINDS[kind]())
    spellings = tokenizer.spellings()
    assert spellings is not None
    assert len(spellings) == tokenizer.vocab_size
    for text in ("the dog and the fox", '{"a": [1, \'é\', "🙂"]}\n', " a", "two words <think>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(spellings[token_id] for token_id in ids).decode()
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert (joined.removeprefix(" ") if tokenizer.drops_space else joined) == decoded


def test_a_tokenizer_without_a_table_has_no_spellings():
    assert wrap(KINDS["wordpiece"]()).spellings() is None
