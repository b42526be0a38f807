"""Limit logits in place, in the order of infd's defaults or of llama.cpp's chain of samplers.

Sources: Meister et al. 2022 (typical-p), Tang et al. 2024 (top-n-sigma), llama.cpp (XTC, dynamic temperature).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from infd.kernels.reference.drawing import noise, temperature, truncation

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.draw import Narrowing

CHANCE: Final = -1  # the noise of this token, which no vocabulary has, decides whether XTC drops tokens
COLDEST: Final = 1e-3  # lower bound of dynamic temperatures: colder logits could overflow


def narrow(logits: Tensor, narrowing: Narrowing) -> Tensor:
    """Implements families.draw.Draw.narrow."""
    late = narrowing.late
    none, all_mass = torch.zeros_like(narrowing.min_p), torch.ones_like(narrowing.top_p)
    first = torch.where(late, all_mass, narrowing.temperature)
    left = temperature.apply(logits[narrowing.rows], narrowing.largest, first)

    left = _within_deviations(left, narrowing.top_n_sigma)
    left = _likely(
        left,
        narrowing.top_k.clamp(max=logits.shape[1]),
        torch.where(late, all_mass, narrowing.top_p),
        torch.where(late, none, narrowing.min_p),
    )
    left = _typical(left, narrowing.typical_p)
    left = _likely(left, torch.zeros_like(narrowing.top_k), torch.where(late, narrowing.top_p, all_mass), none)
    likeliest = left.amax(-1, keepdim=True)
    smallest = likeliest + torch.where(late, narrowing.min_p, none).log()[:, None]
    left = left.masked_fill_(left < smallest, float("-inf"))
    left = _without_top_choices(left, narrowing)

    chosen = _dynamic(left, narrowing)
    last = torch.where(late, chosen, all_mass)
    logits[narrowing.rows] = left / last[:, None]
    return torch.where(late, chosen, narrowing.temperature)


def columns(narrowing: Narrowing) -> Tensor:
    """Return the parameters as the kernels read them: [n, 10] float32.

    largest, temperature, top-n-sigma, top-p, min-p, typical-p, threshold of XTC, range, exponent, whether the
    temperature is late. Where XTC drops nothing, its threshold is 1.
    """
    drops = chance(narrowing.seed, narrowing.position) < narrowing.xtc_probability
    return torch.stack(
        (
            narrowing.largest,
            narrowing.temperature,
            narrowing.top_n_sigma,
            narrowing.top_p,
            narrowing.min_p,
            narrowing.typical_p,
            torch.where(drops, narrowing.xtc_threshold, 1.0),
            narrowing.range,
            narrowing.exponent,
            narrowing.late.to(torch.float32),
        ),
        1,
    )


def chance(seed: Tensor, position: Tensor) -> Tensor:
    """Return a uniform number in [0, 1) for each row: [n] float32."""
    keys = noise.row_keys(seed[:, 0], seed[:, 1], position)
    hashed = noise.token_hash(torch.full((1,), CHANCE, device=seed.device))
    return noise.uniform_bits(keys, hashed)[:, 0].to(torch.float32) * (2.0**-31 * (1 - 2.0**-24))


def _within_deviations(logits: Tensor, sigma: Tensor) -> Tensor:
    finite = logits > float("-inf")
    count = finite.sum(-1, keepdim=True)
    mean = logits.masked_fill(~finite, 0).sum(-1, keepdim=True) / count
    deviation = (((logits - mean).masked_fill(~finite, 0) ** 2).sum(-1) / count[:, 0]).sqrt()
    farthest = torch.where(sigma > 0, sigma * deviation, torch.inf)
    return logits.masked_fill(logits < -farthest[:, None], float("-inf"))


def _likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    largest = logits.amax(-1, keepdim=True)
    kept = truncation.truncate(logits - largest, logits.shape[1], top_k=top_k, top_p=top_p, min_p=min_p).logits
    least = kept.masked_fill(kept == float("-inf"), torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits - largest < least, float("-inf"))


def _typical(logits: Tensor, mass: Tensor) -> Tensor:
    surprisal = -logits.log_softmax(-1)
    share = (-surprisal).exp()
    entropy = torch.where(share > 0, share * surprisal, 0.0).sum(-1, keepdim=True)
    deviation = (surprisal - entropy).abs()
    in_order, index = deviation.sort(-1)
    before = (share.gather(1, index).cumsum(-1) < mass[:, None]).sum(-1, keepdim=True)
    farthest = in_order.gather(1, before.clamp(max=logits.shape[1] - 1))
    dropped = (deviation > farthest) & (mass < 1)[:, None]
    return logits.masked_fill(dropped, float("-inf"))


def _without_top_choices(logits: Tensor, narrowing: Narrowing) -> Tensor:
    # In logarithms: the shares of unlikely tokens are below the smallest float, and a threshold may be 0.
    top = (logits.log_softmax(-1) >= narrowing.xtc_threshold.log()[:, None]) & (logits > float("-inf"))
    least = logits.masked_fill(~top, torch.inf).amin(-1)
    drops = chance(narrowing.seed, narrowing.position) < narrowing.xtc_probability
    drops &= narrowing.xtc_threshold <= 0.5
    return logits.masked_fill((logits > least[:, None]) & drops[:, None], float("-inf"))


def _dynamic(logits: Tensor, narrowing: Narrowing) -> Tensor:
    """Return each row's temperature, [n] float32."""
    surprisal = -logits.log_softmax(-1)
    share = (-surprisal).exp()
    entropy = torch.where(share > 0, share * surprisal, 0.0).sum(-1)
    count = (logits > float("-inf")).sum(-1)
    relative = torch.where(count > 1, entropy / count.to(torch.float32).log(), 0.0).clamp_(0, 1)
    low = (narrowing.temperature - narrowing.range).clamp_(min=0)
    high = narrowing.temperature + narrowing.range
    dynamic = (low + (high - low) * relative**narrowing.exponent).clamp_(min=COLDEST)
    return torch.where(narrowing.range > 0, dynamic, narrowing.temperature)
