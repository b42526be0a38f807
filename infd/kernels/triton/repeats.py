"""The DRY penalty on a GPU: compares a sequence's end with all its places at once, then penalizes.

Reference: `reference/drawing/repeats.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from infd.kernels.families.draw import LONGEST_REPETITION

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.draw import History, Repeats

POSITIONS = 1024  # positions read at once in search of a breaker
PLACES = 256  # places per program; a program is done when no place repeats any longer
BLOCK = 4096  # tokens of the vocabulary per program
LONGEST = tl.constexpr(LONGEST_REPETITION)
LARGEST_LOG = 88.7228391  # of a float32
FAR = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["sequences", "ends", "windows", "limits", "count", "width"])
def until_breaker(
    tokens, sequences, ends, windows, heads, tails, limits, tokens_row, count, width, BLOCK: tl.constexpr
):
    """Store the number of tokens after a row's last breaker, or of all tokens in its window: limits [n] int32."""
    program = tl.program_id(0)
    end = tl.load(ends + program).to(tl.int32)
    known = tl.minimum(end, tl.load(windows + program))
    last = tokens + tl.load(sequences + program) * tokens_row + end - 1
    nearest = tl.full([BLOCK], FAR, tl.int32)  # 32 * tokens back + 31 - length of the tail
    for first in range(0, known, BLOCK):
        back = first + tl.arange(0, BLOCK)
        inside = back < known
        bits = tl.load(heads + tl.load(last - back, mask=inside, other=0), mask=inside, other=0)
        longest = tl.where((bits & 1) != 0, 0, -1)
        for number in range(count):
            matches = ((bits >> (number + 1)) & 1) != 0
            length = tl.zeros([BLOCK], tl.int32)
            for place in range(width):
                token = tl.load(tails + number * width + place)
                there = back - place - 1
                known_token = tl.load(last - there, mask=matches & (there >= 0), other=-2)
                matches = matches & ((token < 0) | (known_token == token))
                length += (token >= 0).to(tl.int32)
            longest = tl.where(matches, tl.maximum(longest, length), longest)
        nearest = tl.minimum(nearest, tl.where(inside & (longest >= 0), back * 32 + 31 - longest, FAR))
    found = tl.min(nearest, 0)
    tl.store(limits + program, tl.where(found == FAR, known, found // 32 - (31 - found % 32)))


@triton.jit(do_not_specialize=["sequences", "ends", "windows", "alloweds", "limits"])
def mark(tokens, sequences, ends, windows, alloweds, limits, marks, tokens_row, marks_row, BLOCK: tl.constexpr):
    """Mark the tokens that would continue a repetition with 1 + its length: marks [n, vocab] int32."""
    program = tl.program_id(0)
    end = tl.load(ends + program).to(tl.int32)
    known = tl.minimum(end, tl.load(windows + program))
    allowed = tl.load(alloweds + program)
    limit = tl.minimum(tl.load(limits + program), allowed + LONGEST)
    last = tokens + tl.load(sequences + program) * tokens_row + end - 1
    back = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK) + 1
    repeats = back < known
    length = tl.zeros([BLOCK], tl.int32)
    compared = 0
    while (compared < limit) & (tl.sum(repeats.to(tl.int32), 0) > 0):
        repeats = repeats & (back + compared < known)
        token = tl.load(last - compared)
        repeats = repeats & (tl.load(last - back - compared, mask=repeats, other=-1) == token)
        length += repeats.to(tl.int32)
        compared += 1
    found = (back < known) & (length >= allowed)
    token = tl.load(last + 1 - back, mask=found, other=0)
    tl.atomic_max(marks + program.to(tl.int64) * marks_row + token, length + 1, mask=found, sem="relaxed")


@triton.jit(do_not_specialize=["multipliers", "bases", "most", "alloweds"])
def subtract(
    logits, rows, marks, heads, multipliers, bases, most, alloweds, size, logits_row, marks_row, BLOCK: tl.constexpr
):
    """Subtract the penalty from one row's logit of each marked token that is no breaker. most [n]: largest exponent."""
    program = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    marked = tl.load(marks + program.to(tl.int64) * marks_row + token, mask=token < size, other=0)
    marked = tl.where((tl.load(heads + token, mask=token < size, other=1) & 1) != 0, 0, marked)
    base = tl.load(bases + program)
    exponent = (marked - 1 - tl.load(alloweds + program)).to(tl.float32)
    exponent = tl.minimum(exponent, tl.load(most + program))
    penalty = tl.load(multipliers + program) * tl.exp(exponent * tl.log(base))
    logits += tl.load(rows + program) * logits_row
    logit = tl.load(logits + token, mask=marked > 0, other=0.0)
    tl.store(logits + token, logit - penalty, mask=marked > 0)


def penalize(logits: Tensor, rows: Tensor, history: History, repeats: Repeats) -> None:
    """Implements families.draw.Draw.penalize_repeats."""
    tokens, sequences, _, ends, longest = history
    size, count = logits.shape[1], len(rows)
    window, allowed = repeats.window.contiguous(), repeats.allowed.contiguous()
    limits = torch.empty(count, dtype=torch.int32, device=logits.device)
    marks = torch.zeros((count, size), dtype=torch.int32, device=logits.device)
    until_breaker[(count,)](
        tokens,
        sequences,
        ends,
        window,
        repeats.heads,
        repeats.tails,
        limits,
        tokens.stride(0),
        *repeats.tails.shape,
        BLOCK=POSITIONS,
    )
    mark[count, triton.cdiv(longest, PLACES)](
        tokens,
        sequences,
        ends,
        window,
        allowed,
        limits,
        marks,
        tokens.stride(0),
        marks.stride(0),
        BLOCK=PLACES,
    )
    subtract[count, triton.cdiv(size, BLOCK)](
        logits,
        rows,
        marks,
        repeats.heads,
        repeats.multiplier.contiguous(),
        repeats.base.contiguous(),
        torch.where(repeats.base > 1.000001, (LARGEST_LOG / repeats.base.log()).floor(), torch.inf),
        allowed,
        size,
        logits.stride(0),
        marks.stride(0),
        BLOCK=BLOCK,
    )
