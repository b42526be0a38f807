"""Every model on the native kernels in bfloat16, against the reference in float32 with the same weights."""

from __future__ import annotations

import msgspec
import pytest
import torch

from infd.kernels.cpu import linear_int8
from infd.kernels.cpu.linear import Matrices, Packed
from infd.kernels.reference.dense import Stack
from infd.kernels.select import CANDIDATES, quantized, select
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.models.test_parity import EACH, LENGTH, text
from tests.tiny import VARIANTS

CUTS = {"at once": (LENGTH,), "in chunks": (20, 1, 20), "one by one": (1,) * LENGTH}
# Logits spread over 11. bfloat16 keeps 8 bits of each of the dozens of numbers that a logit passes through, and here
# every weight matters: plain torch in bfloat16 is off by 0.04 to 0.12 in the mean, and nothing can do better.
MEAN_OFF = 0.15
INT8_OFF = 0.6  # seven bits of each number, in as many places; in models this narrow few errors cancel out
BESIDE_REFERENCE = 1.15  # at most so much further off than plain torch in bfloat16


def references(dtype):
    """Return ops of plain torch."""
    return select(CPU, dtype, {family: candidates[-1:] for family, candidates in CANDIDATES.items()})


def native(**replaced):
    ops = select(CPU, torch.bfloat16)
    assert {row.family: row.chosen for row in ops.selection}["linear"] == "native"
    return msgspec.structs.replace(ops, **replaced)


def compute(directory, ops, dtype, counts):
    driver = Driver(load_model(directory, ops=ops, dtype=dtype), ops=ops, seed=3)
    told = driver.start(text(1))
    return torch.cat([driver.step((told, count))[0] for count in counts])


def exact(directory):
    """Return the logits of the reference in float32, with weights rounded to bfloat16."""
    ops = references(torch.float32)
    model = load_model(directory, ops=ops)
    for parameter in model.parameters:
        parameter.tensor.copy_(parameter.tensor.bfloat16())
    driver = Driver(model, ops=ops)
    return driver.step((driver.start(text(1)), LENGTH))[0]


def off(logits, expected):
    """Return how far logits are off in the mean."""
    assert logits.isfinite().all()
    return (logits - expected).abs().mean().item()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_model_is_as_near_to_float32_as_bfloat16_can_be(built, tiny, variant):
    expected = exact(tiny(variant))
    reference = off(compute(tiny(variant), references(torch.bfloat16), torch.bfloat16, (LENGTH,)), expected)
    for name, counts in CUTS.items():
        found = off(compute(tiny(variant), native(), torch.bfloat16, counts), expected)
        assert found < min(MEAN_OFF, BESIDE_REFERENCE * reference), name


def native_int8(*, vocabulary):
    ops = select(CPU, torch.bfloat16, quantized("int8", vocabulary=vocabulary))
    assert {row.family: row.chosen for row in ops.selection}["linear"] == "native int8"
    return ops


@pytest.mark.parametrize("variant", EACH)
def test_a_model_in_int8_stays_near_float32(built, tiny, variant):
    expected = exact(tiny(variant))
    for vocabulary in (False, True):
        ops = native_int8(vocabulary=vocabulary)
        found = off(compute(tiny(variant), ops, torch.bfloat16, CUTS["in chunks"]), expected)
        assert found < INT8_OFF, f"vocabulary: {vocabulary}"


class ForgetsAScale(linear_int8.Packed):
    def place(self, kept, first, rows):
        super().place(kept, first, rows)
        kept[:, 0] = kept[:, 0, :1]


class LosesAQuad(linear_int8.Packed):
    def place(self, kept, first, rows):
        super().place(kept, first, rows)
        kept[:, 3] = 0


class BrokenInt8(linear_int8.Matrices):
    def __init__(self, kind):
        super().__init__()
        self._kind = kind

    def form(self, outputs, inputs, dtype):
        return self._kind(self, outputs, inputs, dtype)


@pytest.mark.parametrize("broken", [ForgetsAScale, LosesAQuad])
def test_a_broken_int8_kernel_is_noticed(built, tiny, broken):
    ops = msgspec.structs.replace(native_int8(vocabulary=True), linear=BrokenInt8(broken), stack=Stack())
    assert off(compute(tiny("llama"), ops, torch.bfloat16, (LENGTH,)), exact(tiny("llama"))) > INT8_OFF


class LosesTheLastInput(Packed):
    def multiply(self, x, kept, bias=None, *, wide=False):
        x = x.clone()
        x[:, -1] = 0
        return super().multiply(x, kept, bias, wide=wide)


class PlacesOneRowLate(Packed):
    def place(self, kept, first, rows):
        super().place(kept, first, rows.roll(1, 0))


class RepeatsAPanel(Packed):
    def multiply(self, x, kept, bias=None, *, wide=False):
        y = super().multiply(x, kept, bias, wide=wide)
        y[:, -8:] = y[:, :8]
        return y


class Broken(Matrices):
    def __init__(self, kind):
        super().__init__()
        self._kind = kind

    def form(self, outputs, inputs, dtype):
        return self._kind(self, outputs, inputs)


@pytest.mark.parametrize("broken", [LosesTheLastInput, PlacesOneRowLate, RepeatsAPanel])
@pytest.mark.parametrize("variant", EACH)
def test_a_broken_kernel_is_noticed(built, tiny, variant, broken):
    ops = native(linear=Broken(broken), stack=Stack())  # C code would not call what is broken here
    logits = compute(tiny(variant), ops, torch.bfloat16, (LENGTH,))
    assert off(logits, exact(tiny(variant))) > MEAN_OFF
