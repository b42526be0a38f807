"""The rotary position embedding: the frequencies that a config specifies, and the table of angles by position.

The table is computed in float32, with the operations of transformers in the same order: at position 100,000 another
order of operations changes an angle by more than rounding.

Frequencies may depend on a length (seq_len in transformers). With longrope this is the length of the sequence, with
dynamic the number of tokens known when a token was computed; see `Regimes`. All ropes of a model have tables with
the same rows, so that the same positions index every layer's table.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec.structs import replace

from infd.errors import CheckpointError
from infd.scheduler.layout import Regimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from infd.models.base import Batch
    from infd.models.config import Settings


class Scaling(NamedTuple):
    """The rotation frequencies of the R / 2 pairs of a head.

    frequencies  returns radians per token, [R / 2] or [N, R / 2], for lengths [N, 1] int64
    amplitude    multiplies cosines and sines
    regimes      how angles depend on lengths
    """

    frequencies: Callable[[Tensor], Tensor]
    amplitude: float = 1.0
    regimes: Regimes = Regimes()

    def angles(self, positions: Tensor, lengths: Tensor) -> Tensor:
        """Return [N, 2, R / 2] float32: cosines, then sines, at positions [N] in sequences of lengths [N]."""
        angles = positions.float()[:, None] * self.frequencies(lengths[:, None])
        # cos and sin write into one tensor, because a copy would lengthen the start.
        both = angles.new_empty((angles.shape[0], 2, angles.shape[1]))
        torch.cos(angles, out=both[:, 0])
        torch.sin(angles, out=both[:, 1])
        return both.mul_(self.amplitude)


class Rope:
    """The rotary position embedding of some layers of a model.

    table    [rows, 2, R / 2] float32: cosines, then sines, by position; set by `lay_out`. If angles differ between
             short and long sequences, the rows for long sequences follow the rows for short sequences
    regimes  how angles depend on lengths, in sequences of at most max_len tokens
    number   index among the model's ropes
    """

    table: Tensor

    def __init__(
        self,
        rope: Settings,
        head_size: int,
        *,
        max_len: int,
        device: torch.device,
        number: int = 0,
        partial: bool = False,
    ) -> None:
        """Read the settings returned by `config.rope_parameters`.

        max_len  tokens of the longest sequence
        number   index among the model's ropes
        partial  whether the architecture can rotate only the first R elements of a head; if not, R is head_size

        Raises CheckpointError.
        """
        kind = rope.string("rope_type")
        if kind not in _SCALINGS:
            raise CheckpointError(
                f"config.json: rope type {kind!r} is not supported; supported: {', '.join(sorted(_SCALINGS))}"
            )
        share = 1.0 if kind == "proportional" else rope.number("partial_rotary_factor")
        if share != 1 and not partial:
            raise rope.error("partial_rotary_factor", "1, since this architecture rotates whole heads", share)
        size = int(head_size * share)
        if size % 2 or not 2 <= size <= head_size:
            raise rope.error("partial_rotary_factor", f"an even share of the head's {head_size} numbers", share)
        theta = rope.number("rope_theta")
        if theta <= 1:
            raise rope.error("rope_theta", "more than 1", theta)
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        self._max_len, self._device = max_len, device
        self._scaling = _SCALINGS[kind](exponents, rope, self._max_len)
        self.regimes = self._scaling.regimes
        self._device_scaling = self._scaling
        if self.regimes.prompt_over is not None:
            self._device_scaling = _SCALINGS[kind](exponents.to(self._device), rope, self._max_len)
        self.number = number

    def lay_out(self, regimes: Regimes) -> None:
        """Compute the table. regimes: the regimes of the model, which all its ropes share."""
        positions = torch.arange(self._max_len, dtype=torch.int64)
        lengths = positions + 1
        if (short := regimes.outgrown) is not None:
            lengths = torch.cat((lengths[:short], lengths.clamp(min=short + 1)))
            positions = torch.cat((positions[:short], positions))
        self.table = self._scaling.angles(positions, lengths).to(self._device)

    def angles(self, positions: Tensor, prompts: Tensor) -> Tensor:
        """Return the angles [T, 2, R / 2] of a pass; `prompts` is Batch.prompts.

        Angles that depend on the position alone are copied from the table, so they are bitwise equal in every pass.
        """
        by_position = self.table[positions]
        if self.regimes.prompt_over is None:
            return by_position
        return torch.where(
            (positions + 1 < prompts)[:, None, None], self._device_scaling.angles(positions, prompts), by_position
        )


def lay_out(ropes: Sequence[Rope]) -> Regimes:
    """Compute the tables of a model's ropes, and return the regimes.

    Raises CheckpointError if two ropes depend on lengths in different ways.
    """
    found = {rope.regimes for rope in ropes if rope.regimes.several}
    if len(found) > 1:
        raise CheckpointError(
            "config.json: rope_parameters: layers whose angles change at different lengths, or in different ways,"
            " are not supported"
        )
    regimes = found.pop() if found else Regimes()
    for rope in ropes:
        rope.lay_out(regimes)
    return regimes


def by_prompt(ropes: Sequence[Rope], batch: Batch) -> Batch:
    """Return `batch` with its own tables of angles, one row per token: the angles depend on Batch.prompts."""
    assert batch.prompts is not None
    angles = [rope.angles(batch.positions, batch.prompts) for rope in ropes]
    return replace(batch, positions=torch.arange(len(batch.positions), device=batch.positions.device), angles=angles)


# The scalings, as functions of: theta's exponents [R / 2], from 0 to 1; the rope settings; max_len in tokens.


def _unscaled(exponents: Tensor, rope: Settings, _: int) -> Scaling:
    frequencies = 1.0 / rope.number("rope_theta") ** exponents
    return Scaling(lambda _: frequencies)


def _linear(exponents: Tensor, rope: Settings, _: int) -> Scaling:
    frequencies = 1.0 / rope.number("rope_theta") ** exponents / rope.number("factor")
    return Scaling(lambda _: frequencies)


def _proportional(exponents: Tensor, rope: Settings, _: int) -> Scaling:
    """Rotate only the fastest pairs, at the frequencies that these pairs have if all pairs rotate."""
    rotated = int(rope.number("partial_rotary_factor") * 2 * len(exponents) // 2)
    frequencies = 1.0 / rope.number("rope_theta") ** exponents / rope.number("factor", 1.0)
    frequencies[rotated:] = 0
    return Scaling(lambda _: frequencies)


def _none(exponents: Tensor, _: Settings, __: int) -> Scaling:
    """Rotate by no angle, for layers without positions beside layers with rope."""
    return Scaling(lambda _: torch.zeros_like(exponents))


def _dynamic(exponents: Tensor, rope: Settings, max_len: int) -> Scaling:
    """Use unscaled frequencies for lengths up to the trained length; frequencies decrease as the length grows beyond.

    The length is the prompt's for all tokens of the prompt; for a generated token it is the number of tokens up to and
    including that token. transformers computes the same if it computes the prompt in one pass, then single tokens.
    """
    trained, factor, theta = rope.integer("max_position_embeddings"), rope.number("factor"), rope.number("rope_theta")
    size = 2 * len(exponents)
    if size == 2:
        raise rope.error("rope_type", "a type other than 'dynamic', since heads rotate a single pair", "dynamic")
    plain = 1.0 / theta**exponents

    def frequencies(lengths: Tensor) -> Tensor:
        # float64, because torch's float32 powers depend on the number of elements, which differs between chunks.
        stretched = theta * (factor * lengths.double() / trained - (factor - 1)) ** (size / (size - 2))
        return torch.where(lengths > trained, (1.0 / stretched ** exponents.double()).float(), plain)

    return Scaling(frequencies, regimes=Regimes(prompt_over=trained if trained < max_len else None))


def _yarn(exponents: Tensor, rope: Settings, _: int) -> Scaling:
    """Slow down pairs that make fewer than beta_slow turns in the original context.

    Pairs of more than beta_fast turns keep their frequency; frequencies in between are interpolated.

    Source: Peng et al. 2023, YaRN.
    """
    original = rope.integer("original_max_position_embeddings")
    factor = rope.number("factor", rope.integer("max_position_embeddings", original) / original)
    count, theta = len(exponents), rope.number("rope_theta")
    periods = theta**exponents

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
    return Scaling(lambda _: frequencies, rope.number("attention_factor", default))


def _longrope(exponents: Tensor, rope: Settings, max_len: int) -> Scaling:
    """Slow down each pair by its own factor: from `short_factor` in sequences up to the original context's length.

    All tokens of a longer sequence use `long_factor`.

    Source: Ding et al. 2024, LongRoPE.
    """
    original = rope.integer("original_max_position_embeddings", least=2)
    periods = rope.number("rope_theta") ** exponents

    def slowed(factors: str) -> Tensor:
        return 1.0 / (torch.tensor(rope.numbers(factors, len(periods))) * periods)

    short = slowed("short_factor")
    stretch = rope.number("factor", rope.integer("max_position_embeddings", original) / original)
    default = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    amplitude = rope.number("attention_factor", default)
    if max_len <= original:
        return Scaling(lambda _: short, amplitude)
    long = slowed("long_factor")
    return Scaling(lambda lengths: torch.where(lengths > original, long, short), amplitude, Regimes(outgrown=original))


def _llama3(exponents: Tensor, rope: Settings, _: int) -> Scaling:
    """Slow down pairs that make fewer than low_freq_factor turns in the original context.

    Pairs of more than high_freq_factor turns keep their frequency; frequencies in between are interpolated.

    Source: Llama 3.1's reference code.
    """
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not high > low:
        raise rope.error("high_freq_factor", f"more than low_freq_factor ({low})", high)
    original = rope.integer("original_max_position_embeddings")

    frequencies = 1.0 / rope.number("rope_theta") ** exponents
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    frequencies = torch.where(between, blended, scaled)
    return Scaling(lambda _: frequencies)


_SCALINGS: Mapping[str, Callable[[Tensor, Settings, int], Scaling]] = MappingProxyType(
    {
        "default": _unscaled,
        "dynamic": _dynamic,
        "linear": _linear,
        "llama3": _llama3,
        "longrope": _longrope,
        "none": _none,
        "proportional": _proportional,
        "yarn": _yarn,
    }
)
