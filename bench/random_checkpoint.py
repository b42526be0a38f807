"""Write a checkpoint of a known shape with random weights, readable by every server, for speed measurements.

    python bench/random_checkpoint.py 0.6b DIR      Qwen3-0.6B: 1.2 GB
    python bench/random_checkpoint.py 110m DIR      a small Llama: 0.2 GB
    python bench/random_checkpoint.py granite DIR   a mixture of bench/experts.py: 2.7 GB; olmoe: 7.0 GB

The vocabulary has its full size, and nearly all tokens are words, those of bench's prompts included, so that clients
can count generated tokens as text. With greedy sampling an answer never ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import string
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import experts
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from infd.loadgen.prompts import words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "0.6b": {
            "model_type": "qwen3",
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": True,
        },
        "110m": {
            "model_type": "llama",
            "vocab_size": 32_000,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "tie_word_embeddings": True,
        },
        **{
            name: {**experts.SHAPES[name], **experts.COMMON, "model_type": model_type}
            for name, model_type in (("granite", "granitemoe"), ("olmoe", "olmoe"))
        },
    }
)
_BYTES = 256  # the first tokens
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen's pre-tokenizer, which converters recognize.
_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary(size: int) -> Tokenizer:
    """Return a byte-level BPE of a given size: bytes, the prompts' words, then pairs and quadruples of letters."""
    learnt = _byte_level(models.BPE())
    text = words(random.Random(0), 5000)  # noqa: S311 - enough draws for every word
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    learnt.train_from_iterator([f" {text}"], trainer)
    state = json.loads(learnt.to_str())["model"]
    ids: dict[str, int] = state["vocab"]
    merges = [tuple(merge) for merge in state["merges"]]
    letters = _pairs(string.ascii_lowercase)
    fours = _pairs(["".join(pair) for pair in _pairs(string.ascii_lowercase)])
    for left, right in itertools.chain(letters, fours):
        if len(ids) + len(_SPECIAL) == size:
            break
        if left + right not in ids:
            ids[left + right] = len(ids)
            merges.append((left, right))
    made = _byte_level(models.BPE(ids, merges))
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    assert made.get_vocab_size() == size
    return made


def _pairs(parts: Sequence[str]) -> Iterator[tuple[str, str]]:
    return itertools.product(parts, repeat=2)


def _byte_level(model: models.Model) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CUTS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


def make(shape: Mapping[str, Any], directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config, weights, vocabulary and chat template."""
    end, _, turn_end = (shape["vocab_size"] - len(_SPECIAL) + i for i in range(len(_SPECIAL)))
    config = AutoConfig.for_model(
        **shape,
        # Scaled so that a product's outputs have the variance of its inputs.
        initializer_range=shape["hidden_size"] ** -0.5,
        bos_token_id=end,
        eos_token_id=turn_end,
        pad_token_id=end,
        dtype=dtype,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Greedy sampling never yields a special or end token: ordinary tokens have logits above 0.
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:_BYTES] = 0
        embedding[-len(_SPECIAL) :] = 0
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=turn_end, pad_token_id=end)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=vocabulary(shape["vocab_size"]),
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[0],
        chat_template=_TEMPLATE,
        model_max_length=shape["max_position_embeddings"],
    ).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    make(SHAPES[arguments.shape], arguments.directory)


if __name__ == "__main__":
    main()
