"""Tokenizers from GGUF files: the ids are those of the tokenizer from which the file was written."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from infd.errors import CheckpointError
from infd.gguf.text import read_tokenizer
from infd.gguf.vocabulary import CONTROL, RULES, USER_DEFINED
from infd.text import vetting
from infd.text.tokenizer import Tokenizer
from tests.gguf.writing import write
from tests.tiny import make

if TYPE_CHECKING:
    from pathlib import Path

    import gguf

HARD = (
    "Hello world, it's 12345 o'clock!",
    "  two leading spaces, and two trailing  ",
    "tabs\tand\n\n\nlines\r\n  indented",
    "naïve café Ünïcödé ß ﬁ",
    "日本語のテキスト 中文 한국어",
    "👩‍👩‍👧‍👦 emoji 🇩🇪",
    "x = [i**2 for i in range(10)]  # CamelCaseWord HTTPServer",
    "I'LL WE'VE don’t 3.14159 1,000,000",
    "\x00\x01 control",
    "",
    " ",
    "<|im_start|>user\nhi<|im_end|>",
    "a<think>b</think>c",
)
CORPUS = [*HARD, "the quick brown fox jumps over the lazy dog " * 3, "it's we've 1234 5678 the then there"] * 4
SPECIAL = ["<|im_start|>", "<|im_end|>"]
BOTH = (*SPECIAL, "<think>", "</think>")


def byte_level(rule: str) -> tokenizers.Tokenizer:
    """Train a small byte-level BPE that splits texts as models with this value of tokenizer.ggml.pre do."""
    found = tokenizers.Tokenizer(models.BPE())
    pattern, last = PATTERNS[rule], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=PATTERNS[rule] is None)
    steps = [last] if pattern is None else [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), last]
    if rule == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    found.pre_tokenizer = pre_tokenizers.Sequence(steps)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    found.add_special_tokens(SPECIAL)
    found.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in BOTH[2:]])
    if rule == "qwen2":
        found.normalizer = normalizers.NFC()
    return found


# As in the tokenizer.json of Llama 3.1, Qwen2.5, SmolLM2, GPT-4o and Mistral Nemo
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
    "qwen2": _WORDS % r"\p{N}",
    "smollm": None,
    "gpt-2": None,
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def byte_level_keys(found: tokenizers.Tokenizer, rule: str, **flags: bool) -> Any:
    """Return a function that writes a tokenizer's keys as converters do."""

    def keys(writer: gguf.GGUFWriter) -> None:
        described = json.loads(found.to_str())
        by_id = {number: token for token, number in found.get_vocab().items()}
        kinds = {token: CONTROL if token in SPECIAL else USER_DEFINED for token in BOTH}
        tokens = [by_id[number] for number in range(len(by_id))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.get(token, 1) for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
        writer.add_bos_token_id(found.token_to_id("<|im_start|>"))
        writer.add_eos_token_id(found.token_to_id("<|im_end|>"))
        writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
        for key, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    return keys


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("checkpoint"), vocab_size=424)


@pytest.mark.parametrize("rule", sorted(PATTERNS))
def test_ids_and_texts_of_byte_level_vocabularies(rule: str, checkpoint: Path, tmp_path: Path) -> None:
    theirs = byte_level(rule)
    path = write(checkpoint, tmp_path / "model.gguf", vocabulary=byte_level_keys(theirs, rule, add_bos_token=False))
    ours = Tokenizer.load(path)
    others = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")

    for text in (*HARD, "e\u0301 decomposed"):
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
        if rule != "smollm" and (rule, text) != ("qwen2", "e\u0301 decomposed"):  # transformers omits digits and NFC
            assert others.encode(text, add_special_tokens=False) == ids, text
    assert ours.special_ids == {theirs.token_to_id(token) for token in SPECIAL}
    assert ours.end_ids == {theirs.token_to_id("<|im_end|>")}
    assert (ours.bos, ours.eos) == ("<|im_start|>", "<|im_end|>")
    assert ours.files.templates["default"] == others.chat_template


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_a_text_begins_and_ends_with_the_tokens_that_the_file_adds(
    flags: dict[str, bool], checkpoint: Path, tmp_path: Path
) -> None:
    theirs = byte_level("llama-bpe")
    path = write(checkpoint, tmp_path / "model.gguf", vocabulary=byte_level_keys(theirs, "llama-bpe", **flags))
    begin, end = (theirs.token_to_id(token) for token in SPECIAL)

    ids = Tokenizer.load(path).encode("text")
    assert ids[0] == begin, "Llama 3's texts begin with BOS also if the file does not say so"
    assert (ids[-1] == end) == flags.get("add_eos_token", False)


def sentencepiece_model(**options: Any) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(text for text in CORPUS if text.strip()),
        model_writer=written,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=3,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def sentencepiece_keys(found: sentencepiece.SentencePieceProcessor, **flags: bool) -> Any:
    def keys(writer: gguf.GGUFWriter) -> None:
        ids = range(found.GetPieceSize())
        kinds = [2 if found.IsUnknown(i) else 3 if found.IsControl(i) else 6 if found.IsByte(i) else 1 for i in ids]
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([found.IdToPiece(i) for i in ids])
        writer.add_token_scores([found.GetScore(i) for i in ids])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(found.bos_id())
        writer.add_eos_token_id(found.eos_id())
        writer.add_unk_token_id(found.unk_id())
        for key, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    return keys


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_and_texts_of_sentencepiece(prefix: bool, checkpoint: Path, tmp_path: Path) -> None:
    theirs = sentencepiece_model(add_dummy_prefix=prefix)
    keys = sentencepiece_keys(theirs, add_space_prefix=prefix)
    ours = Tokenizer.load(write(checkpoint, tmp_path / "model.gguf", vocabulary=keys))

    for text in HARD:
        if "\0" in text or not text:  # SentencePiece drops NUL, and adds no prefix to an empty text
            continue
        ids = theirs.EncodeAsIds(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == text
        assert ours.encode(text)[0] == theirs.bos_id()
    assert ours.end_ids == {theirs.eos_id()}


def test_every_rule_runs_in_the_daemons_process(checkpoint: Path, tmp_path: Path) -> None:
    for rule in RULES:
        keys = byte_level_keys(byte_level("gpt-2"), rule)
        path = write(checkpoint, tmp_path / f"{rule}.gguf", vocabulary=keys)
        assert vetting.tokenizers.read(read_tokenizer(path))[1] is None, rule


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"gpt2", b"bert", "tokenizer.ggml.model: expected 'gpt2' or 'llama', found 'bert'"),
        (b"llama-bpe", b"llama-xyz", "tokenizer.ggml.pre: expected one of default, "),
        (b"token_type", b"token_kind", None),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.nerges", "tokenizer.ggml.merges is missing"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz", "tokenizer.ggml.tokens is missing"),
        (b"<|im_end|>", b"<|im_star>", None),
    ],
)
def test_a_malformed_vocabulary_is_refused(
    old: bytes, new: bytes, said: str | None, checkpoint: Path, tmp_path: Path
) -> None:
    path = write(checkpoint, tmp_path / "model.gguf", vocabulary=byte_level_keys(byte_level("llama-bpe"), "llama-bpe"))
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    if said is None:
        Tokenizer.load(path)
    else:
        with pytest.raises(CheckpointError) as error:
            Tokenizer.load(path)
        assert said in str(error.value)
        assert str(path) in str(error.value)


def test_ids_and_merges_that_are_no_tokens_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    keys = byte_level_keys(byte_level("gpt-2"), "gpt-2")
    for change, said in (
        (lambda writer: writer.add_eom_token_id(5000), "eom_token_id: expected an id below"),
        (lambda writer: writer.add_array("tokenizer.ggml.suppress", [1]), None),
    ):

        def both(writer: gguf.GGUFWriter, change: Any = change) -> None:
            keys(writer)
            change(writer)

        path = write(checkpoint, tmp_path / "model.gguf", vocabulary=both)
        if said is None:
            Tokenizer.load(path)
        else:
            with pytest.raises(CheckpointError, match=said):
                Tokenizer.load(path)
