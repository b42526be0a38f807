"""Choosing tokens at random on a GPU: one program a row, nothing sorted, nothing that the host must wait for.

What top-k and top-p keep is everything down to some logit. That logit is found
by halving: a float's bits, read as an integer, stand in the float's own order.
A look at the tokens says how many, or how much of the mass, a guess would keep;
as soon as a single token lies between what is too little and what is enough, the
limit is known exactly. Tokens that are equally likely stay or go together.

One pass over the row finds the likeliest tokens of each of its lanes, and from
where on some are missing: of a usual vocabulary some two thousand are all there.
Most limits lie among these, and are found without another pass. For those that do
not, each guess takes one.

Distances are those of a row's logits from its largest, divided by the
temperature: 0 for the likeliest token, and more for others.
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
    """Return how far tokens are from the likeliest; farther than any where outside the row."""
    logit = tl.load(logits + token, mask=inside, other=float("-inf"))
    return tl.div_rn(largest - logit, temperature)


@triton.jit
def _kept(logits, size, largest, temperature, limit, BLOCK: tl.constexpr):
    """Return how many tokens stand within the limit, and their mass."""
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
    """Return the least limit, at most `farthest`, that keeps so many tokens and so much mass."""
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
def _keep_less(least, distance):
    """Return the lesser of two, and the other one."""
    return tl.minimum(least, distance), tl.maximum(least, distance)


@triton.jit
def _closest(logits, size, largest, temperature, limit, BLOCK: tl.constexpr):
    """Return the four least distances of each lane, the least that is not among them, and the mass within the limit."""
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
        a, distance = _keep_less(a, distance)
        b, distance = _keep_less(b, distance)
        c, distance = _keep_less(c, distance)
        d, distance = _keep_less(d, distance)
        missing = tl.minimum(missing, distance)
    return a, b, c, d, tl.min(missing, 0).to(tl.int32, bitcast=True), tl.sum(mass, 0)


@triton.jit
def _held(distance, limit):
    """Return which of some distances are within the limit, and their mass."""
    within = distance.to(tl.int32, bitcast=True) <= limit
    return within.to(tl.int32), tl.where(within, tl.exp(-distance), 0.0)


@triton.jit
def _held_of(a, b, c, d, limit):
    """Return how many of the distances at hand are within the limit, and their mass."""
    count, mass = _held(a, limit)
    more, heavier = _held(b, limit)
    count += more
    mass += heavier
    more, heavier = _held(c, limit)
    count += more
    mass += heavier
    more, heavier = _held(d, limit)
    return tl.sum(count + more, 0), tl.sum(mass + heavier, 0)


@triton.jit
def _limit_of(a, b, c, d, farthest, enough_count, enough_mass):
    """Return the same as `_limit` from the distances at hand, which are all that are within `farthest`."""
    little = -1
    enough = farthest
    little_count = 0
    enough_tokens, _ = _held_of(a, b, c, d, farthest)
    while (enough - little > 1) & (enough_tokens - little_count > 1):
        middle = little + (enough - little) // 2
        count, mass = _held_of(a, b, c, d, middle)
        if (count >= enough_count) & (mass >= enough_mass):
            enough = middle
            enough_tokens = count
        else:
            little = middle
            little_count = count
    return enough


@triton.jit
def reach(logits, size, largest, temperature, nearest, top_k, top_p, BLOCK: tl.constexpr):
    """Return the farthest distance, as bits, that the limits leave: `nearest` is that of min-p."""
    a, b, c, d, missing, mass = _closest(logits, size, largest, temperature, nearest, BLOCK)
    known = missing - 1  # all that are within this are at hand
    count_known, mass_known = _held_of(a, b, c, d, known)
    limit = nearest
    if top_k > 0:
        if count_known >= top_k:
            limit = tl.minimum(limit, _limit_of(a, b, c, d, known, top_k, 0.0))
        elif missing < INFINITY:
            limit = tl.minimum(limit, _limit(logits, size, largest, temperature, INFINITY, top_k, 0.0, BLOCK))
    if top_p < 1.0:
        if limit <= known:
            _, mass = _held_of(a, b, c, d, limit)
        elif limit < nearest:
            _, mass = _kept(logits, size, largest, temperature, limit, BLOCK)
        if (limit <= known) | (mass_known >= mass * top_p):
            limit = _limit_of(a, b, c, d, tl.minimum(limit, known), 1, mass * top_p)
        else:
            limit = _limit(logits, size, largest, temperature, limit, 1, mass * top_p, BLOCK)
    return limit


@triton.jit
def _mix(x):
    """Scramble unsigned 32-bit integers, one to one."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hashed(token, low, high):
    """Return the 31 random bits of tokens in a row with these keys. The reference is `reference/drawing/noise.py`."""
    x = _mix(token.to(tl.uint32) * 0x9E3779B9 + 1)
    x = (x ^ low) * 0x7FEB352D
    x = (x ^ (x >> 15)) + high
    x *= 0x846CA68B
    return (x ^ (x >> 16)) & 0x7FFFFFFF


@triton.jit
def gumbel(bits):
    """Return standard Gumbel noise: -log(-log(1 - u)) for the uniform number that the bits stand for."""
    u = (
        bits.to(tl.int32).to(tl.float32) * (4.656612873077393e-10 * (1 - 5.960464477539063e-08))
        + 2.3283064365386963e-10
    )
    # Near 0 a difference from 1 keeps few digits of u, and these decide which unlikely token wins.
    small = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.0078125, small, -tl.log(1.0 - u)))


@triton.jit
def keys_of(low, high, position):
    """Return a row's two keys, from the halves of its seed and a position, all unsigned."""
    first = _mix(_mix(low ^ 0x9E3779B9) + high)
    first = _mix(first + position * 0x9E3779B9)
    return first, _mix(first ^ (high * 0x7FEB352D) ^ position)


# One number of each is read, so nothing is gained by knowing how they lie; and a column of one row lies as it likes.
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
    """Choose a token for one row.

    rows       [n] int64: which rows of logits
    seeds      [n, 2] int32
    positions  [n] int32
    floats     [n, 4] float32: the largest logit, temperature, top-p, and the distance that min-p allows
    limits     [n] int32: top-k, 0 where there is none
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
    """The draw family."""

    forbid = staticmethod(shaping.forbid)
    penalize_repetition = staticmethod(shaping.penalize_repetition)
    penalize_answer = staticmethod(shaping.penalize_answer)

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = logits.max(-1)
        return values, tokens

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
