"""Token sampling on a GPU: one program per row, without sorting and without waiting for the device.

The distance of a token is (largest logit - its logit) / temperature: 0 for the likeliest token.

Top-k and top-p keep every token up to a largest distance, the limit. The limit is found by bisection over the bits of
the float, because the bits of positive floats, read as integers, are in the order of the floats. For each guess, the
number or the probability mass of the tokens that the guess keeps is computed; once a single token is between a guess
that keeps too little and a guess that keeps enough, the limit is exact. Equally likely tokens are kept or dropped
together.

Lane i has the tokens whose ids are i modulo BLOCK. One pass over the row finds the four likeliest tokens of each
lane, and the likeliest of all other tokens; in a usual vocabulary, the lanes' four tokens include the likeliest two
thousand tokens. Most limits are among these tokens and need no further pass; otherwise each guess takes one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from infd.kernels.triton import shaping

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.draw import Drawing

BLOCK = 4096
INFINITY = tl.constexpr(0x7F800000)  # the bits of the largest distance


@triton.jit
def _distance(logits, token, inside, largest, temperature):
    """Return the tokens' distances; infinity outside the row."""
    logit = tl.load(logits + token, mask=inside, other=float("-inf"))
    return tl.div_rn(largest - logit.to(tl.float32), temperature)


@triton.jit
def _kept(logits, size, largest, temperature, limit, BLOCK: tl.constexpr):
    """Return the number of tokens within the limit, and their mass."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = _distance(logits, token, token < size, largest, temperature)
        within = (distance.to(tl.int32, bitcast=True) <= limit) & (token < size)
        count += within.to(tl.int32)
        mass += tl.where(within, tl.exp(-distance), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _limit(logits, size, largest, temperature, farthest, enough_count, enough_mass, BLOCK: tl.constexpr):
    """Return the smallest limit, at most `farthest`, that keeps at least `enough_count` tokens and `enough_mass`."""
    little = -1  # keeps nothing
    enough = farthest
    little_count = 0
    enough_tokens, _ = _kept(logits, size, largest, temperature, farthest, BLOCK)
    while (enough - little > 1) & (enough_tokens - little_count > 1):
        middle = little + (enough - little) // 2
        count, mass = _kept(logits, size, largest, temperature, middle, BLOCK)
        if (count >= enough_count) & (mass >= enough_mass):
            enough = middle
            enough_tokens = count
        else:
            little = middle
            little_count = count
    return enough


@triton.jit
def _exchange(least, distance):
    """Return the smaller and the larger distance."""
    return tl.minimum(least, distance), tl.maximum(least, distance)


@triton.jit
def _closest(logits, size, largest, temperature, limit, BLOCK: tl.constexpr):
    """Return each lane's four smallest distances, the smallest distance not among them, and the mass within `limit`."""
    a = tl.full([BLOCK], float("inf"), tl.float32)
    b = a
    c = a
    d = a
    missing = a
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = _distance(logits, token, token < size, largest, temperature)
        within = (distance.to(tl.int32, bitcast=True) <= limit) & (token < size)
        mass += tl.where(within, tl.exp(-distance), 0.0)
        a, distance = _exchange(a, distance)
        b, distance = _exchange(b, distance)
        c, distance = _exchange(c, distance)
        d, distance = _exchange(d, distance)
        missing = tl.minimum(missing, distance)
    return a, b, c, d, tl.min(missing, 0).to(tl.int32, bitcast=True), tl.sum(mass, 0)


@triton.jit
def _within(distance, limit):
    """Return for each distance whether it is within the limit, as 0 or 1, and its mass, 0 beyond the limit."""
    within = distance.to(tl.int32, bitcast=True) <= limit
    return within.to(tl.int32), tl.where(within, tl.exp(-distance), 0.0)


@triton.jit
def _within_lanes(a, b, c, d, limit):
    """Return how many of the lanes' distances a, b, c and d are within the limit, and their mass."""
    count, mass = _within(a, limit)
    more, heavier = _within(b, limit)
    count += more
    mass += heavier
    more, heavier = _within(c, limit)
    count += more
    mass += heavier
    more, heavier = _within(d, limit)
    return tl.sum(count + more, 0), tl.sum(mass + heavier, 0)


@triton.jit
def _limit_in_lanes(a, b, c, d, farthest, enough_count, enough_mass):
    """Return `_limit`'s result from the lanes' distances, which must include every token within `farthest`."""
    little = -1
    enough = farthest
    little_count = 0
    enough_tokens, _ = _within_lanes(a, b, c, d, farthest)
    while (enough - little > 1) & (enough_tokens - little_count > 1):
        middle = little + (enough - little) // 2
        count, mass = _within_lanes(a, b, c, d, middle)
        if (count >= enough_count) & (mass >= enough_mass):
            enough = middle
            enough_tokens = count
        else:
            little = middle
            little_count = count
    return enough


@triton.jit
def reach(logits, size, largest, temperature, nearest, top_k, top_p, BLOCK: tl.constexpr):
    """Return the largest distance that all limits allow. `nearest`: the largest that min-p allows. Both as bits."""
    a, b, c, d, missing, mass = _closest(logits, size, largest, temperature, nearest, BLOCK)
    known = missing - 1  # the lanes include every token within this distance
    count_known, mass_known = _within_lanes(a, b, c, d, known)
    limit = nearest
    if top_k > 0:
        if count_known >= top_k:
            limit = tl.minimum(limit, _limit_in_lanes(a, b, c, d, known, top_k, 0.0))
        elif missing < INFINITY:
            limit = tl.minimum(limit, _limit(logits, size, largest, temperature, INFINITY, top_k, 0.0, BLOCK))
    if top_p < 1.0:
        if limit <= known:
            _, mass = _within_lanes(a, b, c, d, limit)
        elif limit < nearest:
            _, mass = _kept(logits, size, largest, temperature, limit, BLOCK)
        if (limit <= known) | (mass_known >= mass * top_p):
            limit = _limit_in_lanes(a, b, c, d, tl.minimum(limit, known), 1, mass * top_p)
        else:
            limit = _limit(logits, size, largest, temperature, limit, 1, mass * top_p, BLOCK)
    return limit


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
        distance = _distance(logits, token, token < size, largest, temperature)
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
