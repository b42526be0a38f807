"""Train the tokenizer: byte-level BPE on the training text.

Each digit is one token, for digit-by-digit arithmetic. A capitalized word's tokens
exclude the preceding space, so that a name has the same tokens in a question, in
quotes and in JSON, and the model can copy the name token by token.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

VOCAB: Final = 3072
# Detokenized text omits CONTROL tokens and includes MARKUP, which parsers read.
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END: Final = "<|im_end|>"
PAD: Final = "<|endoftext|>"

_WORDS: Final = (
    r"'(?:s|t|re|ve|m|ll|d)\b"
    r"| ?\p{Ll}+"
    r"|\p{Lu}\p{Ll}+"
    r"|\p{Lu}+"
    r"|\p{N}"
    r"|\p{L}+"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)"
    r"|\s"
)


def train(texts: Iterable[str], vocab: int = VOCAB) -> tokenizers.Tokenizer:
    """Train a tokenizer of `vocab` entries: the 256 bytes, then frequent merges, then CONTROL and MARKUP."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = len(CONTROL) + len(MARKUP)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - added, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    assert tokenizer.get_vocab_size() == vocab, "the text has too few words for this vocabulary"
    return tokenizer


def write(tokenizer: tokenizers.Tokenizer, directory: Path, *, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
