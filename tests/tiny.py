"""Tiny checkpoints with random weights, made by transformers, one per family and per feature that changes a model.

Weights are drawn so that every part matters: attention is far from uniform,
norms and biases are far from neutral, and logits are spread wide enough that
greedy choices are clear (`margins` tells how clear).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

VOCAB = 199  # prime: no kernel gets a round number
LAYERS = 3
SPREAD = 11.0  # standard deviation of the logits
CLEAR = 1e-2  # a top-2 margin that float32 cannot blur

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}

# Name of the variant: (architecture, what differs from _SIZES).
VARIANTS = MappingProxyType(
    {
        "llama": ("Llama", {}),
        "llama-tied": ("Llama", {"tie_word_embeddings": True}),
        "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
        "llama-one-head-each": ("Llama", {"num_key_value_heads": 4, "head_dim": 12}),
        "llama-rope3": ("Llama", {"rope_parameters": _LLAMA3}),
        "llama-rope-linear": ("Llama", {"rope_parameters": _LINEAR}),
        "mistral-window": ("Mistral", {"sliding_window": 9}),
        "qwen3": ("Qwen3", {}),
        "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
        "qwen3-biases": ("Qwen3", {"attention_bias": True}),
        "qwen3-windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    }
)
FAMILIES = ("llama", "mistral-window", "qwen3")


def make(variant: str, directory: Path, **overrides: Any) -> Path:
    """Save a variant's checkpoint into `directory` and return it. The same name gives the same weights.

    overrides  settings of the transformers config, such as vocab_size
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = VARIANTS[variant]
    config = AutoConfig.for_model(family.lower(), **{**_SIZES, **settings, **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(variant.encode()))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            _draw(name, tensor, generator)
        probe = torch.randint(VOCAB, (1, 64), generator=generator) % config.vocab_size
        # The last norm scales the logits, whether or not the head is tied to the embedding.
        model.model.norm.weight *= SPREAD / model(probe).logits.std()
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a variant's name to its checkpoint's directory, made once per session."""
    made: dict[str, Path] = {}

    def directory(variant: str) -> Path:
        if variant not in made:
            made[variant] = make(variant, tmp_path_factory.mktemp(variant))
        return made[variant]

    return directory


def oracle(directory: Path) -> PreTrainedModel:
    """Load a checkpoint with transformers, in float32 and without fused attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def margins(logits: Tensor) -> Tensor:
    """Return how far the best token of each position is ahead of the second, [N] of logits [N, vocab]."""
    best = logits.float().topk(2).values
    return best[..., 0] - best[..., 1]


def _draw(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        tensor.normal_(1.5, 0.4, generator=generator)  # with normed heads only these sharpen attention
    elif "norm" in name:
        tensor.normal_(1.0, 0.3, generator=generator)
    elif name.endswith("bias"):
        tensor.normal_(0.0, 0.3, generator=generator)
    elif "embed_tokens" in name:
        tensor.normal_(0.0, 1.0, generator=generator)
    else:
        gain = 1.4 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
        tensor.normal_(0.0, gain * tensor.shape[1] ** -0.5, generator=generator)
