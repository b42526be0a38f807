"""Penalties and masks of logits on a GPU, in place, without copying rows.

Occurrences are first marked in a table by token, because a token may occur at several positions. The repetition penalty
needs one bit per token, presence and frequency penalties need a count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.draw import History

BLOCK = 4096  # tokens of the vocabulary per program
POSITIONS = 1024  # positions of a sequence per program


@triton.jit
def mask(logits, rows, bits, size, logits_row, words, BLOCK: tl.constexpr):
    """Set the logits of one row's tokens whose bit is 0 to -inf. bits [n, words] int32, lowest bit first."""
    program = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < size
    word = tl.load(bits + program * words + token // 32, mask=inside, other=-1)
    logits += tl.load(rows + program) * logits_row
    tl.store(logits + token, float("-inf"), mask=inside & (((word >> (token % 32)) & 1) == 0))


@triton.jit(do_not_specialize=["sequences", "begins", "ends"])
def mark(
    tokens,
    sequences,
    begins,
    ends,
    marks,
    tokens_row,
    marks_row,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark the tokens at a block of positions of one row's sequence: count them, or set their bits.

    tokens     [S, L] int32
    sequences  [n] int64: each row's index into tokens
    begins     [n] int32: first position counted, if COUNTED; otherwise all positions before `ends` are marked
    ends       [n] int64
    marks      [n, vocab] int32 if COUNTED, else [n, ceil(vocab / 32)] int32, lowest bit first
    """
    program = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts = place < tl.load(ends + program)
    if COUNTED:
        counts = counts & (place >= tl.load(begins + program))
    tokens += tl.load(sequences + program) * tokens_row
    token = tl.load(tokens + place, mask=counts, other=0)
    marks += program.to(tl.int64) * marks_row
    if COUNTED:
        tl.atomic_add(marks + token, 1, mask=counts, sem="relaxed")
    else:
        tl.atomic_or(marks + token // 32, 1 << (token % 32), mask=counts, sem="relaxed")


@triton.jit(do_not_specialize=["penalties"])
def repeat(logits, rows, marks, penalties, size, logits_row, marks_row, BLOCK: tl.constexpr):
    """Penalize one row's marked tokens: divide positive logits by the row's penalty, multiply negative logits by it."""
    program = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < size
    word = tl.load(marks + program.to(tl.int64) * marks_row + token // 32, mask=inside, other=0)
    seen = inside & (((word >> (token % 32)) & 1) != 0)
    logits += tl.load(rows + program) * logits_row
    penalty = tl.load(penalties + program)
    logit = tl.load(logits + token, mask=seen, other=0.0)
    tl.store(logits + token, tl.where(logit > 0, tl.div_rn(logit, penalty), logit * penalty), mask=seen)


@triton.jit(do_not_specialize=["presences", "frequencies"])
def subtract(logits, rows, marks, presences, frequencies, size, logits_row, marks_row, BLOCK: tl.constexpr):
    """Subtract presence + frequency * count from one row's logit of each counted token."""
    program = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(marks + program.to(tl.int64) * marks_row + token, mask=token < size, other=0)
    seen = count > 0
    logits += tl.load(rows + program) * logits_row
    penalty = count.to(tl.float32) * tl.load(frequencies + program) + tl.load(presences + program)
    logit = tl.load(logits + token, mask=seen, other=0.0)
    tl.store(logits + token, logit - penalty, mask=seen)


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    size = logits.shape[1]
    mask[len(rows), triton.cdiv(size, BLOCK)](logits, rows, bits, size, logits.stride(0), bits.stride(0), BLOCK=BLOCK)


def penalize_repetition(logits: Tensor, rows: Tensor, history: History, penalty: Tensor) -> None:
    size = logits.shape[1]
    marks = _marked(history, triton.cdiv(size, 32), counted=False)
    repeat[len(rows), triton.cdiv(size, BLOCK)](
        logits, rows, marks, penalty.contiguous(), size, logits.stride(0), marks.stride(0), BLOCK=BLOCK
    )


def penalize_answer(logits: Tensor, rows: Tensor, history: History, presence: Tensor, frequency: Tensor) -> None:
    size = logits.shape[1]
    marks = _marked(history, size, counted=True)
    subtract[len(rows), triton.cdiv(size, BLOCK)](
        logits,
        rows,
        marks,
        presence.contiguous(),
        frequency.contiguous(),
        size,
        logits.stride(0),
        marks.stride(0),
        BLOCK=BLOCK,
    )


def _marked(history: History, width: int, *, counted: bool) -> Tensor:
    tokens, sequences, prompts, ends, longest = history
    marks = torch.zeros((len(sequences), width), dtype=torch.int32, device=tokens.device)
    mark[len(sequences), triton.cdiv(longest, POSITIONS)](
        tokens,
        sequences,
        prompts.contiguous(),
        ends,
        marks,
        tokens.stride(0),
        marks.stride(0),
        COUNTED=counted,
        BLOCK=POSITIONS,
    )
    return marks
