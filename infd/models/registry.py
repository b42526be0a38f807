"""Map the architecture named in config.json to the class that implements the architecture.

Classes are named, not imported: a process imports only the module of its own model.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infd.errors import CheckpointError
from infd.models.config import Settings, architecture, decoder, language_model
from infd.models.dimensions import Dimensions
from infd.models.encoder_dimensions import EncoderDimensions
from infd.models.transformers import known
from infd.pooling import PoolingSettings
from infd.pooling.causality import sees_ahead
from infd.pooling.reading import CLASSIFIES, HEADLESS, LABELS_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from infd.kernels.ops import Ops
    from infd.models.base import Model
    from infd.models.blueprint import Blueprint, Stored

ARCHITECTURES = MappingProxyType(
    {
        "Ernie4_5_MoeForCausalLM": "infd.models.ernie4_5_moe:Ernie4_5Moe",
        "Gemma2ForCausalLM": "infd.models.gemma2:Gemma2",
        "Gemma3ForCausalLM": "infd.models.gemma3:Gemma3",
        "Gemma3ForConditionalGeneration": "infd.models.gemma3:Gemma3",
        "Glm4ForCausalLM": "infd.models.glm4:Glm4",
        "Glm4MoeForCausalLM": "infd.models.glm4_moe:Glm4Moe",
        "GptOssForCausalLM": "infd.models.gpt_oss:GptOss",
        "GritLM": "infd.models.gritlm:GritLM",
        "GraniteForCausalLM": "infd.models.granite:Granite",
        "GraniteMoeForCausalLM": "infd.models.granite_moe:GraniteMoe",
        "GraniteMoeSharedForCausalLM": "infd.models.granite_moe:GraniteMoe",
        "Llama4ForCausalLM": "infd.models.llama4:Llama4",
        "Llama4ForConditionalGeneration": "infd.models.llama4:Llama4",
        "LlamaForCausalLM": "infd.models.llama:Llama",
        "MistralForCausalLM": "infd.models.mistral:Mistral",
        "MixtralForCausalLM": "infd.models.mixtral:Mixtral",
        "Olmo2ForCausalLM": "infd.models.olmo2:Olmo2",
        "OlmoeForCausalLM": "infd.models.olmoe:Olmoe",
        "Phi3ForCausalLM": "infd.models.phi3:Phi3",
        "PhimoeForCausalLM": "infd.models.phimoe:Phimoe",
        "Qwen2ForCausalLM": "infd.models.qwen2:Qwen2",
        "Qwen2MoeForCausalLM": "infd.models.qwen2_moe:Qwen2Moe",
        "Qwen3ForCausalLM": "infd.models.qwen3:Qwen3",
        "Qwen3MoeForCausalLM": "infd.models.qwen3_moe:Qwen3Moe",
    }
)
# Encoders, by the first part of the architecture's name.
_ENCODERS = MappingProxyType(
    {
        "Bert": "infd.models.bert:Bert",
        "Camembert": "infd.models.roberta:Roberta",
        "DistilBert": "infd.models.distilbert:DistilBert",
        "Electra": "infd.models.electra:Electra",
        "EuroBert": "infd.models.eurobert:EuroBert",
        "Gte": "infd.models.gte:Gte",
        "MPNet": "infd.models.mpnet:MPNet",
        "ModernBert": "infd.models.modernbert:ModernBert",
        "New": "infd.models.gte:Gte",
        "NomicBert": "infd.models.nomic_bert:NomicBert",
        "Roberta": "infd.models.roberta:Roberta",
        "XLMRoberta": "infd.models.roberta:Roberta",
    }
)
ENCODERS = MappingProxyType(
    {f"{family}{head}": place for family, place in _ENCODERS.items() for head in (*HEADLESS, CLASSIFIES, LABELS_TOKENS)}
)
TRANSFORMERS = "infd.models.transformers.model:TransformersModel"  # for any other decoder that transformers implements
TRANSFORMERS_TEXTS = "infd.models.transformers.encoder:TransformersEncoder"  # without causality, and for encoders


def is_implemented(config: Mapping[str, Any]) -> bool:
    """Return whether infd's own code computes the architecture; False: transformers' code may compute it.

    Raises CheckpointError if config.json alone shows that neither can.
    """
    name = architecture(config)
    if name in ENCODERS:
        return True
    if language_model(config) in ARCHITECTURES:
        return True
    try:
        known.require(config)
    except CheckpointError as error:
        raise _unsupported(name, error) from error
    return False


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether infd's own code computes the architecture as an encoder."""
    return bool(config.get("architectures")) and architecture(config) in ENCODERS


def check_dimensions(config: Mapping[str, Any]) -> None:
    """Check the sizes that config.json states for an architecture of infd's own. Raises CheckpointError."""
    (EncoderDimensions if architecture(config) in ENCODERS else Dimensions).read(decoder(config))


def transformers_length(config: Mapping[str, Any]) -> int:
    """Return the context length that transformers' config class sets if config.json states none.

    Raises CheckpointError.
    """
    from infd.models.transformers.admission import read_config  # not at the top: importing transformers takes seconds

    try:
        known.require(config)
        length = getattr(read_config(config), "max_position_embeddings", None)
        return Settings({"max_position_embeddings": length}).integer("max_position_embeddings")
    except CheckpointError as error:
        raise _unsupported(architecture(config), error) from error


def _unsupported(name: str, reason: CheckpointError) -> CheckpointError:
    served = ", ".join(sorted([*ARCHITECTURES, *ENCODERS]))
    return CheckpointError(
        f"config.json: architecture {name!r} is not supported: {reason}; supported: {served}, and most other decoders"
        " and encoders that transformers implements"
    )


def build(
    config: Mapping[str, Any],
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    stored: Mapping[str, Stored] = MappingProxyType({}),
    pooling: PoolingSettings | None = None,
) -> Model:
    """Return the model that config.json describes; its parameters have no storage yet.

    max_len  tokens of the longest sequence
    stored   the checkpoint's tensors by name; empty: the usual names are assumed
    pooling  how hidden states are pooled; None: the model is not pooled

    Raises CheckpointError for unknown architectures and unsupported settings.
    """
    from infd.models.blueprint import Blueprint  # not at the top: this imports torch, which other functions do not need

    name, own = architecture(config), is_implemented(config)
    blueprint = Blueprint(
        ops=ops, dtype=dtype, device=device, max_len=max_len, stored=stored, pooling=pooling or PoolingSettings()
    )
    if blueprint.pooling.causal and name not in ENCODERS and sees_ahead(config):
        raise CheckpointError(
            "config.json: is_causal or use_bidirectional_attention: without causality the model generates no text;"
            " start infd with --task embed or classify"
        )
    if own:
        return _make(ENCODERS.get(name) or ARCHITECTURES[language_model(config)], decoder(config), blueprint)
    place = TRANSFORMERS_TEXTS if known.sees_whole_texts(config) else TRANSFORMERS
    try:
        return _make(place, config, blueprint)
    except CheckpointError as error:
        raise _unsupported(name, error) from error


def _make(place: str, described: Settings | Mapping[str, Any], blueprint: Blueprint) -> Model:
    module, _, attribute = place.partition(":")
    model: Model = getattr(import_module(module), attribute)(described, blueprint)
    return model
