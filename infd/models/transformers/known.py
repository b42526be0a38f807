"""Refuse models that infd cannot run with transformers' code, without importing transformers.

Importing transformers takes seconds, because transformers imports torch. This module parses the source file in which
transformers' table of model names is a literal.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infd.errors import CheckpointError
from infd.models.config import HEADS, Settings, architecture
from infd.pooling.causality import sees_ahead
from infd.pooling.reading import HEADLESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ATTENDING = frozenset({"full_attention", "sliding_attention"})
BIASED = frozenset({"BloomForCausalLM", "MptForCausalLM"})  # these use ALiBi, although config.json does not state so
# Architectures with a recurrent state in some or all layers, although not every config.json states so.
RECURRENT = frozenset(
    {
        "BailingHybridForCausalLM",
        "BambaForCausalLM",
        "FalconH1ForCausalLM",
        "FalconMambaForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "JambaForCausalLM",
        "KimiLinearForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MiniMaxForCausalLM",
        "NemotronHForCausalLM",
        "OlmoHybridForCausalLM",
        "Qwen3NextForCausalLM",
        "RecurrentGemmaForCausalLM",
        "RwkvForCausalLM",
        "Zamba2ForCausalLM",
        "ZambaForCausalLM",
        "xLSTMForCausalLM",
    }
)
# Encoders whose results depend on random numbers.
RANDOM = frozenset({"reformer"})
POOLED = (*HEADLESS, *HEADS)  # ends of names of classes whose hidden states or labels are pooled
STEP_WIDE_ROPE = frozenset({"dynamic", "longrope"})


def sees_whole_texts(config: Mapping[str, Any]) -> bool:
    """Return whether transformers' code computes the model text by text, without a cache: an encoder of transformers,
    or a decoder without causality. Raises CheckpointError for a config.json without an architecture.
    """
    if config.get("is_encoder_decoder") or config.get("is_decoder") or config.get("add_cross_attention"):
        return False
    name = architecture(config)
    if name not in decoders() and name.endswith(POOLED) and config.get("model_type") in encoders():
        return True
    return sees_ahead(config) and decoder_class(config) is not None


def require(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming the first obstacle, if config.json alone shows that infd cannot run the model.

    Whether the model's code works with infd's attention is known only once the model is built; see `survey.py`.
    """
    if sees_whole_texts(config):
        if (kind := config.get("model_type")) in RANDOM:
            raise CheckpointError(f"transformers computes model_type {kind!r} with random numbers")
        return
    settings, name = Settings(config), decoder_class(config)
    if name is None:
        if "auto_map" in settings:
            raise CheckpointError("it needs code from the model's repository (auto_map), which infd never runs")
        raise CheckpointError(f"transformers {version('transformers')} has no decoder of this name")
    settings.string("model_type")
    for reason in reasons(name, config.get):
        raise CheckpointError(reason)


def reasons(name: str, setting: Callable[[str], Any]) -> Iterator[str]:
    """Yield the obstacles to serving decoder `name`. setting: returns the setting of a key, or None if absent."""
    if setting("is_encoder_decoder"):
        yield "it is an encoder with a decoder; infd serves decoders"
    if name in BIASED or setting("alibi"):
        yield "it adds position biases to attention scores (ALiBi), which infd's attention does not"
    if name in RECURRENT:
        yield "it has a recurrent state; infd's pages hold only keys and values of attention"
    layer_types = setting("layer_types")
    others = sorted(set(layer_types) - ATTENDING) if isinstance(layer_types, (list, tuple)) else []
    if others:
        kinds = ", ".join(map(str, others))
        yield f"it has layers of type {kinds}; infd's pages hold only keys and values of attention"
    for kind in sorted(_rope_kinds(setting("rope_parameters") or setting("rope_scaling")) & STEP_WIDE_ROPE):
        yield f"transformers scales rope type {kind!r} by a step's longest sequence, so its neighbours would change"


def _rope_kinds(parameters: Any) -> set[str]:
    """Return the rope types of a config, which states one type for all layers or one for each layer type."""
    if not isinstance(parameters, dict):
        return set()
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    kinds = (table.get("rope_type", table.get("type")) for table in tables)
    return {kind for kind in kinds if isinstance(kind, str)}


@cache
def encoders() -> frozenset[str]:
    """Return the model types for which transformers has a class that fills masked tokens."""
    return frozenset(kind for kind, _ in _table("modeling_auto", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"))


def decoder_class(config: Mapping[str, Any]) -> str | None:
    """Return the name of transformers' class with the decoder of config.json and a language model head; None: none."""
    name = architecture(config)
    if name in decoders():
        return name
    return decoders_by_type().get(config.get("model_type", "")) if name.endswith(POOLED) else None


@cache
def decoders() -> frozenset[str]:
    """Return the names of transformers' causal language model classes."""
    return frozenset(decoders_by_type().values())


@cache
def decoders_by_type() -> dict[str, str]:
    """Return the names of transformers' causal language model classes, by model type."""
    return dict(_table("modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))


def _table(module: str, name: str) -> list[tuple[str, str]]:
    """Return the pairs of a table written as NAME = OrderedDict([...]) in one of transformers' `auto` modules."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "models" / "auto" / f"{module}.py").read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        if (
            isinstance(statement, ast.Assign)
            and [ast.unparse(target) for target in statement.targets] == [name]
            and isinstance(statement.value, ast.Call)
        ):
            pairs: list[tuple[str, str]] = ast.literal_eval(statement.value.args[0])
            return pairs
    raise LookupError(f"{module}.py of transformers {version('transformers')} has no {name}")
