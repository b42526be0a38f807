"""Rotary positions: which frequencies a config asks for, and the table of angles by position.

The table is computed in float32 exactly as transformers does it, since an angle
at position 100,000 has few bits to spare.

Frequencies may depend on a length, which transformers calls seq_len: of the sequence (longrope), or of what was there
when a token was computed (dynamic). `Regimes` says which; the tables of a model are laid out for the regimes of all its
ropes, so that one list of positions serves every layer.
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
    from infd.models.parameter import Blueprint


class Scaling(NamedTuple):
    """How fast the R / 2 pairs of numbers turn.

    frequencies  in radians a token, [R / 2] or [N, R / 2], by lengths [N, 1] int64
    amplitude    multiplies cosines and sines
    regimes      which lengths those are
    """

    frequencies: Callable[[Tensor], Tensor]
    amplitude: float = 1.0
    regimes: Regimes = Regimes()

    def angles(self, positions: Tensor, lengths: Tensor) -> Tensor:
        """Return [N, 2, R / 2] float32: cosines and sines at positions [N], under lengths [N]."""
        angles = positions.float()[:, None] * self.frequencies(lengths[:, None])
        return torch.stack((angles.cos(), angles.sin()), dim=1) * self.amplitude


class Rope:
    """The rotary positions of some layers of a model.

    table    [rows, 2, R / 2] float32: the cosines, then the sines, of each position's angles, once `lay_out` has run.
             Where a longer sequence has other angles than a short one, those of the long follow behind the short's
    regimes  what the angles depend on besides the position, given how long sequences may become
    number   which of the model's ropes it is
    """

    table: Tensor

    def __init__(self, blueprint: Blueprint, rope: Settings, head_size: int, *, partial: bool = False) -> None:
        """Read what `config.rope_parameters` gives.

        partial  whether the family can rotate just the first R numbers of a head, where rope says so; else R is the
                 head's size

        Raises CheckpointError.
        """
        kind = rope.string("rope_type")
        if kind not in _SCALINGS:
            raise CheckpointError(
                f"config.json: rope type {kind!r} is not computed yet; known: {', '.join(sorted(_SCALINGS))}"
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
        self._max_len, self._device = blueprint.max_len, blueprint.device
        self._scaling = _SCALINGS[kind](exponents, rope, self._max_len)
        self.regimes = self._scaling.regimes
        self._there = self._scaling  # the same, to compute with on the device
        if self.regimes.prompt_over is not None:
            self._there = _SCALINGS[kind](exponents.to(self._device), rope, self._max_len)
        self.number = len(blueprint.ropes)
        blueprint.ropes.append(self)

    def lay_out(self, regimes: Regimes) -> None:
        """Compute the table, for the regimes of all ropes of the model."""
        positions = torch.arange(self._max_len, dtype=torch.int64)
        lengths = positions + 1
        if (short := regimes.outgrown) is not None:
            lengths = torch.cat((lengths[:short], lengths.clamp(min=short + 1)))
            positions = torch.cat((positions[:short], positions))
        self.table = self._scaling.angles(positions, lengths).to(self._device)

    def angles(self, positions: Tensor, prompts: Tensor) -> Tensor:
        """Return the angles [T, 2, R / 2] of a pass whose tokens belong to prompts of such lengths; see Batch.prompts.

        Those that depend on their position alone are the table's, to the bit.
        """
        by_position = self.table[positions]
        if self.regimes.prompt_over is None:
            return by_position
        return torch.where(
            (positions + 1 < prompts)[:, None, None], self._there.angles(positions, prompts), by_position
        )


def lay_out(ropes: Sequence[Rope]) -> Regimes:
    """Compute the tables of a model's ropes; return what angles depend on besides positions. Raises CheckpointError."""
    found = {rope.regimes for rope in ropes if rope.regimes.several}
    if len(found) > 1:
        raise CheckpointError(
            "config.json: rope_parameters: layers whose angles change at different lengths, or in different ways,"
            " are not computed yet"
        )
    regimes = found.pop() if found else Regimes()
    for rope in ropes:
        rope.lay_out(regimes)
    return regimes


def by_prompt(ropes: Sequence[Rope], batch: Batch) -> Batch:
    """Return a pass with tables of angles of its own, by token, where prompts' lengths decide; see Batch.prompts."""
    assert batch.prompts is not None
    angles = [rope.angles(batch.positions, batch.prompts) for rope in ropes]
    return replace(batch, positions=torch.arange(len(batch.positions), device=batch.positions.device), angles=angles)


# Each takes the exponents of the R / 2 pairs' periods, 0 to 1, and the longest sequence that is to be computed.


def _unscaled(exponents: Tensor, rope: Settings, _: int) -> Scaling:
    frequencies = 1.0 / rope.number("rope_theta") ** exponents
    return Scaling(lambda _: frequencies)


def _linear(exponents: Tensor, rope: Settings, _: int) -> Scaling:
    frequencies = 1.0 / rope.number("rope_theta") ** exponents / rope.number("factor")
    return Scaling(lambda _: frequencies)


def _proportional(exponents: Tensor, rope: Settings, _: int) -> Scaling:
    """Turn the fastest pairs of whole heads as though all turned, and the others not at all."""
    turned = int(rope.number("partial_rotary_factor") * 2 * len(exponents) // 2)
    frequencies = 1.0 / rope.number("rope_theta") ** exponents / rope.number("factor", 1.0)
    frequencies[turned:] = 0
    return Scaling(lambda _: frequencies)


def _dynamic(exponents: Tensor, rope: Settings, max_len: int) -> Scaling:
    """Up to the trained length, the plain angles; behind it, slower ones the longer the sequence was by then.

    A prompt is computed as one: all its tokens turn by its length, each that follows by its own position. That is how
    transformers turns a prompt computed at once, and then single tokens.
    """
    trained, factor, theta = rope.integer("max_position_embeddings"), rope.number("factor"), rope.number("rope_theta")
    size = 2 * len(exponents)
    if size == 2:
        raise rope.error("rope_type", "another than 'dynamic' where a head turns one pair of numbers", "dynamic")
    plain = 1.0 / theta**exponents

    def frequencies(lengths: Tensor) -> Tensor:
        # In float64: torch's float32 powers depend on how many are computed at once, and so on how a prompt is cut.
        stretched = theta * (factor * lengths.double() / trained - (factor - 1)) ** (size / (size - 2))
        return torch.where(lengths > trained, (1.0 / stretched ** exponents.double()).float(), plain)

    return Scaling(frequencies, regimes=Regimes(prompt_over=trained if trained < max_len else None))


def _yarn(exponents: Tensor, rope: Settings, _: int) -> Scaling:
    """Slow down what turns less than beta_slow times in the original context, keep what turns more than beta_fast.

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
    """Slow each pair by a factor of its own: a short one up to the original context, else a long one.

    A sequence that outgrows the original context has long factors from its first token on.

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
    """Slow down what turns less than once in the original context, keep what turns often, blend in between.

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
        "proportional": _proportional,
        "yarn": _yarn,
    }
)
