"""The packed forms in plain torch decode what they store."""

from __future__ import annotations

import pytest
import torch

from infd.groups import BLOCK, Groups
from infd.kernels.reference.mxfp4 import decode, quantize
from infd.kernels.reference.packed import PackedRows, why_not
from infd.weights.encodings import blocks
from tests.kernels.packed_case import KINDS, rows_of


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_are_decoded_as_the_fields_say(kind: Groups) -> None:
    inputs = 300 if kind.inputs > 300 else 320
    given = rows_of(kind, 5, inputs)
    form = PackedRows(5, inputs, kind, torch.float32)
    storage = torch.zeros(form.shape, dtype=form.dtype)
    form.place_groups(storage, 0, given)
    found = form.look_up(torch.tensor([4, 0, 2]), storage)

    for row, which in enumerate((4, 0, 2)):
        for column in (0, 1, 15, 16, 31, 32, 255, 256, inputs - 1):
            group = column // min(kind.inputs, inputs)
            number: float = given.integers[which, column].item()
            if kind.table == "e4m3":
                number = torch.tensor([number + 128]).to(torch.uint8).view(torch.float8_e4m3fn).item()
            elif kind.table:
                number = blocks.TABLES[kind.table][int(number) + 8]
            number -= 0 if given.zeros is None else given.zeros[which, group].item()
            scale, least = given.scales[which, group].item(), 0.0
            if given.minima is not None:
                least = given.minima[which, group].item()
            if given.shared is not None:
                both = given.shared[which].view(-1, 1 + kind.minima)[column // BLOCK].tolist()
                scale, least = scale * both[0], least * both[-1]
            at = column if given.order is None else given.order[column]
            assert found[row, at].item() == pytest.approx(number * scale + least, rel=1e-5, abs=1e-6)


def test_mxfp4_is_decoded_as_its_reference_does() -> None:
    rows = quantize(torch.randn(7, 96))
    form = PackedRows(7, 96, Groups(4, 32, "BF16", table="e2m1"), torch.float32)
    storage = torch.zeros(form.shape, dtype=form.dtype)
    form.place_groups(storage, 0, rows)
    assert form.decoded(storage, slice(None)).equal(decode(rows))


def test_kinds_without_a_form_are_named() -> None:
    assert why_not(64, Groups(5, 32, "F16")) == "no form has integers of 5 bits"
    assert why_not(64, Groups(8, 32, "F16", table="iq4_nl")) == "no form has the table iq4_nl"
    assert why_not(64, Groups(4, 24, "F16")) == "no form has groups of no multiple of 16 inputs"
    assert not why_not(64, Groups(4, 100, "F16"))
