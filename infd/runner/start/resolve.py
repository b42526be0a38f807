"""Decide implementation, dtype and longest sequence from settings, config.json and the kind of device.

Imports no torch: `infd start` decides before it imports torch, and `infd config check` does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from infd.errors import CheckpointError, ConfigError
from infd.kernels.select import CACHED, CANDIDATES, COMPRESSED, EXACT, preferring, quantized, why_none
from infd.models import registry
from infd.models.config import (
    context_length,
    is_bounded,
    states_context_length,
    stored_dtype,
)
from infd.weights.encodings.find import read_format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.config import Config
    from infd.kernels.select import Candidate

CPUINFO = Path("/proc/cpuinfo")
DTYPES = ("float32", "bfloat16", "float16")
SHORT = MappingProxyType({"float": "float32", "half": "float16"})  # names that other servers' command lines accept
# By kernel family, the setting that restricts the implementation: section, name, flag.
CHOSEN = {
    "attention": ("cache", "dtype", "--kv-cache-dtype"),
    "linear": ("model", "quantization", "--quantization"),
    "vocabulary": ("model", "quantize_vocabulary", "--quantize-vocabulary"),
}


class Resolved(Struct, frozen=True):
    """The decisions made before the model is built.

    own      whether infd's own code computes the model; if not, transformers' code does
    dtype    name of the activations' dtype; None if it depends on the kind of device, which is unknown
    max_len  tokens of the longest sequence; None if only transformers' config class states the length
    """

    own: bool
    dtype: str | None
    max_len: int | None


def resolve(
    config: Config,
    described: Mapping[str, Any],
    kind: str | None,
    candidates: Mapping[str, Sequence[Candidate]],
) -> Resolved:
    """Decide implementation, dtype and longest sequence. Raises CheckpointError, ConfigError.

    described  content of config.json
    kind       kind of device, "cpu" or "cuda"; None: not yet known
    """
    if config.model.exact_activations and config.model.quantization != "none":
        raise ConfigError(
            f"model.exact_activations: products with weights of --quantization {config.model.quantization} quantize"
            " activations; omit one of the two"
        )
    read_format(described)
    own = registry.is_implemented(described)
    if own:
        registry.check_dimensions(described)
    dtype = choose_dtype(config.model.dtype, described, kind)
    if kind is not None and dtype is not None:
        _require_kernels(config, kind, dtype, candidates)
    stated = own or states_context_length(described)
    max_len = None
    if stated:
        max_len = longest(config.model.max_model_len, context_length(described), bounded=is_bounded(described))
    return Resolved(own, dtype, max_len)


def candidates(config: Config) -> Mapping[str, Sequence[Candidate]]:
    """Return each family's candidate kernels under the settings."""
    weights = quantized(config.model.quantization, config.model.quantize_vocabulary)
    chosen: dict[str, Sequence[Candidate]] = {
        **weights,
        **CACHED.get(config.cache.dtype, {}),
        **(EXACT if config.model.exact_activations else {}),
    }
    if config.scheduler.speculative != "off" and config.device.depth != 1:
        # FlashInfer plans with the host's lengths, which are upper bounds while drafts are in flight.
        attention = chosen.get("attention", CANDIDATES["attention"])
        chosen["attention"] = tuple(each for each in attention if not each.called("flashinfer"))
    if not config.model.compress:
        chosen = {family: tuple(each for each in some if each is not COMPRESSED) for family, some in chosen.items()}
    return preferring("flashinfer", chosen) if config.device.flashinfer else chosen


def choose_dtype(configured: str, described: Mapping[str, Any], kind: str | None) -> str | None:
    """Return the dtype of weights and activations: the requested dtype, or the default.

    The default on a GPU is the checkpoint's dtype. On a CPU it is float32, but bfloat16 on a processor that multiplies
    bfloat16 natively, if the checkpoint's dtype has 16 bits, or the model is an encoder: most are published in float32,
    and in bfloat16 their vectors keep a cosine above 0.999.

    Returns None if the default depends on the kind of device, which is unknown.
    """
    if configured != "auto":
        return SHORT.get(configured, configured)
    stored = stored_dtype(described)
    if stored not in DTYPES:
        stored = "float32"
    if kind == "cuda" or (stored == "float32" and not registry.is_encoder(described)):
        return stored
    if kind is None:
        return None
    return "bfloat16" if _has_bfloat16(CPUINFO.read_text()) else "float32"


def _has_bfloat16(cpuinfo: str) -> bool:
    """Return whether the processor multiplies bfloat16 matrices natively; emulation is slower than float32."""
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def longest(configured: int | None, trained: int, *, bounded: bool = True) -> int:
    """Return the tokens of the longest sequence. Raises CheckpointError, ConfigError.

    configured  model.max_model_len; None: `trained`
    trained     the model's context length
    bounded     whether `configured` must not exceed `trained`
    """
    if trained < 2:
        raise CheckpointError(f"config.json: max_position_embeddings is {trained}; a prompt and an answer need 2")
    if configured is not None and configured > trained and bounded:
        raise ConfigError(f"model.max_model_len is {configured}; the model's context length is {trained} tokens")
    return configured or trained


def _require_kernels(config: Config, kind: str, dtype: str, candidates: Mapping[str, Sequence[Candidate]]) -> None:
    for family, (section, name, flag) in CHOSEN.items():
        if reasons := why_none(candidates[family], kind, dtype):
            value = getattr(getattr(config, section), name)
            raise ConfigError(
                f"{section}.{name}: no {family} kernel supports {value!r} on {kind} with activations in {dtype}:"
                f" {reasons}; choose another {flag}"
            )
