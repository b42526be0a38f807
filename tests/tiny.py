"""Tiny checkpoints with random weights, created by transformers: one for each model family and each feature of a model.

The distributions make every part of the model change the logits: attention is far
from uniform, norms and biases are far from neutral, and the logits' spread gives
greedy choices a clear margin (`margins`).
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

VOCAB = 199  # prime: no multiple of a kernel's block size
LAYERS = 3
SPREAD = 11.0  # standard deviation of the logits
CLEAR = 1e-2  # top-2 margin above float32's rounding errors

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

_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.2, 1.4],
    "long_factor": [1.1, 2.0, 5.0],
    "partial_rotary_factor": 0.5,
}
_PHI = {"head_dim": 12, "pad_token_id": 0}
_GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 24, "sliding_window": 9}
_LAYERS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
_WHOLE = {"head_dim": 12}  # config classes without head_dim divide the hidden size by the heads
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN_MOE = {**_MOE, "num_experts": 8, "shared_expert_intermediate_size": 40}
_GLM_MOE = {**_MOE, "n_routed_experts": 8, "n_shared_experts": 1, "pad_token_id": 0}
_GRANITE_MOE = {**_MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
_ERNIE_MOE = {"moe_k": 2, "moe_num_experts": 8, "moe_intermediate_size": 32}
_PHI_MOE = {"num_local_experts": 8, "intermediate_size": 32, "router_jitter_noise": 0.2, **_WHOLE}
_LONGROPE_MOE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.1, 1.3, 2.0, 3.0, 4.0, 5.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 256,  # transformers' Phi-MoE never takes the long factors
}
_LLAMA4 = {
    "num_local_experts": 8,
    "intermediate_size": 32,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 16,
    "floor_scale": 4,
    "attn_scale": 0.5,
    "no_rope_layers": [1, 1, 0],
}
_GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "sliding_window": 9,
    "swiglu_limit": 0.8,
    "rope_parameters": {**_YARN, "truncate": False},
}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}

# (model_type, settings that differ from _SIZES) by the variant's name
VARIANTS = MappingProxyType(
    {
        "llama": ("llama", {}),
        "llama-tied": ("llama", {"tie_word_embeddings": True}),
        "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
        "llama-one-head-each": ("llama", {"num_key_value_heads": 4, "head_dim": 12}),
        "llama-rope3": ("llama", {"rope_parameters": _LLAMA3}),
        "llama-rope-linear": ("llama", {"rope_parameters": _LINEAR}),
        "llama-rope-dynamic": ("llama", {"rope_parameters": _DYNAMIC}),
        "mistral-window": ("mistral", {"sliding_window": 9}),
        "qwen2": ("qwen2", {"rope_parameters": _YARN}),
        "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2}),
        "qwen3": ("qwen3", {}),
        "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
        "qwen3-biases": ("qwen3", {"attention_bias": True}),
        "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
        "phi3-window": ("phi3", {**_PHI, "sliding_window": 9}),
        # Tests compute 9 to 256 tokens: phi3-short uses the short factors in every step, phi3-long the long factors.
        "phi3-short": ("phi3", {**_PHI, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 256}),
        "phi3-long": ("phi3", {**_PHI, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 8}),
        "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 3.0}),
        "gemma2-no-caps": (
            "gemma2",
            {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
        ),
        "gemma3": (
            "gemma3_text",
            {**_GEMMA, "sliding_window_pattern": 3, "rope_parameters": _LAYERS, "final_logit_softcapping": 25.0},
        ),
        "gemma3-seeing": ("gemma3", {**_GEMMA, "sliding_window_pattern": 2}),
        "olmo2": ("olmo2", {}),
        "glm4": ("glm4", {"pad_token_id": 0}),
        "glm4-no-biases": ("glm4", {"pad_token_id": 0, "attention_bias": False, "tie_word_embeddings": True}),
        "granite": ("granite", _MULTIPLIERS),
        "granite-biases": (
            "granite",
            {"attention_multiplier": 0.3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        ),
        "mixtral": ("mixtral", {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": 9}),
        "mixtral-one": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size": 36}),
        "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, **_WHOLE}),
        "olmoe-norm": ("olmoe", {"num_experts": 8, "intermediate_size": 32, "norm_topk_prob": True, **_WHOLE}),
        "qwen2-moe": ("qwen2_moe", {**_QWEN_MOE, "mlp_only_layers": [1], **_WHOLE}),
        "qwen2-moe-norm": ("qwen2_moe", {**_QWEN_MOE, "norm_topk_prob": True, "decoder_sparse_step": 2, **_WHOLE}),
        "qwen3-moe": ("qwen3_moe", {**_QWEN_MOE, "mlp_only_layers": [1]}),
        "qwen3-moe-norm": ("qwen3_moe", {**_QWEN_MOE, "norm_topk_prob": True, "attention_bias": True}),
        "glm4-moe": ("glm4_moe", {**_GLM_MOE, "n_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True}),
        "glm4-moe-biases": ("glm4_moe", {**_GLM_MOE, "norm_topk_prob": False, "attention_bias": True}),
        "granite-moe": ("granitemoe", {**_GRANITE_MOE, **_WHOLE}),
        "granite-moe-shared": ("granitemoeshared", {**_GRANITE_MOE, **_WHOLE, "shared_intermediate_size": 40}),
        "ernie-moe": ("ernie4_5_moe", _ERNIE_MOE),
        "ernie-moe-biases": ("ernie4_5_moe", {**_ERNIE_MOE, "use_bias": True, "moe_layer_interval": 2}),
        "gpt-oss": ("gpt_oss", _GPT_OSS),
        "llama4": ("llama4_text", _LLAMA4),
        "llama4-dense": (
            "llama4_text",
            {**_LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 2},
        ),
        "phimoe": ("phimoe", {**_PHI_MOE, "attention_bias": True, "lm_head_bias": True}),
        "phimoe-rope": ("phimoe", {**_PHI_MOE, "rope_parameters": _LONGROPE_MOE}),
    }
)
# Variants with experts, and those of them that only the exhaustive tests run with every test.
MIXTURES = tuple(
    variant for variant, (kind, _) in VARIANTS.items() if "moe" in kind or kind in ("mixtral", "gpt_oss", "llama4_text")
)
FURTHER = frozenset(
    {
        "mixtral-one",
        "olmoe-norm",
        "qwen2-moe-norm",
        "qwen3-moe-norm",
        "glm4-moe-biases",
        "granite-moe-shared",
        "ernie-moe-biases",
        "llama4-dense",
        "phimoe-rope",
    }
)
FAMILIES = ("llama", "mistral-window", "qwen3", "gemma3")  # for tests too long to run with all variants


def make(variant: str, directory: Path, **overrides: Any) -> Path:
    """Save a variant's checkpoint into `directory` and return `directory`. A variant's weights are reproducible.

    overrides  settings of the transformers config, for example vocab_size
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = VARIANTS[variant]
    settings = {**_SIZES, **settings, **overrides}
    if kind == "gemma3":  # multimodal
        settings = {"text_config": settings, "vision_config": _VISION, "mm_tokens_per_image": 4}
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(variant.encode()))
    offset = 1.0 if kind.startswith("gemma") else 0.0  # the model adds it to norm weights
    with torch.no_grad():
        corrections = [(name, each) for name, each in model.named_buffers() if name.endswith("correction_bias")]
        for name, tensor in (*model.named_parameters(), *corrections):
            _draw(name, tensor, generator)
            if "norm" in name:
                tensor.sub_(offset)
        probe = torch.randint(VOCAB, (1, 64), generator=generator) % config.get_text_config().vocab_size
        # The last norm scales the logits, whether or not the head is tied to the embedding.
        decoder = model.get_decoder()
        norm = (decoder if hasattr(decoder, "norm") else decoder.model).norm.weight
        norm.copy_((norm + offset) * (SPREAD / model(probe).logits.std()) - offset)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a variant's name to its checkpoint's directory. Saves each checkpoint once per session."""
    return cache(lambda variant: make(variant, tmp_path_factory.mktemp(variant)))


def oracle(directory: Path) -> PreTrainedModel:
    """Load a checkpoint with transformers, in float32 and without fused attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def margins(logits: Tensor) -> Tensor:
    """Return the top-2 margin of each position, [N], from logits [N, vocab]."""
    best = logits.float().topk(2).values
    return best[..., 0] - best[..., 1]


def continuation(model: PreTrainedModel, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Return `count` tokens generated by transformers, and the number of leading tokens with a clear margin."""
    whole = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.inference_mode():
        clear = margins(model(whole).logits[0, len(prompt) - 1 : -1]) > CLEAR
    return whole[0, len(prompt) :].tolist(), count if clear.all() else int(clear.int().argmin())


def _draw(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        tensor.normal_(1.5, 0.4, generator=generator)  # with normed heads only these weights sharpen attention
    elif "norm" in name:
        tensor.normal_(1.0, 0.3, generator=generator)
    elif name.endswith("sinks"):
        tensor.normal_(0.0, 2.0, generator=generator)
    elif name.endswith("bias"):
        tensor.normal_(0.0, 0.3, generator=generator)
    elif "embed_tokens" in name:
        tensor.normal_(0.0, 1.0, generator=generator)
    else:
        gain = 1.4 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
        tensor.normal_(0.0, gain * tensor.shape[1] ** -0.5, generator=generator)
