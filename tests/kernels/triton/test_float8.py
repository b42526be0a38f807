"""Products of fp8 on a GPU equal those of the scheme's numbers; torch multiplies by rows on a CPU too."""

from __future__ import annotations

from math import inf

import pytest
import torch

from infd.groups import GroupedRows, Groups
from infd.input_scheme import InputScheme
from infd.kernels.families.inputs import Rounding
from infd.kernels.reference import inputs as reference
from infd.kernels.reference.packed import PackedRows
from infd.kernels.select import CANDIDATES, insisting, quantized
from infd.models.parameter import Matrix
from infd.quantize.convert import convert
from tests.kernels.packed_case import rows_of
from tests.weights.encodings.test_inputs import REFERENCE, WRITTEN, built, logits

TOKEN, STATIC, BLOCKS = InputScheme("e4m3"), InputScheme("e4m3", static=True), InputScheme("e4m3", 128)
POWERS = BLOCKS._replace(powers=True)
BY_ROW, BY_BLOCK = Groups(8, 10_000, "F32", table="e4m3"), Groups(8, 128, "F32", table="e4m3")
HOPPER = (9, 0)


def inputs_of(rows: int, size: int) -> torch.Tensor:
    """Return rows of different magnitudes, one of them zero; not contiguous."""
    x = torch.randn(rows, size + 16, generator=torch.Generator().manual_seed(rows))
    x *= torch.logspace(-4, 4, rows)[:, None]
    x[rows // 2] = 0
    return x.bfloat16()[:, :size]


def stored_scale(scheme: InputScheme) -> torch.Tensor | None:
    return torch.tensor([0.37]) if scheme.static else None


@pytest.mark.parametrize("size", [256, 300, 5000])
@pytest.mark.parametrize("scheme", [TOKEN, STATIC, BLOCKS, POWERS, InputScheme("e4m3", 32, powers=True)], ids=str)
def test_numbers_and_scales_are_those_of_the_scheme_to_the_bit(device, scheme, size):
    from infd.kernels.triton.inputs import Inputs, quantize

    x, scale, padded = inputs_of(5, size), stored_scale(scheme), -(-size // 32) * 32
    found = quantize(x.to(device), scheme, None if scale is None else scale.to(device), padded, 8)

    values = x.float()
    if scheme.inputs:
        values = torch.nn.functional.pad(values, (0, -size % scheme.inputs)).unflatten(1, (-1, scheme.inputs))
    scales = reference.scales_of(values, scheme) if scale is None else scale.expand(5, 1)
    numbers = (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    wide = torch.zeros(5, padded).to(torch.float8_e4m3fn)
    wide[:, :size] = numbers.flatten(1)[:, :size]
    assert found.scales[:5].cpu().equal(scales.view(5, -1))
    assert found.scales.shape == (8, scales.view(5, -1).shape[1])
    assert found.numbers[:5].cpu().view(torch.uint8).equal(wide.view(torch.uint8))
    rounded = Inputs().round(x.to(device), scheme, None if scale is None else scale.to(device), None)
    assert rounded.cpu().equal(reference.Inputs().round(x, scheme, scale, None))


@pytest.mark.parametrize("scheme", [TOKEN, BLOCKS, POWERS], ids=str)
def test_numbers_that_are_not_finite_spoil_their_own_row_only(device, scheme):
    from infd.kernels.triton.inputs import Inputs

    x = torch.randn(3, 256)
    x[0, 3], x[2, 200] = float("nan"), inf
    found = Inputs().round(x.bfloat16().to(device), scheme, None, None).cpu()
    assert not found[0].isfinite().all()
    assert not found[2].isfinite().all()
    assert found[1].isfinite().all()


def test_other_schemes_are_left_to_the_reference(device):
    from infd.kernels.triton.inputs import Inputs

    kernel, x = Inputs(), inputs_of(3, 64).to(device)
    assert kernel.round(x, InputScheme("int8"), None, None).equal(
        reference.Inputs().round(x, InputScheme("int8"), None, None)
    )
    assert kernel.refused == {"triton": "delegates to the reference: inputs are not rounded to int8 by token"}


def checked_blocks(original):
    """Return torch._scaled_mm that also multiplies blocks, which a CPU's does not, and checks them as a GPU's does."""

    def multiply(a, b, scale_a, scale_b, bias=None, out_dtype=None):
        if scale_a.shape[1] == 1:
            return original(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype)
        (rows, size), outputs = a.shape, b.shape[1]
        assert rows > 1, "one row of scales could be of 128 x 128"
        assert rows % 4 == outputs % 16 == size % 128 == 0
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert (scale_a.shape, scale_a.stride()) == ((rows, size // 128), (1, rows))
        assert (scale_b.shape, scale_b.stride()) == ((size // 128, outputs), (outputs, 1))
        assert bias is None
        wide = [each.float() * scale.repeat_interleave(128, 1) for each, scale in ((a, scale_a), (b.t(), scale_b.t()))]
        return (wide[0] @ wide[1].t()).to(out_dtype)

    return multiply


@pytest.fixture
def hopper(device, monkeypatch):
    """The device, which selection takes for a Hopper GPU."""
    from infd.kernels.triton import float8

    if device.type == "cpu":
        monkeypatch.setattr(float8, "capability", lambda: HOPPER)
        monkeypatch.setattr(torch, "_scaled_mm", checked_blocks(torch._scaled_mm))
    elif float8.capability() != HOPPER:
        pytest.skip("blocks of 128 are multiplied on compute capability 9 only")
    return device


def scaled(device, outputs, size, groups, scheme):
    """Return the form for a scheme, and its rounding."""
    from infd.kernels.triton.float8 import Packed

    scale = stored_scale(scheme)
    rounding = Rounding(reference.Inputs(), scheme, None if scale is None else scale.to(device), None)
    form = Packed().form(outputs, size, torch.bfloat16, groups).stored(rounding)
    assert not isinstance(form, str), form
    return form, rounding


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("size", [512, 2048])
@pytest.mark.parametrize("scheme", [TOKEN, STATIC, BLOCKS, POWERS], ids=str)
def test_a_product_is_that_of_the_schemes_numbers(hopper, scheme, size, rows):
    outputs, groups = 80, BY_BLOCK if scheme.inputs else BY_ROW
    form, rounding = scaled(hopper, outputs, size, groups, scheme)
    assert form.quantizes == scheme
    given = rows_of(groups, outputs, size)
    storage = torch.zeros(form.shape, dtype=form.dtype, device=hopper)
    for first in (0, 64):
        part = slice(first, min(first + 64, outputs))
        form.place_groups(storage, first, GroupedRows(given.integers[part], given.scales[part]))
    x = inputs_of(rows, size).to(hopper)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(5)).bfloat16().to(hopper)
    weights = form.decoded(storage, slice(None))
    for offered in (None, bias):
        found = form.multiply(x, storage, offered).double()
        exact = reference.Inputs().round(x.double(), scheme, rounding.scale, None) @ weights.double().t()
        if offered is not None:
            exact += offered.double()
        # The sum is rounded once; products that cancel out leave an error of the sums' bits, fewer on tensor cores.
        parts = reference.Inputs().round(x.double(), scheme, rounding.scale, None).abs() @ weights.double().abs().t()
        near = 2**-16 if hopper.type == "cpu" else 2**-12
        assert ((found - exact).abs() <= 2**-8 * exact.abs() + near * parts).all()
        emulated = PackedRows.multiply(form, reference.Inputs().round(x, *rounding[1:]), storage, offered).double()
        assert (found - emulated).norm() <= 2**-7 * emulated.norm()
    assert form.multiply(x[:0], storage).shape == (0, outputs)


def test_stacked_matrices_with_a_scale_each_multiply_as_alone(hopper):
    size, sizes = 256, (64, 16, 32)
    form, _ = scaled(hopper, sum(sizes), size, BY_ROW, STATIC)
    storage = torch.zeros(form.shape, dtype=form.dtype, device=hopper)
    x, first, alone = inputs_of(20, size).to(hopper), 0, []
    for number, outputs in enumerate(sizes):
        rows = rows_of(BY_ROW, outputs, size, number)._replace(scales=torch.full((outputs, 1), 0.1 + number))
        form.place_groups(storage, first, rows)
        part, _ = scaled(hopper, outputs, size, BY_ROW, STATIC)
        own = torch.zeros(part.shape, dtype=part.dtype, device=hopper)
        part.place_groups(own, 0, rows)
        alone.append([part.multiply(x[:few], own) for few in (3, 20)])
        first += outputs
    for number, few in enumerate((3, 20)):
        together = torch.cat([each[number] for each in alone], 1)
        assert (form.multiply(x[:few], storage).float() - together.float()).norm() <= 2**-9 * together.float().norm()


def test_weights_quantized_while_loading_are_those_that_are_stored_so(hopper):
    from infd.kernels.reference import float8 as quantizing
    from infd.kernels.triton.float8 import Packed, QuantizedFloat8

    rows = torch.randn(48, 96, generator=torch.Generator().manual_seed(2))
    rounding = Rounding(reference.Inputs(), QuantizedFloat8.rounds, None, None)
    online = QuantizedFloat8().form(48, 96, torch.bfloat16).stored(rounding)
    kept = Packed().form(48, 96, torch.bfloat16, BY_ROW).stored(rounding)
    both = [torch.zeros(form.shape, dtype=form.dtype, device=hopper) for form in (online, kept)]
    online.place(both[0], 0, rows)
    kept.place_groups(both[1], 0, quantizing.quantize(rows))
    assert both[0].equal(both[1])
    x = rows.bfloat16().to(hopper)
    assert online.multiply(x, both[0]).equal(kept.multiply(x, both[1]))


REFUSED = {
    (80, 512, BY_ROW, TOKEN, torch.bfloat16, (8, 6)): "fp8 products need compute capability 8.9; this GPU has 8.6",
    (80, 512, BY_ROW, TOKEN, torch.bfloat16, None): "fp8 products need compute capability 8.9; this GPU has none",
    (80, 512, BY_ROW, TOKEN, torch.float32, HOPPER): "fp8 products are computed in bfloat16, not in float32",
    (72, 512, BY_ROW, TOKEN, torch.bfloat16, HOPPER): "a matrix of 72 outputs, which is no multiple of 16",
    (80, 512, BY_BLOCK, TOKEN, torch.bfloat16, HOPPER): "no product of inputs as fp8 by token by weights with scales of"
    " groups of 128",
    (80, 512, BY_ROW, BLOCKS, torch.bfloat16, HOPPER): "no product of inputs as fp8 in groups of 128 by weights with"
    " scales of rows",
    (80, 500, BY_BLOCK, BLOCKS, torch.bfloat16, HOPPER): "500 inputs end within a block of 128",
    (80, 512, BY_BLOCK, BLOCKS, torch.bfloat16, (10, 0)): "blocks of 128 are multiplied on compute capability 9 only;"
    " this GPU has 10.0",
    (80, 512, BY_ROW, InputScheme("int8"), torch.bfloat16, HOPPER): "inputs are not rounded to int8 by token",
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", REFUSED)
def test_matrices_that_torch_does_not_multiply_are_refused_with_a_reason(case, monkeypatch):
    from infd.kernels.triton import float8

    *_, gpu = case
    assert float8.why_not_scaled(*case) == REFUSED[case]
    outputs, size, groups, scheme, dtype, _ = case
    monkeypatch.setattr(float8, "capability", lambda: gpu)
    packed = float8.Packed()
    form = packed.form(outputs, size, dtype, groups)
    for _ in range(2):
        assert form.stored(Rounding(reference.Inputs(), scheme, None, None)) == REFUSED[case]
    assert packed.refused == {"torch._scaled_mm": REFUSED[case]}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("gpu", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_scales_of_rows_are_multiplied_from_ada_on(gpu):
    from infd.kernels.triton.float8 import why_not_scaled

    assert not why_not_scaled(80, 500, BY_ROW, TOKEN, torch.bfloat16, gpu)
    assert not why_not_scaled(80, 500, BY_ROW, STATIC, torch.bfloat16, gpu)


# By name of a written checkpoint: the scheme of its inputs. The blocks of two of them are not whole.
PARTIAL = ("ct-fp8-block", "fp8-block")
CHECKPOINTS = {"ct-fp8": STATIC, "ct-fp8-dynamic": TOKEN, "ct-fp8-block": BLOCKS, "fp8-block": BLOCKS, "mo-fp8": STATIC}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_computed_as_its_scheme_says(hopper, name):
    """Most of what bfloat16 loses is lost by the reference's bfloat16 too."""
    if hopper.type != "cpu":
        pytest.skip("the model is built on a CPU")
    candidates = {**REFERENCE, **{family: insisting("triton", CANDIDATES)[family] for family in ("packed", "inputs")}}
    model, driver, told = built(WRITTEN / name, candidates, torch.bfloat16)
    assert {each.partition(", ")[2].partition(", ")[2] for each in told} == {f"kept, inputs {CHECKPOINTS[name]}"}
    forms = [type(each.form).__name__ for each in model.parameters if isinstance(each, Matrix) and each.kept]
    assert set(forms) == {"Float8Matrix" if name in PARTIAL else "ScaledMatrix"}
    refused = {each["family"]: each["refused"] for each in driver.ops.describe()}["packed"]
    assert ("torch._scaled_mm" in refused) == ("Float8Matrix" in forms)
    exact, half, found = (
        logits(name, chosen, dtype)
        for chosen, dtype in ((REFERENCE, torch.float32), (REFERENCE, torch.bfloat16), (candidates, torch.bfloat16))
    )
    assert (found - exact).norm() <= 1.2 * (half - exact).norm()


def test_a_model_quantized_while_loading_answers_as_that_which_is_stored_so(hopper, tiny, tmp_path):
    if hopper.type != "cpu":
        pytest.skip("the model is built on a CPU")
    written = tmp_path / "fp8"
    convert(tiny("llama"), written, "fp8")
    chosen = {**REFERENCE, **{family: insisting("triton", CANDIDATES)[family] for family in ("packed", "inputs")}}
    online = {**chosen, "linear": insisting("triton", quantized("fp8", "none"))["linear"]}
    answers = []
    for directory, candidates in ((tiny("llama"), online), (written, chosen)):
        model, driver, _ = built(directory, candidates, torch.bfloat16)
        assert any(type(each.form).__name__ == "ScaledMatrix" for each in model.parameters if isinstance(each, Matrix))
        sequence = driver.start([3, 1, 4, 1, 5, 9, 2, 6] * 3)
        answers.append([driver.step((sequence, count))[0] for count in (20, 3, 1)])
    for ours, theirs in zip(*answers, strict=True):
        assert ours.equal(theirs)
