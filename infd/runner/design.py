"""Decide what is computed of a checkpoint, and how: device, type, kernels, model, longest sequence.

Nothing is read but headers and config.json, and no memory is taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infd.errors import CheckpointError, ConfigError, DeviceMissing
from infd.kernels.select import CACHED, QUANTIZED, preferring, quantized, select
from infd.models import registry
from infd.models.config import architecture, context_length, is_bounded, stored_dtype
from infd.models.parameter import Matrix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.config import Config
    from infd.kernels.ops import Ops
    from infd.kernels.select import Candidate
    from infd.models.base import Model
    from infd.weights.checkpoint import Checkpoint

CPUINFO = Path("/proc/cpuinfo")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Design(NamedTuple):
    """A model, and what it computes with.

    dtype    of activations
    max_len  tokens of the longest sequence
    """

    model: Model
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    max_len: int


def design(
    config: Config,
    checkpoint: Checkpoint,
    device: torch.device,
    memory: torch.device,
    candidates: Mapping[str, Sequence[Candidate]],
) -> Design:
    """Decide what is computed of a checkpoint, and how.

    device  what computes
    memory  where tensors lie; apart from `device` only where nothing is to be computed
    """
    try:
        dtype = choose_dtype(config.model.dtype, checkpoint.config, device)
        ops = select(device, dtype, candidates)
        max_len = _max_model_len(config.model.max_model_len, checkpoint.config)
        model = registry.build(
            checkpoint.config, ops, dtype=dtype, device=memory, max_len=max_len, stored=checkpoint.tensors
        )
    except CheckpointError as error:  # it knows what config.json says, not where that lies
        raise CheckpointError(f"{checkpoint.directory}: {error}") from error
    asked = [name for name in ("quantization", "quantize_vocabulary") if getattr(config.model, name) in QUANTIZED]
    if asked and not any(isinstance(weight, Matrix) for weight in model.parameters):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise ConfigError(
            f"model.{asked[0]}: {architecture(checkpoint.config)} is computed by transformers' code, whose weights"
            f" stay as they are; leave {flags} out"
        )
    return Design(model, ops, dtype, device, max_len)


def candidates(config: Config) -> Mapping[str, Sequence[Candidate]]:
    """Return what kernels are chosen from."""
    weights = quantized(config.model.quantization, config.model.quantize_vocabulary)
    chosen = {**weights, **CACHED.get(config.cache.dtype, {})}
    return preferring("flashinfer", chosen) if config.device.flashinfer else chosen


def choose_device(kind: str) -> torch.device:
    """Return the device that `kind` asks for. Raises DeviceMissing."""
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise DeviceMissing(f"device.kind is 'cuda', but torch {torch.__version__} {built}")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(wanted: str, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Return the type of weights and activations: as asked for, else the checkpoint's own if it is fast here."""
    if wanted != "auto":
        return DTYPES[wanted]
    stored = DTYPES.get(stored_dtype(config) or "float32", torch.float32)
    if device.type == "cuda" or stored is torch.float32:
        return stored
    return torch.bfloat16 if _has_bfloat16(CPUINFO.read_text()) else torch.float32


def _has_bfloat16(cpuinfo: str) -> bool:
    """Say whether the processor multiplies bfloat16 matrices natively; emulated, it is slower than float32."""
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _max_model_len(wanted: int | None, config: Mapping[str, Any]) -> int:
    trained = context_length(config)
    if trained < 2:
        raise CheckpointError(f"config.json: max_position_embeddings is {trained}; a prompt and an answer take two")
    if wanted is not None and wanted > trained and is_bounded(config):
        raise ConfigError(f"model.max_model_len is {wanted}; the model was made for at most {trained} tokens")
    return wanted or trained
