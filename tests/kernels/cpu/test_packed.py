"""Products with integers and scales as checkpoints store them, against a definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from infd.groups import GroupedRows, Groups
from infd.kernels.cpu.groups import Int4
from infd.kernels.cpu.linear import Panels
from infd.kernels.cpu.packed import Packed
from infd.kernels.families.matrices import SCALE_TYPES, Grouped
from infd.kernels.reference import int8
from tests.kernels.cpu.placed import draw

SHAPES = [(64, 256), (1, 1), (65, 33), (200, 129), (130, 2050)]
ROWS = [1, 4, 5, 7, 13]
KINDS = {
    "float16": Groups(4, 32, "F16"),
    "float32 and zeros": Groups(4, 32, "F32", zeros=True),
    "groups of 64, reordered": Groups(4, 64, "F32", order="x"),
    "groups of 96": Groups(4, 96, "BF16", zeros=True),
    "groups of 128, reordered": Groups(4, 128, "F16", zeros=True, order="x"),
    "groups of 128": Groups(4, 128, "BF16"),
    "rows": Groups(4, 4096, "F16", zeros=True),
    "mxfp4": Groups(4, 32, "BF16", table="e2m1"),
    "nvfp4": Groups(4, 16, "F32", table="e2m1"),
    "iq4_nl": Groups(4, 32, "F16", table="iq4_nl"),
    "a table in groups of 64, reordered": Groups(4, 64, "F16", order="x", table="iq4_nl"),
    "a table and zeros": Groups(4, 16, "F16", zeros=True, table="e2m1"),
    "groups of 48": Groups(4, 48, "F16", zeros=True),
    "q4_1": Groups(4, 32, "F16", minima=True),
    "q8_0": Groups(8, 32, "F16"),
    "int8, groups of 128, zeros, reordered": Groups(8, 128, "BF16", zeros=True, order="x"),
    "int8, rows, zeros": Groups(8, 4096, "F32", zeros=True),
    "int8 and minima": Groups(8, 32, "F16", minima=True),
    "q5_0": Groups(6, 32, "F16"),
    "q5_1": Groups(6, 32, "F16", minima=True),
    "q2_k": Groups(4, 16, "I8", minima=True),
    "q3_k": Groups(4, 16, "I8"),
    "q4_k": Groups(4, 32, "I8", minima=True),
    "q5_k": Groups(6, 32, "I8", minima=True),
    "q6_k": Groups(6, 16, "I8"),
    "int8 in groups of 16": Groups(8, 16, "I8"),
    "six bits in groups of 128, zeros, reordered": Groups(6, 128, "BF16", zeros=True, order="x"),
    "iq4_xs": Groups(4, 32, "I8", table="iq4_nl"),
    "all": Groups(8, 16, "I8", zeros=True, order="x", minima=True),
    "all of six bits": Groups(6, 16, "I8", zeros=True, order="x", minima=True),
}
CASES = [
    (*shape, kind)
    for kind, groups in KINDS.items()
    for shape in SHAPES
    if groups != Groups(8, 32, "F16") or shape[1] > 32  # a row of int8 with one scale has another form
]
# By table: the numbers. E2M1 is fp4 of the OCP Microscaling formats, doubled; IQ4_NL is kvalues_iq4nl of ggml.
TABLES = {
    "e2m1": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
    "iq4_nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}


class Stored:
    """A matrix as a checkpoint may store it, in the form that keeps it; placed in two parts, the last first."""

    def __init__(self, library, outputs, inputs, kind, activations=torch.bfloat16):
        groups, reordered = KINDS[kind], KINDS[kind].order != ""
        generator = torch.Generator().manual_seed(outputs + inputs)
        form = Packed(library).form(outputs, inputs, activations, groups)
        assert isinstance(form, Panels)
        assert isinstance(form, Grouped)
        assert form.groups == groups._replace(inputs=form.groups.inputs)
        self.form, count = form, -(-inputs // form.groups.inputs)
        least, most = (0, 16) if groups.minima and groups.bits == 4 else (-(1 << groups.bits - 1), 1 << groups.bits - 1)
        integers = torch.randint(least, most, (outputs, inputs), generator=generator).to(torch.int8)
        scale, factor = self.numbers(outputs, count, generator)
        low, low_factor = self.numbers(outputs, count, generator) if groups.minima else (None, None)
        factors = [each for each in (factor, low_factor) if each is not None]
        shared = torch.stack(factors, 2).flatten(1) if factors else None
        zero = torch.randint(-8, 8, (outputs, count), generator=generator).to(torch.int8) if groups.zeros else None
        self.order = torch.randperm(inputs, generator=generator) if reordered else torch.arange(inputs)
        self.storage = torch.empty(form.shape, dtype=form.dtype)
        self.storage.view(torch.uint8).fill_(255)
        cut = outputs // 3
        for part in (slice(cut, None), slice(0, cut)):
            zeros, minima, halves = (None if each is None else each[part] for each in (zero, low, shared))
            order = self.order if reordered else None
            form.place_groups(
                self.storage, part.start, GroupedRows(integers[part], scale[part], zeros, order, minima, halves)
            )
        values = torch.tensor(TABLES[groups.table])[integers.int() + 8].float() if groups.table else integers.float()
        if zero is not None:
            values -= self.spread(zero.float(), inputs)
        values *= self.spread(self.whole(scale, factor), inputs)
        if low is not None:
            values += self.spread(self.whole(low, low_factor), inputs)
        self.weight = torch.empty_like(values)
        self.weight[:, self.order] = values

    def numbers(self, outputs, count, generator):
        """Return scales or minima, and, if they are I8, what they are multiplied by."""
        groups = self.form.groups
        if groups.scales != "I8":
            return (torch.rand(outputs, count, generator=generator) / 100 - 0.002).to(SCALE_TYPES[groups.scales]), None
        blocks = -(-count * groups.inputs // 256)
        factors = (torch.rand(outputs, blocks, generator=generator) / 1000 - 0.0002).half()
        return torch.randint(-128, 128, (outputs, count), generator=generator).to(torch.int8), factors

    def whole(self, numbers, factors):
        if factors is None:
            return numbers.float()
        return (
            numbers.float()
            * factors.float().repeat_interleave(256 // self.form.groups.inputs, 1)[:, : numbers.shape[1]]
        )

    def spread(self, groups, inputs):
        return groups.repeat_interleave(self.form.groups.inputs, 1)[:, :inputs]

    def rounded(self, x):
        """Return activations after int8 quantization, in float64; 32 consecutive columns share a scale."""
        inputs = x.shape[1]
        groups = functional.pad(x[:, self.order], (0, -inputs % 32)).unflatten(1, (-1, 32))
        numbers, scales = int8.quantize(groups.flatten(0, 1))
        found = torch.empty(x.shape, dtype=torch.float64)
        found[:, self.order] = (numbers.double() * scales.double()).view(len(x), -1)[:, :inputs]
        return found

    def multiply(self, x, bias=None, *, wide=False):
        return self.form.multiply(x, self.storage, bias, wide=wide)


@pytest.mark.parametrize(("outputs", "inputs", "kind"), CASES)
def test_weights_are_kept_to_the_bit(library, outputs, inputs, kind):
    stored = Stored(library, outputs, inputs, kind, torch.float32)
    assert stored.form.look_up(torch.arange(outputs), stored.storage).equal(stored.weight)
    half = Stored(library, outputs, inputs, kind)
    tokens = torch.arange(outputs).flip(0).repeat(2)
    assert half.form.look_up(tokens, half.storage).equal(stored.weight.bfloat16()[tokens])
    assert half.form.look_up(torch.tensor([outputs, -1]), half.storage).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs", "kind"), CASES)
def test_a_product_is_that_of_the_stored_values(library, outputs, inputs, kind, dtype):
    stored = Stored(library, outputs, inputs, kind, dtype)
    weight = stored.weight.double()
    for rows in ROWS:
        x, bias = draw(rows, inputs, seed=rows, dtype=dtype), draw(outputs, seed=3, dtype=dtype)
        rounded = stored.rounded(x)
        bound = (rounded.abs() @ weight.abs().T) * (inputs / 32 + 8) * 2.0**-22 + 1e-9
        wide = stored.multiply(x, wide=True)
        assert wide.dtype is torch.float32
        assert ((wide.double() - rounded @ weight.T).abs() <= bound).all(), f"{rows} rows"
        assert stored.multiply(x).equal(wide.to(dtype)), f"{rows} rows"
        assert stored.multiply(x, bias).equal((wide + bias.float()).to(dtype)), f"{rows} rows"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_bit_identical_in_any_batch(library, kind, threads):
    stored, x = Stored(library, 200, 4399, kind), draw(260, 4399)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = stored.multiply(x)
        for rows in (1, 2, 3, 5, 6, 7, 12, 13):
            assert stored.multiply(x[:rows]).equal(together[:rows])
            assert stored.multiply(x[-rows:]).equal(together[-rows:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_affects_only_its_own_row(library, kind):
    stored, x = Stored(library, 70, 200, kind), draw(9, 200)
    sound = stored.multiply(x)
    x[4, 7] = float("nan")
    broken = stored.multiply(x)
    assert not broken[4].isfinite().any()
    rest = [0, 1, 2, 3, 5, 6, 7, 8]
    assert broken[rest].equal(sound[rest])


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_was_never_filled_is_a_matrix_of_zeros(library, kind):
    form = Packed(library).form(70, 66, torch.bfloat16, KINDS[kind])
    assert isinstance(form, Panels)
    storage = torch.zeros(form.shape, dtype=form.dtype)
    assert not form.multiply(draw(9, 66), storage).any()


def test_a_large_group_takes_fewer_bits_than_a_small_one(library):
    def bits(*groups, width=4, **more):
        form = Packed(library).form(1024, 1024, torch.bfloat16, Groups(width, *groups, **more))
        assert isinstance(form, Panels)
        return 32 * form.shape[0] / 1024**2

    assert bits(32, "F16") == 4.5
    assert bits(128, "F16") == bits(1024, "F16") == 4 + 1 / 8
    assert bits(128, "F16", True) == 4 + 3 / 16
    assert bits(32, "F32") == 5
    assert bits(32, "BF16", False, "", "e2m1") == 4.5
    assert bits(16, "F32", False, "", "e2m1") == 6
    assert bits(32, "F16", minima=True) == 5
    assert bits(32, "I8", minima=True) == 4 + 4 / 8 + 1 / 8
    assert bits(16, "I8", width=6) == 6 + 4 / 8 + 1 / 16


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (Groups(4, 24, "F16"), "no form has groups of fewer than 16 inputs, or of no multiple of 16"),
        (Groups(8, 8, "I8"), "no form has groups of fewer than 16 inputs, or of no multiple of 16"),
        (Groups(2, 32, "F16"), "no form has integers of 2 bits"),
        (Groups(4, 32, "F16", table="nf4"), "no form has the table nf4"),
        (Groups(6, 32, "F16", table="e2m1"), "no form has integers of 6 bits"),
    ],
)
def test_the_reason_that_integers_cannot_be_kept_is_reported(library, groups, reason):
    assert Packed(library).form(64, 256, torch.bfloat16, groups) == reason


def test_only_quantized_matrices_take_floats(library):
    form = Packed(library).form(64, 64, torch.bfloat16, Groups(4, 32, "F16"))
    assert isinstance(form, Panels)
    storage = torch.zeros(form.shape, dtype=form.dtype)
    assert form.packing(storage, torch.bfloat16) is None
    assert Int4(library).form(64, 64, torch.bfloat16).packing(storage, torch.bfloat16) is not None


@pytest.mark.parametrize(
    ("groups", "entries"),
    [
        (Groups(4, 32, "F32"), list(range(-8, 8))),
        (Groups(4, 32, "F32", table="e2m1"), TABLES["e2m1"]),
        (Groups(4, 32, "F32", table="iq4_nl"), TABLES["iq4_nl"]),
        (Groups(6, 32, "F32"), list(range(-32, 32))),
        (Groups(6, 16, "F32"), list(range(-32, 32))),
        (Groups(8, 32, "F32"), list(range(-128, 128))),
    ],
)
@pytest.mark.parametrize("rows", [2, 30])
def test_the_largest_products_fit(library, groups, entries, rows):
    # 16-bit sums hold two products of IQ4_NL's entries with int8 only if one is negative, and eight of E2M1's.
    outputs = len(entries)
    form = Packed(library).form(outputs, 64, torch.float32, groups)
    assert isinstance(form, Panels)
    assert isinstance(form, Grouped)
    storage = torch.empty(form.shape, dtype=form.dtype)
    codes = (torch.arange(outputs) - outputs // 2).to(torch.int8)[:, None].expand(outputs, 64)
    form.place_groups(storage, 0, GroupedRows(codes, torch.ones(outputs, 64 // groups.inputs)))
    x = torch.tensor([[127.0], [-127.0]]).repeat(rows // 2, 64)
    expected = 64 * 127.0 * torch.tensor(entries).float()
    assert form.multiply(x, storage).equal(torch.stack([expected, -expected]).repeat(rows // 2, 1))
