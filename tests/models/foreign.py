"""Tiny checkpoints of architectures without a file in infd, with random weights, saved by transformers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from tests.tiny import VOCAB

if TYPE_CHECKING:
    from pathlib import Path

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GROUPED = {"num_key_value_heads": 2}
_WINDOWS = {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_ROUTED = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

# By variant: (model_type, settings that differ from _SIZES).
FOREIGN = MappingProxyType(
    {
        "gpt-neox": ("gpt_neox", {}),  # partial rope; attention and feed-forward network in parallel
        "olmo": ("olmo", {**_GROUPED, "clip_qkv": 1.5}),  # norms without weights
        "cohere": ("cohere", {**_GROUPED, "use_qk_norm": True, "logit_scale": 0.5}),  # scales its logits
        "cohere2-windows": ("cohere2", {**_GROUPED, **_WINDOWS, "tie_word_embeddings": True, "logit_scale": 1.5}),
        "phi": ("phi", {**_GROUPED, "partial_rotary_factor": 0.5}),  # a bias on the head
        "smollm3": ("smollm3", {**_GROUPED, "no_rope_layers": [1, 0, 1]}),  # one layer without rope
        "starcoder2-window": ("starcoder2", {**_GROUPED, "sliding_window": 9}),
        "apertus": ("apertus", _GROUPED),  # scalar weights
        "gpt2": ("gpt2", {"tie_word_embeddings": True}),  # transposed weights
        "gpt-bigcode": ("gpt_bigcode", {"multi_query": True}),  # learned positions
        "opt": ("opt", {"word_embed_proj_dim": 24, "ffn_dim": 80}),  # the decoder is a submodule of the base model
        "vaultgemma": ("vaultgemma", {**_GROUPED, **_WINDOWS, "head_dim": 16, "attn_logit_softcapping": 5.0}),
        "minicpm3": ("minicpm3", {**_LATENT, "num_key_value_heads": 4}),  # values narrower than keys
        "glm": ("glm", {**_GROUPED, "head_dim": 12, "partial_rotary_factor": 0.5}),  # interleaved rope
        "deepseek-v2": ("deepseek_v2", {**_LATENT, **_ROUTED}),  # latent attention; experts after a dense layer
        "deepseek-v3": ("deepseek_v3", {**_LATENT, **_ROUTED, "n_group": 2, "topk_group": 1}),
        "flex-olmo": ("flex_olmo", {**_GROUPED, **_EXPERTS}),
    }
)
# DeepSeek-V3 multiplies the experts' sum by 2.5, and its float32 rounding errors too: a smaller gain keeps these errors
# as far below the tests' bound as in the other variants.
_GAINS = MappingProxyType({"deepseek-v3": 1.0})


def make(variant: str, directory: Path, **overrides: Any) -> Path:
    """Save a variant's checkpoint in `directory` and return `directory`. Weights depend on the variant's name alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = FOREIGN[variant]
    config = AutoConfig.for_model(kind, **{**_SIZES, **settings, **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(variant.encode()))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            _draw(name, tensor, generator, gain=_GAINS.get(variant, 1.4))
    model.save_pretrained(directory)
    return directory


def _draw(name: str, tensor: torch.Tensor, generator: torch.Generator, *, gain: float) -> None:
    """Draw weights that make every module matter: norms and biases far from neutral, attention far from uniform.

    gain  standard deviation of a matrix's outputs, relative to its inputs
    """
    if "norm" in name or ".ln_" in name:
        tensor.normal_(0.0 if name.endswith("bias") else 1.0, 0.3, generator=generator)
    elif name.endswith("bias"):
        tensor.normal_(0.0, 0.3, generator=generator)
    elif "embed" in name or ".wte." in name or ".wpe." in name:
        tensor.normal_(0.0, 1.0, generator=generator)
    else:
        gain = 12.0 if name.startswith("lm_head") else gain
        tensor.normal_(0.0, gain * tensor.shape[-1] ** -0.5, generator=generator)
