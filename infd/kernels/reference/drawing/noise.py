"""Noise that depends on (seed, position, token) alone.

There is no generator state: a token sampled again after preemption, in another batch or on another device, has equal
noise.

The noise is a hash in wrapping 32-bit integers: (seed, position) becomes two keys; a token's own hash is mixed with the
first key, then with the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# Odd multipliers with good avalanche, as signed 32-bit integers. Source: Wellons, hash-prospector (public domain).
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
GOLDEN = 0x9E3779B9 - 2**32


def row_keys(seed_low: Tensor, seed_high: Tensor, position: Tensor) -> Tensor:
    """Return two keys for each row, [n, 2] int32, from int32 seed halves and positions."""
    low = _mix(_mix(seed_low ^ GOLDEN) + seed_high)
    low = _mix(low + position * GOLDEN)
    return torch.stack((low, _mix(low ^ seed_high * FIRST ^ position)), dim=1)


def token_hash(tokens: Tensor) -> Tensor:
    """Return the hash, int32, of token ids of any shape."""
    return _mix(tokens.to(torch.int32) * GOLDEN + 1)


def gumbel(keys: Tensor, hashed: Tensor) -> Tensor:
    """Return standard Gumbel noise [n, m] float32 for row keys [n, 2] and token hashes [n, m] or [m]."""
    # Uniform in (0, 1), at full precision near 0: a small u gives large noise, by which unlikely tokens are sampled.
    u = uniform_bits(keys, hashed).to(torch.float32).mul_(2.0**-31 * (1 - 2.0**-24)).add_(2.0**-32)
    return u.neg_().log1p_().neg_().log_().neg_()


def uniform_bits(keys: Tensor, hashed: Tensor) -> Tensor:
    """Return 31 random bits, [n, m] int32, for row keys [n, 2] and token hashes [n, m] or [m]."""
    x = hashed ^ keys[:, :1]
    x.mul_(FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.add_(keys[:, 1:])
    x.mul_(SECOND)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x.bitwise_and_(0x7FFFFFFF)


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit integers bijectively."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * FIRST
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * SECOND
    return x ^ (x >> 16 & 0xFFFF)
