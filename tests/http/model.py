"""The served model of the endpoint's tests: a fake model with predictable answers, its tokenizer and template."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from infd.http.served_model import SamplingDefaults, ServedModel
from infd.pooling import PoolingSettings
from infd.request import PoolTask
from infd.text.chat import ChatTemplate
from infd.text.infill import Family, Infill
from infd.text.tokenizer import Tokenizer
from tests.fakes import EXPERTS, VOCAB, continuation

MODEL = "org/fake-model"
FAMILY = Family(prefix="!", suffix='"', middle="#", file="$")  # of models that fill gaps
PROMPTS = {"query": "find ", "document": ""}  # that precede texts whose embeddings are wanted
TEMPLATE = """{%- if messages[0].content == 'refuse me' %}{{ raise_exception('as you wish') }}{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""


@cache
def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with the fake model's vocabulary: 3 special tokens, 256 bytes, 253 letter pairs."""
    return make_tokenizer(None)


def make_tokenizer(framed: processors.PostProcessor | None) -> Tokenizer:
    """Return the fake model's tokenizer; framed: adds special tokens to texts."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = "abcdefghijklmnop"
    merges = [(a, b) for a in letters for b in letters][: VOCAB - 3 - 256]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if framed is not None:
        backend.post_processor = framed
    with TemporaryDirectory() as directory:
        backend.save(str(Path(directory) / "tokenizer.json"))
        settings = {"eos_token": "<|im_end|>", "additional_special_tokens": special, "chat_template": TEMPLATE}
        (Path(directory) / "tokenizer_config.json").write_text(json.dumps(settings))
        return Tokenizer.load(directory)


@cache
def template() -> ChatTemplate:
    return ChatTemplate.load(tokenizer())


def foretell(prompt: list[int], count: int, *, seed: int = 0) -> tuple[list[int], str]:
    """Return the token ids and the text of the fake model's answer."""
    ids = continuation(prompt, count, seed=seed)
    return ids, tokenizer().decode(ids)


def letters(ids: list[int]) -> list[int]:
    """Return the positions of letter-pair tokens: their text does not depend on neighbouring tokens."""
    return [place for place, token_id in enumerate(ids) if token_id >= 3 + 256]


def chat_prompt(*texts: str) -> list[int]:
    """Return the token ids of user messages rendered by TEMPLATE."""
    turns = [{"role": "user", "content": text} for text in texts]
    text = template().render(turns)
    return tokenizer().encode(text, add_special_tokens=False)


def served(max_model_len: int, **defaults: float) -> ServedModel:
    tasks = get_args(PoolTask)
    return ServedModel(
        names=(MODEL, "alias"),
        created=1,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        tokenizer=tokenizer(),
        template=template(),
        defaults=SamplingDefaults(**defaults),
        infill=Infill(FAMILY, tokenizer()),
        experts=EXPERTS,
        pools=tasks,
        pooling=PoolingSettings(tasks=tasks, dimensions=1, labels=("likely",), prompts=PROMPTS, pairs=True),
    )
