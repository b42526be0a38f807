"""Decoders without causality, as embedders, against transformers: packed texts see all of their own tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd.errors import CheckpointError
from infd.kernels.reference.dense import Norm, Rope
from infd.kernels.reference.span_attention import SpanAttention
from infd.kernels.select import select
from infd.pooling import read
from tests.kernels.paging import CPU
from tests.models.encoding import encode, load_encoder, text

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

CLOSE = 2e-5
LENGTHS = (1, 41, 7, 30, 2)
SEEING = {"is_causal": False}
# By variant of tests/tiny.py, the keys of config.json with which its tokens see those after them.
VARIANTS = {
    "llama-biases": SEEING,
    "llama-rope-dynamic": SEEING,
    "mistral-window": SEEING,
    "qwen2": SEEING,
    "qwen2-windows": SEEING,
    "qwen3": SEEING,
    "phi3-window": SEEING,
    "gemma3": {"use_bidirectional_attention": True},
    "glm4": SEEING,
    "olmo2": SEEING,
    "qwen3-moe": SEEING,
}


def seeing(directory: Path, changed: dict[str, Any]) -> PreTrainedModel:
    """Load the decoder of a checkpoint with transformers, with other keys of config.json."""
    from transformers import AutoConfig, AutoModel

    stored = {**json.loads((directory / "config.json").read_text()), **changed}
    config = AutoConfig.for_model(**stored)
    loaded = AutoModel.from_pretrained(directory, config=config, attn_implementation="eager", dtype=torch.float32)
    return loaded.eval()


FEW = ("llama-biases", "mistral-window", "qwen2-windows", "qwen3", "gemma3")
EVERY = [pytest.param(each, marks=() if each in FEW else pytest.mark.exhaustive) for each in VARIANTS]


@pytest.mark.parametrize("variant", EVERY)
def test_a_text_packed_with_others_has_the_hidden_states_it_has_alone(variant, tiny):
    theirs = seeing(tiny(variant), VARIANTS[variant])
    ours = load_encoder(tiny(variant), changed=VARIANTS[variant])
    texts = [text(seed, length) for seed, length in enumerate(LENGTHS)]

    assert not ours.generates
    assert (ours.cache_layout(16).groups, ours.cache_layout(16).divisible) == ((), False)
    assert ours.page_tensors(16) == ()
    for tokens, hidden in zip(texts, encode(ours, texts), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        assert (hidden - expected).abs().max() < CLOSE * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("variant", EVERY)
def test_a_token_read_alone_has_the_hidden_state_it_has_among_all(variant, tiny):
    ours = load_encoder(tiny(variant), changed=VARIANTS[variant])
    texts = [text(seed, length) for seed, length in enumerate(LENGTHS)]
    last = [len(each) - 1 for each in texts]

    for every, alone in zip(encode(ours, texts), encode(ours, texts, read=last), strict=True):
        assert (alone[0] - every[-1]).abs().max() < CLOSE * every.abs().max().clamp(min=1)


def test_reference_kernels_compute_the_same(tiny):
    ops = select(CPU, torch.float32).replace(span_attention=SpanAttention(), norm=Norm(), rope=Rope())
    changed = VARIANTS["gemma3"]
    texts = [text(1, 41), text(2, 5)]

    both = [encode(load_encoder(tiny("gemma3"), changed=changed, ops=each), texts) for each in (None, ops)]
    for ours, theirs in zip(*both, strict=True):
        assert (ours - theirs).abs().max() < CLOSE * theirs.abs().max()


def test_gritlm_embeds_without_causality_and_without_windows_and_generates_as_mistral(tiny):
    directory = tiny("mistral-window")
    own = {"auto_map": {"AutoModel": "modeling_gritlm7b.MistralModel"}}
    theirs = seeing(directory, {**SEEING, "sliding_window": None})
    tokens = text(3, 41)
    for changed in ({"architectures": ["GritLM"]}, {**own, **SEEING}):
        (hidden,) = encode(load_encoder(directory, changed=changed), [tokens])
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        assert (hidden - expected).abs().max() < CLOSE * expected.abs().max()

    config = {"architectures": ["MistralForCausalLM"], **own}
    assert read(directory, config).tasks == ()
    embeds = read(directory, config, task="embed")
    assert (embeds.causal, embeds.pooling, embeds.normalize, embeds.text_mark) == (False, "mean", True, "<|embed|>\n")
    assert read(directory, {"architectures": ["GritLM"]}, task="none").causal


@pytest.mark.parametrize("variant", ["gemma2", "gpt-oss", "llama4"])
def test_attention_that_is_not_computed_without_causality_is_refused(variant, tiny):
    with pytest.raises(CheckpointError, match="without causality"):
        load_encoder(tiny(variant), changed=SEEING)
