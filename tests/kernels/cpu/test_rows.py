"""The persistent batch in native code, against the reference."""

from __future__ import annotations

import torch

from infd.kernels.cpu.rows import RowKernels
from infd.kernels.families.rows import BatchState
from infd.kernels.reference.rows import RowKernels as Reference

ROWS, LONGEST, GROUPS, PAGE_TOKENS = 5, 40, 2, 4


def kept() -> BatchState:
    chance = torch.Generator().manual_seed(1)
    return BatchState(
        torch.randint(500, (ROWS, LONGEST), generator=chance).to(torch.int32),
        torch.tensor([1, 17, LONGEST, 30, 1]),
        torch.randint(1, 2**30, (ROWS, GROUPS, LONGEST // PAGE_TOKENS), generator=chance).to(torch.int32),
    )


def equal(ours, theirs) -> bool:
    return all(a.dtype is b.dtype and a.equal(b) for a, b in zip(ours, theirs, strict=True))


def test_a_steps_tokens_and_pages_are_placed(library):
    state, native = kept(), RowKernels(library)
    # A prompt's chunk, a decoding row whose bound is too high, the last token of a full row; the padding row.
    row, bound = torch.tensor([3, 1, 2, 4]), torch.tensor([5, 18, LONGEST - 1, 0])
    span, offset = torch.tensor([0, 0, 0, 1, 2, 3, 3]), torch.tensor([0, 1, 2, 0, 0, 0, 0])

    ours = native.place_tokens(state, row, bound, span, offset)
    assert equal(ours, Reference().place_tokens(state, row, bound, span, offset))
    assert ours.start.tolist() == [5, 16, LONGEST - 1, 0]
    for group in range(GROUPS):
        asked = (state.tables[:, group], row[:3], 7, ours.row, ours.position, PAGE_TOKENS)
        assert equal(native.place_pages(*asked), Reference().place_pages(*asked))


def test_tokens_are_appended(library):
    ours, theirs = kept(), kept()
    appended = torch.tensor([3, 0]), torch.tensor([30, 1]), torch.tensor([7, 8])
    RowKernels(library).append(ours, *appended)
    Reference().append(theirs, *appended)
    assert equal(ours, theirs)
    assert ours.length.tolist() == [2, 17, LONGEST, 31, 1]
