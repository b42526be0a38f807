"""Rotary positions: which frequencies a config asks for, and the table of angles by position.

The table is computed in float32 exactly as transformers does it, since an angle
at position 100,000 has few bits to spare.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from infd.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from infd.models.config import Settings

    Scaling = Callable[[Tensor, Settings], Tensor]

DEFAULT_THETA = 10_000.0


def rope_table(settings: Settings, head_size: int, max_len: int, device: torch.device) -> Tensor:
    """Return [max_len, 2, head_size / 2] float32: the cosines, then the sines, of each position's angles."""
    scaling, theta = _read(settings)
    kind = scaling.string("rope_type", scaling.string("type", "default")) if scaling else "default"
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"config.json: rope type {kind!r} is not computed yet; known: {', '.join(sorted(_SCALINGS))}"
        )
    if scaling and scaling.number("partial_rotary_factor", 1.0) != 1:
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not computed yet")
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (theta**exponents)
    if scaling:
        frequencies = _SCALINGS[kind](frequencies, scaling)
    angles = torch.arange(max_len, dtype=torch.int64).float()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)


def _read(settings: Settings) -> tuple[Settings | None, float]:
    """Return the scaling's table, if any, and theta, from transformers 5's spelling or the one before it."""
    if "rope_parameters" in settings:
        table = settings.table("rope_parameters")
        return table, table.number("rope_theta")
    theta = settings.number("rope_theta", DEFAULT_THETA)
    return (settings.table("rope_scaling") if "rope_scaling" in settings else None), theta


def _unscaled(frequencies: Tensor, _: Settings) -> Tensor:
    return frequencies


def _linear(frequencies: Tensor, scaling: Settings) -> Tensor:
    return frequencies / scaling.number("factor")


def _llama3(frequencies: Tensor, scaling: Settings) -> Tensor:
    """Slow down what turns less than once in the original context, keep what turns often, blend in between.

    Source: Llama 3.1's reference code.
    """
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if not high > low:
        raise scaling.error("high_freq_factor", f"more than low_freq_factor ({low})", high)
    original = scaling.integer("original_max_position_embeddings")

    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, scaled)


_SCALINGS: Mapping[str, Scaling] = MappingProxyType({"default": _unscaled, "linear": _linear, "llama3": _llama3})
