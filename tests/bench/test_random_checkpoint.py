from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from random_checkpoint import SHAPES, make, vocabulary
from transformers import AutoModelForCausalLM, AutoTokenizer

from infd.loadgen.prompts import words

if TYPE_CHECKING:
    from pathlib import Path

BYTES, SPECIAL = 256, 3


def test_every_token_but_the_special_ones_is_text_and_a_prompts_word_is_a_token() -> None:
    made = vocabulary(1500)

    assert made.get_vocab_size() == 1500
    bare = [made.decode([number]) for number in range(1500 - SPECIAL)]
    assert all(text.isascii() and len(text) > 1 for text in bare[BYTES:])
    text = " " + words(random.Random(1), 200)
    assert len(made.encode(text).ids) == 200
    assert made.decode(made.encode(text).ids) == text


def test_transformers_reads_the_checkpoint_and_its_greedy_answer_never_ends(tmp_path: Path) -> None:
    small = {"vocab_size": 1500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    make({**SHAPES["0.6b"], **small, **heads}, tmp_path)

    model, problems = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems.values())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "time"}], add_generation_prompt=True)
    assert tokenizer.eos_token_id in asked["input_ids"]

    def said(first: int) -> list[int]:
        asked = torch.tensor([[first]])
        return model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=40, do_sample=False)[
            0
        ].tolist()

    for first in (BYTES, 700, 1400):
        assert len(said(first)) == 41  # no end
        assert all(BYTES <= token < 1500 - SPECIAL for token in said(first))
