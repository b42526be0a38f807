"""Small tokenizers of each kind, trained here, in the forms of the tokenizers library and of checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from infd.text.checkpoint import TextFiles
from infd.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind. It's 12:30!",
    "Wie schön die Bäume blühen; über Straße und Fluß. 你好，世界。 Привет, мир! 🙂👍🏽",
    "    def answer(question):\n        return {'a': 1, \"b\": [2, 3]}\n\n\n",
]
SPECIAL = [AddedToken("<s>", special=True, normalized=False), AddedToken("</s>", special=True, normalized=False)]
ADDED = [AddedToken("<think>", normalized=False), AddedToken("two words", normalized=False)]


def _train(tokenizer: tokenizers.Tokenizer, trainer: Any) -> tokenizers.Tokenizer:
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(ADDED)
    bos = tokenizer.token_to_id("<s>")
    if tokenizer.post_processor is None:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _train(tokenizer, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))


def _with_bytes(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Add to a trained BPE the 256 byte tokens to which sentencepiece models fall back."""
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    model |= {"byte_fallback": True, "unk_token": None}
    for byte in range(256):
        model["vocab"][f"<0x{byte:02X}>"] = len(model["vocab"])
    state["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def sentencepiece() -> tokenizers.Tokenizer:
    """Llama 2's form: a space mark before the first word, rare characters as bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE(fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.train_from_iterator(
        ["the dog and the fox jump over the lazy dog"], trainers.BpeTrainer(vocab_size=60, show_progress=False)
    )
    tokenizer = _with_bytes(tokenizer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(ADDED)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def sentencepiece_keeping_space() -> tokenizers.Tokenizer:
    """Gemma's form: no mark before the first word."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return _train(tokenizer, trainer)


def wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _train(tokenizer, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False))


def word_ends() -> tokenizers.Tokenizer:
    """The form of the first BPE: the last token of a text has no space after it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    return _train(tokenizer, trainer)


def split_first() -> tokenizers.Tokenizer:
    """Byte-level BPE behind a Split pattern, as in Llama 3 and Qwen."""
    tokenizer = byte_level()
    pattern = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "split_first": split_first,
    "sentencepiece": sentencepiece,
    "sentencepiece_keeping_space": sentencepiece_keeping_space,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "word_ends": word_ends,
}


def write(directory: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """Write a checkpoint's text files."""
    backend.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def wrap(backend: tokenizers.Tokenizer, *, split_special: bool = False) -> Tokenizer:
    """Return a Tokenizer without a checkpoint."""
    nothing = TextFiles(
        directory=".",  # type: ignore[arg-type]
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        extra_special=(),
        added_tokens={},
        split_special=split_special,
        templates={},
        generation_config={},
        end_ids=frozenset(),
    )
    return Tokenizer(backend, nothing)
