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

    Scaling = Callable[[Tensor, Settings, int], tuple[Tensor, float]]


def rope_table(rope: Settings, head_size: int, max_len: int, device: torch.device, *, partial: bool = False) -> Tensor:
    """Return [max_len, 2, R / 2] float32: the cosines, then the sines, of each position's angles.

    rope     as `config.rope_parameters` gives it
    max_len  the longest sequence; longrope chooses its factors by it, see `_longrope`
    partial  whether the family can rotate just the first R numbers of a head, where rope says so; else R = head_size
    """
    kind = rope.string("rope_type")
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"config.json: rope type {kind!r} is not computed yet; known: {', '.join(sorted(_SCALINGS))}"
        )
    share = rope.number("partial_rotary_factor")
    if share != 1 and not partial:
        raise rope.error("partial_rotary_factor", "1, since this architecture rotates whole heads", share)
    size = int(head_size * share)
    if size % 2 or not 2 <= size <= head_size:
        raise rope.error("partial_rotary_factor", f"an even share of the head's {head_size} numbers", share)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    theta = rope.number("rope_theta")
    if theta <= 1:
        raise rope.error("rope_theta", "more than 1", theta)
    frequencies, amplitude = _SCALINGS[kind](theta**exponents, rope, max_len)
    angles = torch.arange(max_len, dtype=torch.int64).float()[:, None] * frequencies
    return (torch.stack((angles.cos(), angles.sin()), dim=1) * amplitude).to(device)


# Each takes the periods of the R / 2 pairs, in tokens a radian, and returns their frequencies and what multiplies
# cosines and sines.


def _unscaled(periods: Tensor, _: Settings, max_len: int) -> tuple[Tensor, float]:
    return 1.0 / periods, 1.0


def _linear(periods: Tensor, rope: Settings, max_len: int) -> tuple[Tensor, float]:
    return 1.0 / periods / rope.number("factor"), 1.0


def _dynamic(periods: Tensor, rope: Settings, max_len: int) -> tuple[Tensor, float]:
    """Up to the trained length, the plain angles.

    Longer sequences turn slower, all of their tokens by the sequence's own length: no table by position says that,
    and no cached page could be shared between two lengths.
    """
    trained = rope.integer("max_position_embeddings")
    if max_len > trained:
        raise CheckpointError(
            f"config.json: rope type 'dynamic' is computed for at most {trained} tokens, not {max_len}"
        )
    return 1.0 / periods, 1.0


def _yarn(periods: Tensor, rope: Settings, max_len: int) -> tuple[Tensor, float]:
    """Slow down what turns less than beta_slow times in the original context, keep what turns more than beta_fast.

    Source: Peng et al. 2023, YaRN.
    """
    original = rope.integer("original_max_position_embeddings")
    factor = rope.number("factor", rope.integer("max_position_embeddings", original) / original)
    count, theta = len(periods), rope.number("rope_theta")

    def pair(turns: float) -> float:
        return count * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(rope.number("beta_fast", 32.0)), pair(rope.number("beta_slow", 1.0))
    if rope.boolean("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    slowed = ((torch.arange(count, dtype=torch.float32) - first) / ((last - first) or 0.001)).clamp(0, 1)
    kept = 1 - slowed
    frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept

    def amplitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    default = amplitude(1.0)
    if "mscale" in rope and "mscale_all_dim" in rope:
        default = amplitude(rope.number("mscale")) / amplitude(rope.number("mscale_all_dim"))
    return frequencies, rope.number("attention_factor", default)


def _longrope(periods: Tensor, rope: Settings, max_len: int) -> tuple[Tensor, float]:
    """Slow each pair by a factor of its own: a short one if no sequence outgrows the original context, else a long one.

    transformers switches with the length of each sequence. Here the longest sequence that is served decides for all,
    so that an angle depends on the position alone and a cached page stays right as its sequence grows. Who wants the
    short factors lowers max_model_len to the original context.

    Source: Ding et al. 2024, LongRoPE.
    """
    original = rope.integer("original_max_position_embeddings", least=2)
    factors = rope.numbers("long_factor" if max_len > original else "short_factor", len(periods))
    stretch = rope.number("factor", rope.integer("max_position_embeddings", original) / original)
    default = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return 1.0 / (torch.tensor(factors) * periods), rope.number("attention_factor", default)


def _llama3(periods: Tensor, rope: Settings, max_len: int) -> tuple[Tensor, float]:
    """Slow down what turns less than once in the original context, keep what turns often, blend in between.

    Source: Llama 3.1's reference code.
    """
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not high > low:
        raise rope.error("high_freq_factor", f"more than low_freq_factor ({low})", high)
    original = rope.integer("original_max_position_embeddings")

    frequencies = 1.0 / periods
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, scaled), 1.0


_SCALINGS: Mapping[str, Scaling] = MappingProxyType(
    {
        "default": _unscaled,
        "dynamic": _dynamic,
        "linear": _linear,
        "llama3": _llama3,
        "longrope": _longrope,
        "yarn": _yarn,
    }
)
