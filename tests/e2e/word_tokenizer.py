"""A tokenizer whose tokens are whole words, for checkpoints with random weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# XLM-RoBERTa's special tokens, and what encloses a text and a pair.
SPECIAL = {"cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>"}
TEXT, PAIR = "<s> $A </s>", "<s> $A </s> </s> $B </s>"


def write_tokenizer(
    directory: Path, words: Sequence[str], special: Mapping[str, str], *, enclosed: bool, most_tokens: int
) -> Tokenizer:
    """Write a tokenizer beside a checkpoint, and return it. Its ids are those of `special`, then those of `words`.

    special   special tokens by their field of tokenizer_config.json, one of them unk_token
    enclosed  whether texts and pairs are enclosed in XLM-RoBERTa's special tokens
    """
    marks = [*dict.fromkeys(special.values())]
    ids = {token: number for number, token in enumerate([*marks, *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if enclosed:
        ends = [(each, ids[each]) for each in ("<s>", "</s>")]
        tokenizer.post_processor = TemplateProcessing(single=TEXT, pair=PAIR, special_tokens=ends)
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {**special, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": most_tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return tokenizer
