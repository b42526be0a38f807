"""The limits top-k and top-p of one row of logits on a GPU, without sorting.

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

import triton
import triton.language as tl

BLOCK = 4096
INFINITY = tl.constexpr(0x7F800000)  # the bits of the largest distance


@triton.jit
def distance_of(logits, token, inside, largest, temperature):
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
        distance = distance_of(logits, token, token < size, largest, temperature)
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
        distance = distance_of(logits, token, token < size, largest, temperature)
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
