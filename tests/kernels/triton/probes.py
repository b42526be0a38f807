"""Kernels that expose device functions of other kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from infd.kernels.triton.draw import gumbel, hashed, keys_of
from infd.kernels.triton.limits import reach


@triton.jit
def show_noise(seeds, positions, keys, bits, noise, SIZE: tl.constexpr):
    """Store the keys, the random bits and the noise of tokens 0 to SIZE."""
    row = tl.program_id(0)
    low = tl.load(seeds + row * 2).to(tl.uint32, bitcast=True)
    high = tl.load(seeds + row * 2 + 1).to(tl.uint32, bitcast=True)
    low, high = keys_of(low, high, tl.load(positions + row).to(tl.uint32, bitcast=True))
    tl.store(keys + row * 2, low.to(tl.int32, bitcast=True))
    tl.store(keys + row * 2 + 1, high.to(tl.int32, bitcast=True))
    token = tl.arange(0, SIZE)
    random = hashed(token, low, high)
    tl.store(bits + row * SIZE + token, random.to(tl.int32, bitcast=True))
    tl.store(noise + row * SIZE + token, gumbel(random))


@triton.jit
def show_reach(logits, floats, top_k, bits, size, BLOCK: tl.constexpr):
    """Store the limit found for each row. floats [n, 3]: temperature, top-p, distance of min-p; largest logit 0."""
    row = tl.program_id(0)
    temperature = tl.load(floats + row * 3)
    top_p = tl.load(floats + row * 3 + 1)
    nearest = tl.load(floats + row * 3 + 2).to(tl.int32, bitcast=True)
    found = reach(logits + row * size, size, 0.0, temperature, nearest, tl.load(top_k + row), top_p, BLOCK)
    tl.store(bits + row, found)


@triton.jit
def show_gumbel(bits, noise, SIZE: tl.constexpr):
    """Store the noise for given random bits."""
    at = tl.arange(0, SIZE)
    tl.store(noise + at, gumbel(tl.load(bits + at).to(tl.uint32, bitcast=True)))
