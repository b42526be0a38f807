"""Limits of llama.cpp's samplers on a GPU: one program per row, in place, without sorting.

The distance of a token is (largest logit - its logit) / temperature, as in limits.py, whose `reach` finds top-k and
top-p. The other limits take one to three passes over the row, typical-p one for each guess of a bisection.
Reference: `reference/drawing/narrowing.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from infd.kernels.reference.drawing.narrowing import columns
from infd.kernels.triton.limits import BLOCK, INFINITY, distance_of, reach

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.draw import Narrowing

COLDEST = tl.constexpr(1e-3)  # as in the reference


@triton.jit
def _deviation(logits, size, largest, temperature, BLOCK: tl.constexpr):
    """Return the standard deviation of the finite distances."""
    count = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = distance_of(logits, token, token < size, largest, temperature)
        finite = distance < float("inf")
        count += finite.to(tl.float32)
        total += tl.where(finite, distance, 0.0)
    mean = tl.sum(total, 0) / tl.sum(count, 0)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = distance_of(logits, token, token < size, largest, temperature)
        squares += tl.where(distance < float("inf"), (distance - mean) * (distance - mean), 0.0)
    return tl.sqrt_rn(tl.sum(squares, 0) / tl.sum(count, 0))


@triton.jit
def _totals(logits, size, largest, temperature, nearest, limit, BLOCK: tl.constexpr):
    """Return number and mass of the tokens between two distances, the sum of mass times distance, and the least one."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = distance_of(logits, token, token < size, largest, temperature)
        kept = (distance.to(tl.int32, bitcast=True) <= limit) & (distance >= nearest) & (distance < float("inf"))
        share = tl.where(kept, tl.exp(-distance), 0.0)
        count += kept.to(tl.int32)
        mass += share
        weighted += tl.where(kept, share * distance, 0.0)
        least = tl.minimum(least, tl.where(kept, distance, float("inf")))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.sum(weighted, 0), tl.min(least, 0)


@triton.jit
def _typical(logits, size, largest, temperature, limit, mean, farthest, BLOCK: tl.constexpr):
    """Return number and mass of the tokens within `limit` whose distance differs from `mean` by at most `farthest`."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = distance_of(logits, token, token < size, largest, temperature)
        kept = (distance.to(tl.int32, bitcast=True) <= limit) & (distance < float("inf"))
        kept = kept & (tl.abs(distance - mean).to(tl.int32, bitcast=True) <= farthest)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp(-distance), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _keep_typical(logits, size, largest, temperature, limit, share, BLOCK: tl.constexpr):
    """Set the logits of tokens that typical-p drops to -inf."""
    _, mass, weighted, _ = _totals(logits, size, largest, temperature, 0.0, limit, BLOCK)
    mean = weighted / mass  # of the distances: a surprisal differs from the entropy by as much as the distance from it
    little = -1
    enough = INFINITY
    little_count = 0
    enough_tokens, _ = _typical(logits, size, largest, temperature, limit, mean, INFINITY, BLOCK)
    while (enough - little > 1) & (enough_tokens - little_count > 1):
        middle = little + (enough - little) // 2
        count, kept = _typical(logits, size, largest, temperature, limit, mean, middle, BLOCK)
        if kept >= mass * share:
            enough = middle
            enough_tokens = count
        else:
            little = middle
            little_count = count
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = distance_of(logits, token, token < size, largest, temperature)
        far = tl.abs(distance - mean).to(tl.int32, bitcast=True) > enough
        tl.store(logits + token, float("-inf"), mask=far & (token < size))
    tl.debug_barrier()  # later passes read these logits in other threads


@triton.jit
def _least_of_top(logits, size, largest, temperature, limit, threshold, BLOCK: tl.constexpr):
    """Return the distance of the least likely token whose probability is at least `threshold`; 0 if there is none."""
    _, mass, _, _ = _totals(logits, size, largest, temperature, 0.0, limit, BLOCK)
    top = -tl.log(threshold * mass)
    found = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = distance_of(logits, token, token < size, largest, temperature)
        within = (distance.to(tl.int32, bitcast=True) <= limit) & (distance <= top)
        found = tl.maximum(found, tl.where(within, distance, 0.0))
    return tl.max(found, 0)


@triton.jit
def _dynamic(logits, size, largest, temperature, spread, exponent, cooling, nearest, limit, BLOCK: tl.constexpr):
    """Return the temperature that the entropy of the kept tokens gives."""
    count, mass, weighted, _ = _totals(logits, size, largest, cooling, nearest, limit, BLOCK)
    entropy = tl.log(mass) + weighted / mass
    relative = tl.where(count > 1, entropy / tl.log(tl.maximum(count, 2).to(tl.float32)), 0.0)
    relative = tl.minimum(tl.maximum(relative, 0.0), 1.0)
    power = tl.where(relative > 0, tl.exp(exponent * tl.log(tl.maximum(relative, 1e-30))), 0.0)
    power = tl.where(exponent == 0, 1.0, power)
    low = tl.maximum(temperature - spread, 0.0)
    return tl.maximum(low + (temperature + spread - low) * power, COLDEST)


@triton.jit(do_not_specialize=["parameters", "limits", "temperatures"])
def narrow(logits, rows, parameters, limits, temperatures, size, logits_row, BLOCK: tl.constexpr):
    """Limit and cool one row's logits.

    logits        [N, vocab] float32; logits_row elements separate rows
    rows          [n] int64
    parameters    [n, 10] float32: see `columns`; min-p is the largest distance that it allows
    limits        [n] int32: top-k; 0: no limit
    temperatures  [n] float32: the result
    """
    program = tl.program_id(0)
    logits += tl.load(rows + program) * logits_row
    parameters += program * 10
    largest = tl.load(parameters)
    temperature = tl.load(parameters + 1)
    sigma = tl.load(parameters + 2)
    top_p = tl.load(parameters + 3)
    reaching = tl.load(parameters + 4)
    typical_p = tl.load(parameters + 5)
    threshold = tl.load(parameters + 6)
    spread = tl.load(parameters + 7)
    exponent = tl.load(parameters + 8)
    late = tl.load(parameters + 9) != 0

    cooling = tl.where(late, 1.0, temperature)  # the divisor of distances
    limit = tl.where(late, float("inf"), reaching).to(tl.int32, bitcast=True)
    if sigma > 0:
        farthest = sigma * _deviation(logits, size, largest, cooling, BLOCK)
        limit = tl.minimum(limit, farthest.to(tl.int32, bitcast=True))
    early_p = tl.where(late, 1.0, top_p)
    limit = reach(logits, size, largest, cooling, limit, tl.load(limits + program), early_p, BLOCK)
    if typical_p < 1:
        _keep_typical(logits, size, largest, cooling, limit, typical_p, BLOCK)
    if late:
        if top_p < 1:
            limit = reach(logits, size, largest, cooling, limit, 0, top_p, BLOCK)
        if reaching < float("inf"):
            _, _, _, least = _totals(logits, size, largest, cooling, 0.0, limit, BLOCK)
            limit = tl.minimum(limit, (least + reaching).to(tl.int32, bitcast=True))
    nearest = 0.0
    if threshold <= 0.5:
        nearest = _least_of_top(logits, size, largest, cooling, limit, threshold, BLOCK)
    if late & (spread > 0):
        temperature = _dynamic(logits, size, largest, temperature, spread, exponent, cooling, nearest, limit, BLOCK)
    tl.store(temperatures + program, temperature)
    last = tl.where(late, temperature, 1.0)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        distance = distance_of(logits, token, token < size, largest, cooling)
        kept = (distance.to(tl.int32, bitcast=True) <= limit) & (distance >= nearest)
        tl.store(logits + token, tl.where(kept, tl.div_rn(-distance, last), float("-inf")), mask=token < size)


def apply(logits: Tensor, narrowing: Narrowing) -> Tensor:
    """Implements families.draw.Draw.narrow."""
    temperatures = torch.empty_like(narrowing.temperature)
    narrow[(len(temperatures),)](
        logits,
        narrowing.rows,
        columns(narrowing._replace(min_p=narrowing.min_p.log().abs())),
        narrowing.top_k.contiguous(),
        temperatures,
        logits.shape[1],
        logits.stride(0),
        BLOCK=BLOCK,
        num_warps=16,
    )
    return temperatures
