"""Adapters with random weights, made and applied by PEFT."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from tests.tiny import oracle

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

EVERY_PRODUCT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make(checkpoint: Path, directory: Path, *, seed: int = 0, r: int = 4, **settings: Any) -> PreTrainedModel:
    """Save an adapter for a checkpoint into `directory`; return the model with it, not merged, in float32.

    settings  of PEFT's LoraConfig
    """
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PEFT warns about transformers and tied heads
        settings = {"target_modules": EVERY_PRODUCT, "lora_alpha": 8, **settings}
        adapted = get_peft_model(oracle(checkpoint), LoraConfig(r=r, init_lora_weights=False, **settings))
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in adapted.named_parameters():
            if "lora_" in name:  # the update is about as large as the base weight
                tensor.normal_(0.0, 0.4 * tensor.shape[1] ** -0.5, generator=generator)
        adapted.save_pretrained(directory)
    model: PreTrainedModel = adapted.eval()
    return model
