"""Decide which class computes a checkpoint, by the architecture that its config.json names.

Classes are named, not imported: a server loads the one file that its model needs.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infd.errors import CheckpointError
from infd.models.config import Settings, architecture
from infd.models.parameter import Blueprint

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from infd.kernels.ops import Ops
    from infd.models.base import Model

ARCHITECTURES = MappingProxyType(
    {
        "LlamaForCausalLM": "infd.models.llama:Llama",
        "MistralForCausalLM": "infd.models.mistral:Mistral",
        "Qwen3ForCausalLM": "infd.models.qwen3:Qwen3",
    }
)
OTHERS = "infd.models.transformers.model:TransformersModel"  # whatever else transformers has code for


def build(config: Mapping[str, Any], ops: Ops, *, dtype: torch.dtype, device: torch.device, max_len: int) -> Model:
    """Return the model that config.json describes; its parameters have no storage yet.

    max_len  the longest sequence that will be computed, in tokens

    Raises CheckpointError for an unknown architecture and for settings that infd does not know how to compute.
    """
    name = architecture(config)
    if "quantization_config" in Settings(config):
        raise CheckpointError("config.json: quantization_config: quantized checkpoints are not read yet")
    blueprint = Blueprint(ops=ops, dtype=dtype, device=device, max_len=max_len)
    if name in ARCHITECTURES:
        return _make(ARCHITECTURES[name], config, blueprint)
    try:
        return _make(OTHERS, config, blueprint)
    except CheckpointError as error:
        known = ", ".join(sorted(ARCHITECTURES))
        unknown = f"config.json: architecture {name!r} is unknown here"
        raise CheckpointError(
            f"{unknown}, and transformers' code for it cannot be used: {error}; known: {known}"
        ) from error


def _make(place: str, config: Mapping[str, Any], blueprint: Blueprint) -> Model:
    module, _, attribute = place.partition(":")
    model: Model = getattr(import_module(module), attribute)(config, blueprint)
    return model
