"""Every model with native kernels in bfloat16, against the reference in float32 with equal weights."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.attention import Int8PagedAttention
from infd.kernels.cpu.groups import Int4
from infd.kernels.cpu.linear import Int8, Matrices
from infd.kernels.reference.dense import Stack
from infd.kernels.select import CACHED, CANDIDATES, quantized, select
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.models.test_parity import EACH, LENGTH, text
from tests.tiny import FURTHER, MIXTURES, VARIANTS

CUTS = {"at once": (LENGTH,), "in chunks": (20, 1, 20), "one by one": (1,) * LENGTH}
# Logits have a range of 11. A logit depends on dozens of numbers of 8 significant bits, and every weight here matters:
# plain torch in bfloat16 has a mean error of 0.04 to 0.12, the best achievable accuracy.
MEAN_OFF = 0.15
INT8_CACHE_OFF = 0.25
QUANTIZED_OFF = 0.6  # int8 has 8 bits too; in models this narrow few rounding errors cancel out
INT4_STEP = 32 + 4 * 64  # words: the scales of 64 outputs, four lines
BESIDE_REFERENCE = 1.15  # largest error, relative to plain torch in bfloat16


def references(dtype):
    """Return ops of the reference implementations."""
    return select(CPU, dtype, {family: candidates[-1:] for family, candidates in CANDIDATES.items()})


def native(**replaced):
    ops = select(CPU, torch.bfloat16)
    ops.request("linear")
    assert {row.family: row.chosen for row in ops.selection}["linear"].startswith("native")
    return ops.replace(**replaced)


def compute(directory, ops, dtype, counts):
    driver = Driver(load_model(directory, ops=ops, dtype=dtype), ops=ops, seed=3)
    sequence = driver.start(text(1))
    return torch.cat([driver.step((sequence, count))[0] for count in counts])


def exact(directory):
    """Return the reference's float32 logits, with weights rounded to bfloat16."""
    ops = references(torch.float32)
    model = load_model(directory, ops=ops)
    for parameter in model.parameters:
        parameter.tensor.copy_(parameter.tensor.bfloat16())
    driver = Driver(model, ops=ops)
    return driver.step((driver.start(text(1)), LENGTH))[0]


def off(logits, expected):
    """Return the mean error of logits."""
    assert logits.isfinite().all()
    return (logits - expected).abs().mean().item()


@pytest.mark.parametrize(("variant", "expected"), [("qwen3", torch.bfloat16), ("gemma2", torch.float32)])
def test_the_references_logits_are_bfloat16_unless_they_are_capped(tiny, variant, expected):
    ops = references(torch.bfloat16)
    model = load_model(tiny(variant), ops=ops, dtype=torch.bfloat16)
    assert model.logits_dtype is expected
    driver = Driver(model, ops=ops, seed=3)
    logits = driver.step((driver.start(text(1)), LENGTH))[0]
    assert (expected is torch.bfloat16) == logits.equal(logits.bfloat16().float())


def test_native_logits_are_float32(built, tiny):
    assert load_model(tiny("qwen3"), ops=native(), dtype=torch.bfloat16).logits_dtype is torch.float32


def off_mostly(logits, expected):
    """Return the median over tokens of the mean error: in bfloat16 a few tokens choose other experts."""
    assert logits.isfinite().all()
    return (logits - expected).abs().mean(1).median().item()


@pytest.mark.parametrize("variant", sorted(set(MIXTURES) - FURTHER))
def test_a_mixture_is_as_near_to_float32_as_bfloat16_can_be(built, tiny, variant):
    expected = exact(tiny(variant))
    reference = off_mostly(compute(tiny(variant), references(torch.bfloat16), torch.bfloat16, (LENGTH,)), expected)
    for name in ("at once", "in chunks"):
        found = off_mostly(compute(tiny(variant), native(), torch.bfloat16, CUTS[name]), expected)
        assert found < max(MEAN_OFF, BESIDE_REFERENCE * reference), name


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - set(MIXTURES)))
def test_a_model_is_as_near_to_float32_as_bfloat16_can_be(built, tiny, variant):
    expected = exact(tiny(variant))
    reference = off(compute(tiny(variant), references(torch.bfloat16), torch.bfloat16, (LENGTH,)), expected)
    for name, counts in CUTS.items():
        found = off(compute(tiny(variant), native(), torch.bfloat16, counts), expected)
        assert found < min(MEAN_OFF, BESIDE_REFERENCE * reference), name


def native_quantized(how, vocabulary="auto"):
    ops = select(CPU, torch.bfloat16, quantized(how, vocabulary))
    ops.request("linear")
    chosen = {row.family: row.chosen for row in ops.selection}["linear"]
    assert chosen.startswith("native" if how == "none" else f"native {how}")
    return ops


@pytest.mark.parametrize("variant", EACH)
def test_a_model_in_int8_stays_near_float32(built, tiny, variant):
    expected = exact(tiny(variant))
    for vocabulary in ("none", "int8"):
        ops = native_quantized("int8", vocabulary)
        found = off(compute(tiny(variant), ops, torch.bfloat16, CUTS["in chunks"]), expected)
        assert found < QUANTIZED_OFF, f"vocabulary: {vocabulary}"


def exact_quantized(directory, how, vocabulary="auto"):
    """Return the reference's float32 logits with quantized weights: int4 changes the logits of models this small."""
    candidates = quantized(how, vocabulary)
    ops = select(CPU, torch.float32, {family: those[-1:] for family, those in candidates.items()})
    return compute(directory, ops, torch.float32, (LENGTH,))


@pytest.mark.parametrize("variant", EACH)
def test_a_model_in_int4_stays_near_the_same_weights_in_float32(built, tiny, variant):
    for vocabulary in ("none", "int8", "int4"):
        ops = native_quantized("int4", vocabulary)
        found = off(
            compute(tiny(variant), ops, torch.bfloat16, CUTS["in chunks"]),
            exact_quantized(tiny(variant), "int4", vocabulary),
        )
        assert found < QUANTIZED_OFF, f"vocabulary: {vocabulary}"


@pytest.mark.parametrize("variant", EACH)
@pytest.mark.parametrize("vocabulary", ["int8", "int4"])
def test_a_vocabulary_alone_stays_near_the_same_weights_in_float32(built, tiny, variant, vocabulary):
    ops = native_quantized("none", vocabulary)
    found = compute(tiny(variant), ops, torch.bfloat16, CUTS["in chunks"])
    assert off(found, exact_quantized(tiny(variant), "none", vocabulary)) < QUANTIZED_OFF


@pytest.mark.parametrize("variant", EACH)
def test_a_model_over_a_cache_of_int8_stays_near_float32(built, tiny, variant):
    ops = select(CPU, torch.bfloat16, {**CANDIDATES, **CACHED["int8"]})
    found = off(compute(tiny(variant), ops, torch.bfloat16, CUTS["in chunks"]), exact(tiny(variant)))
    assert found < INT8_CACHE_OFF


class ForgetsScales(Int8PagedAttention):
    """Overwrites every key's scale with that of the first."""

    def prepare(self, batch):
        plan = super().prepare(batch)
        write = plan.write

        def broken(k, v, pages):
            write(k, v, pages)
            pages.k[..., :4] = pages.k[:1, :1, :1, :4]

        plan.write = broken
        return plan


def test_a_broken_cache_of_int8_is_noticed(built, tiny):
    ops = native(attention=ForgetsScales(), stack=Stack())
    assert not off_or_nan(compute(tiny("llama"), ops, torch.bfloat16, (LENGTH,)), exact(tiny("llama"))) < INT8_CACHE_OFF


def off_or_nan(logits, expected):
    return (logits - expected).abs().mean().item()


def loses_the_last_input(form):
    multiply = form.multiply

    def broken(x, kept, bias=None, *, wide=False):
        x = x.clone()
        x[:, -1] = 0
        return multiply(x, kept, bias, wide=wide)

    form.multiply = broken


def repeats_a_panel(form):
    multiply = form.multiply

    def broken(x, kept, bias=None, *, wide=False):
        y = multiply(x, kept, bias, wide=wide)
        y[:, -8:] = y[:, :8]
        return y

    form.multiply = broken


def places_one_row_late(form):
    place = form.place
    form.place = lambda kept, first, rows: place(kept, first, rows.roll(1, 0))


def after_placing(change):
    def spoil(form):
        place = form.place

        def broken(kept, first, rows):
            place(kept, first, rows)
            change(kept)

        form.place = broken

    return spoil


@after_placing
def forgets_scales_of_int8(kept):
    kept[:, 0] = kept[:, 0, :1]


@after_placing
def loses_a_quad_of_int8(kept):
    kept[:, 3] = 0


@after_placing
def forgets_scales_of_int4(kept):
    steps = kept.view(-1, INT4_STEP)
    steps[:, :32] = steps[0, 0]


@after_placing
def swaps_halves_of_int4(kept):
    lines = kept.view(-1, INT4_STEP)[:, 32:]
    lines.copy_((lines >> 4 & 0x0F0F0F0F) | (lines & 0x0F0F0F0F) << 4)


class Broken:
    """A family with faulty forms."""

    def __init__(self, matrices, spoil):
        self._matrices, self._spoil = matrices, spoil
        self.numbers = matrices.numbers

    def form(self, outputs, inputs, dtype):
        form = self._matrices.form(outputs, inputs, dtype)
        self._spoil(form)
        return form


@pytest.mark.parametrize("spoil", [loses_the_last_input, places_one_row_late, repeats_a_panel])
@pytest.mark.parametrize("variant", EACH)
def test_a_broken_kernel_is_noticed(built, tiny, variant, spoil):
    ops = native(linear=Broken(Matrices(), spoil), stack=Stack())  # the native stack would bypass the faulty form
    logits = compute(tiny(variant), ops, torch.bfloat16, (LENGTH,))
    assert off(logits, exact(tiny(variant))) > MEAN_OFF


@pytest.mark.parametrize(
    ("how", "matrices", "spoil"),
    [
        ("int8", Int8, forgets_scales_of_int8),
        ("int8", Int8, loses_a_quad_of_int8),
        ("int4", Int4, forgets_scales_of_int4),
        ("int4", Int4, swaps_halves_of_int4),
        ("int4", Int4, places_one_row_late),
    ],
)
def test_a_broken_quantized_kernel_is_noticed(built, tiny, how, matrices, spoil):
    ops = native_quantized(how)
    ops = ops.replace(linear=Broken(matrices(), spoil), stack=Stack())
    expected = exact(tiny("llama")) if how == "int8" else exact_quantized(tiny("llama"), how)
    assert off(compute(tiny("llama"), ops, torch.bfloat16, (LENGTH,)), expected) > QUANTIZED_OFF
