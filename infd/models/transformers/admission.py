"""Decide from config.json alone whether transformers has a class that could run here, and refuse by name what has not.

Nothing is built yet, and no code but that of the installed transformers is ever run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from infd.errors import CheckpointError
from infd.models.config import Settings, architecture

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST_LAYERS = 4096
ATTENDING = frozenset({"full_attention", "sliding_attention"})
TOWERS = ("vision_config", "audio_config")
BIASED = frozenset({"BloomForCausalLM", "MptForCausalLM"})  # those whose config does not say that they use ALiBi
STEP_WIDE_ROPE = frozenset({"dynamic", "longrope"})
# What a forward pass returns; a saved config may ask for more than infd reads.
RETURNED = {"return_dict": True, "use_cache": False, "output_attentions": False, "output_hidden_states": False}


class Admitted(NamedTuple):
    """A class of transformers, and the configuration to build it with."""

    model: Any
    config: Any


def admit(config: Mapping[str, Any]) -> Admitted:
    """Return what transformers has for a config.json. Raises CheckpointError, naming the first reason against it."""
    name = architecture(config)
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        if "auto_map" in Settings(config):
            raise CheckpointError("it needs code from the model's repository (auto_map), which infd never runs")
        raise CheckpointError(f"transformers {transformers.__version__} has no decoder of this name")
    admitted = Admitted(getattr(transformers, name), _read(config))
    for reason in _reasons(name, admitted.config):
        raise CheckpointError(reason)
    return admitted


def _read(config: Mapping[str, Any]) -> Any:
    kind = Settings(config).string("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(f"transformers {transformers.__version__} does not know model_type {kind!r}")
    try:
        read = transformers.CONFIG_MAPPING[kind].from_dict({**config, **RETURNED})
    except Exception as error:  # each class checks in its own way
        raise CheckpointError(f"transformers cannot read config.json: {error}") from error
    layers = getattr(read, "num_hidden_layers", None)
    Settings({"num_hidden_layers": layers}).integer("num_hidden_layers", most=MOST_LAYERS)
    return read


def _reasons(name: str, config: Any) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it is an encoder with a decoder; infd serves decoders"
    for tower in TOWERS:
        if tower in config.sub_configs and getattr(config, tower, None) is not None:
            yield f"it reads more than text ({tower})"
    if name in BIASED or getattr(config, "alibi", False):
        yield "it adds position biases to attention scores (ALiBi), which infd's attention does not"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENDING)
    if others:
        yield f"it has layers of type {', '.join(others)}; infd's pages hold keys and values of attention alone"
    for kind in sorted(_rope_kinds(getattr(config, "rope_parameters", None)) & STEP_WIDE_ROPE):
        yield f"transformers turns rope type {kind!r} by the longest sequence of a step, so neighbours would matter"


def _rope_kinds(parameters: Mapping[str, Any] | None) -> set[str]:
    """Return the rope types of a config, which states one for all layers or one for each type of layer."""
    if not parameters:
        return set()
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    return {table["rope_type"] for table in tables if isinstance(table.get("rope_type"), str)}
