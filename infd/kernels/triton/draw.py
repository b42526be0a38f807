"""Token sampling on a GPU: one program per row, without sorting and without waiting for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from infd.kernels.triton import narrowing, repeats, shaping
from infd.kernels.triton.limits import BLOCK, INFINITY, distance_of, reach

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.draw import Drawing


@triton.jit
def _mix(x):
    """Scramble unsigned 32-bit integers bijectively."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hashed(token, low, high):
    """Return 31 random bits for tokens, given the row's keys. Reference: `reference/drawing/noise.py`."""
    x = _mix(token.to(tl.uint32) * 0x9E3779B9 + 1)
    x = (x ^ low) * 0x7FEB352D
    x = (x ^ (x >> 15)) + high
    x *= 0x846CA68B
    return (x ^ (x >> 16)) & 0x7FFFFFFF


@triton.jit
def gumbel(bits):
    """Return standard Gumbel noise -log(-log(1 - u)), for the uniform number u with these bits."""
    u = (
        bits.to(tl.int32).to(tl.float32) * (4.656612873077393e-10 * (1 - 5.960464477539063e-08))
        + 2.3283064365386963e-10
    )
    # Near 0, 1 - u loses the digits of u that decide which unlikely token is sampled.
    small = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.0078125, small, -tl.log(1.0 - u)))


@triton.jit
def keys_of(low, high, position):
    """Return a row's two keys, given its seed's halves and a position, all unsigned."""
    first = _mix(_mix(low ^ 0x9E3779B9) + high)
    first = _mix(first + position * 0x9E3779B9)
    return first, _mix(first ^ (high * 0x7FEB352D) ^ position)


# A program reads these pointers once, so specialization on their alignment would recompile without a gain.
@triton.jit(do_not_specialize=["seeds", "positions", "limits"])
def draw(
    logits,
    rows,
    seeds,
    positions,
    floats,
    limits,
    tokens,
    size,
    logits_row,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sample a token for one row.

    rows       [n] int64: index into logits
    seeds      [n, 2] int32
    positions  [n] int32
    floats     [n, 4] float32: largest logit, temperature, top-p, largest distance allowed by min-p
    limits     [n] int32: top-k; 0: no limit
    tokens     [n] int64
    """
    program = tl.program_id(0)
    logits += tl.load(rows + program) * logits_row
    largest = tl.load(floats + program * 4)
    temperature = tl.load(floats + program * 4 + 1)
    limit = INFINITY
    if TRUNCATED:
        top_p = tl.load(floats + program * 4 + 2)
        limit = tl.load(floats + program * 4 + 3).to(tl.int32, bitcast=True)
        limit = reach(logits, size, largest, temperature, limit, tl.load(limits + program), top_p, BLOCK)

    seed = tl.load(seeds + program * 2).to(tl.uint32, bitcast=True)
    upper = tl.load(seeds + program * 2 + 1).to(tl.uint32, bitcast=True)
    low, high = keys_of(seed, upper, tl.load(positions + program).to(tl.uint32, bitcast=True))
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = distance_of(logits, token, token < size, largest, temperature)
        within = (distance.to(tl.int32, bitcast=True) <= limit) & (token < size)
        score = tl.where(within, gumbel(hashed(token, low, high)) - distance, float("-inf"))
        chosen = tl.where(score > best, token, chosen)
        best = tl.maximum(best, score)
    winner = tl.where(best == tl.max(best, 0), chosen, 0x7FFFFFFF)
    tl.store(tokens + program, tl.min(winner, 0).to(tl.int64))


class Draw:
    """Implements families.draw.Draw."""

    forbid = staticmethod(shaping.forbid)
    penalize_repetition = staticmethod(shaping.penalize_repetition)
    penalize_answer = staticmethod(shaping.penalize_answer)
    penalize_repeats = staticmethod(repeats.penalize)
    narrow = staticmethod(narrowing.apply)

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = logits.max(-1)
        return values.float(), tokens

    def __call__(self, logits: Tensor, drawing: Drawing, *, truncated: bool) -> Tensor:
        tokens = torch.empty_like(drawing.rows)
        floats = (drawing.largest, drawing.temperature, drawing.top_p, drawing.min_p.log().abs())
        draw[(len(tokens),)](
            logits,
            drawing.rows,
            drawing.seed.contiguous(),
            drawing.position,
            torch.stack(floats, 1),
            drawing.top_k.contiguous(),
            tokens,
            logits.shape[1],
            logits.stride(0),
            TRUNCATED=truncated,
            BLOCK=BLOCK,
            num_warps=16,
        )
        return tokens
