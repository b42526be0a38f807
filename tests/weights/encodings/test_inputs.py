"""Inputs of products are quantized as the checkpoint's scheme says; compared with compressed-tensors' emulation."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from infd.errors import CheckpointError
from infd.input_scheme import INT8_BY_TOKEN, InputScheme
from infd.kernels.reference.inputs import Inputs
from infd.kernels.select import CANDIDATES, EXACT, insisting, select
from infd.memory import ALL
from infd.models import registry
from infd.models.parameter import Matrix, RoundedInputs
from infd.weights.checkpoint import Checkpoint
from infd.weights.encodings.find import read_format
from infd.weights.load import load
from tests.kernels.paging import CPU
from tests.models.driving import Driver, Heap
from tests.runner.arenas.test_residence import answers, running
from tests.tiny import oracle
from tests.weights.encodings.fixtures import WRITTEN, expected, unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from infd.kernels.select import Candidate
    from infd.models.base import Model

STATIC = InputScheme("e4m3", static=True)
INT8_STATIC = InputScheme("int8", static=True, zeros=True)
EMULATED = {  # by transformers: the scheme, and whether its emulation divides by other scales than infd
    "ct-fp8": (STATIC, False),
    "ct-fp8-dynamic": (InputScheme("e4m3"), False),
    "ct-w8a8-static-asym": (INT8_STATIC, False),
    "ct-mixed": (InputScheme("e4m3"), False),
    "ct-w8a8": (INT8_BY_TOKEN, True),
}
FP4 = {"ct-mxfp4": InputScheme("e2m1", 32, powers=True), "ct-nvfp4": InputScheme("e2m1", 16, static=True)}
OTHERS = {
    **FP4,
    "ct-fp8-block": InputScheme("e4m3", 128),
    "ct-mxfp8": InputScheme("e4m3", 32, powers=True),
    "fp8-block": InputScheme("e4m3", 128),
    "mo-fp8": STATIC,
    "mo-fp8-channel": InputScheme("e4m3"),
    "mo-mxfp4": InputScheme("e2m1", 32, powers=True),
    "mo-mxfp8": InputScheme("e4m3", 32, powers=True),
    "mo-nvfp4": InputScheme("e2m1", 16, static=True),
}
WITHOUT = ("awq-g32", "bnb-int8", "ct-mxfp4a16", "ct-nvfp4a16", "ct-w4a16-g32", "gptq-int8", "mo-fp8-block")


def schemes(name: str) -> set[InputScheme | None]:
    with Checkpoint(WRITTEN / name) as checkpoint:
        tensors = checkpoint.tensors.values()
        return {None if each.inputs is None else each.inputs.scheme for each in tensors}


def built(
    directory: Path, candidates: Mapping[str, Sequence[Candidate]], dtype: torch.dtype = torch.float32
) -> tuple[Model, Driver, set[str]]:
    ops = select(CPU, dtype, candidates)
    with Checkpoint(directory) as checkpoint:
        model = registry.build(checkpoint.config, ops, dtype=dtype, device=CPU, max_len=64, stored=checkpoint.tensors)
        told = set(load(model, checkpoint, Heap(CPU)))
    return model, Driver(model, ops=ops), told


def logits(name: str, candidates: Mapping[str, Sequence[Candidate]], dtype: torch.dtype = torch.float32) -> Tensor:
    _, driver, _ = built(WRITTEN / name, candidates, dtype)
    sequence = driver.start(expected(name).tokens)
    return torch.cat([driver.step((sequence, count))[0].float() for count in (15, len(sequence.tokens) - 15)])


REFERENCE = insisting("reference", CANDIDATES)
NATIVE = {**CANDIDATES, "packed": insisting("native", CANDIDATES)["packed"]}


@pytest.mark.parametrize("name", EMULATED | OTHERS)
def test_a_scheme_is_read_for_each_encoded_matrix(name: str) -> None:
    scheme = EMULATED[name][0] if name in EMULATED else OTHERS[name]
    assert schemes(name) == {None, scheme}


@pytest.mark.parametrize("name", WITHOUT)
def test_schemes_of_weights_alone_leave_inputs(name: str) -> None:
    assert schemes(name) == {None}


@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.filterwarnings("ignore")
def test_logits_equal_transformers_emulation(name: str) -> None:
    pytest.importorskip("compressed_tensors")
    told, (_, other) = expected(name), EMULATED[name]
    emulated = []
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = AutoModelForCausalLM.from_pretrained(WRITTEN / name, dtype=dtype)
        with torch.inference_mode():
            emulated.append(model(torch.tensor([told.tokens])).logits[0].float())
    changed = (emulated[0] - told.logits).norm()

    ours = (logits(name, REFERENCE) - emulated[0]).norm()
    assert ours < (1.3 if other else 1e-4) * changed
    assert (logits(name, CANDIDATES, torch.bfloat16) - emulated[0]).norm() <= 2 * (emulated[1] - emulated[0]).norm()


@pytest.mark.parametrize("name", FP4)
def test_logits_equal_transformers_with_inputs_of_compressed_tensors_fp4(name: str, tmp_path: Path) -> None:
    """Transformers' own loading decodes fp4 to bfloat16 only, so the decoded weights are loaded as plain ones."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    config = json.loads((WRITTEN / name / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    args, stored = QuantizationArgs(**group["input_activations"]), load_file(WRITTEN / name / "model.safetensors")
    model = oracle(unpacked(name, tmp_path))
    for module, linear in model.named_modules():
        if f"{module}.weight_packed" in stored:
            overall = stored.get(f"{module}.input_global_scale")

            def rounded(linear: torch.nn.Module, x: tuple[Tensor], overall: Tensor | None = overall) -> Tensor:
                scale, zero = compute_dynamic_scales_and_zp(x[0], args, linear, overall)
                return fake_quantize(x[0], scale, zero, args, overall)

            linear.register_forward_pre_hook(rounded)
    told = expected(name)
    with torch.inference_mode():
        emulated = model(torch.tensor([told.tokens])).logits[0]
    changed = (emulated - told.logits).norm()
    assert changed > 0.05 * told.logits.norm()
    assert (logits(name, REFERENCE) - emulated).norm() < 1e-4 * changed
    assert (logits(name, {**REFERENCE, "inputs": NATIVE["inputs"]}) - emulated).norm() < 1e-4 * changed


ARGUMENTS: dict[InputScheme, dict[str, Any]] = {
    InputScheme("e4m3"): {"type": "float", "strategy": "token"},
    InputScheme("e4m3", 128): {"type": "float", "strategy": "group", "group_size": 128},
    InputScheme("e4m3", 32, powers=True): {
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": torch.uint8,
    },
    InputScheme("int8", zeros=True): {"type": "int", "strategy": "token", "symmetric": False},
}


@pytest.mark.parametrize("scheme", ARGUMENTS)
def test_rounding_equals_compressed_tensors(scheme: InputScheme) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 9)[:, None]
    x[4], x[5, 32:64] = 0, 0
    args = QuantizationArgs(num_bits=8, dynamic=True, **ARGUMENTS[scheme])
    scale, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Module())
    theirs = fake_quantize(x[None], scale, zero, args)[0]

    ours = Inputs().round(x, scheme, None, None)

    near = 2e-3 if scheme.numbers == "int8" else 1e-6  # their zero point is rounded after the scaled sum
    assert (ours - theirs).abs().max() <= near * x.abs().max()
    assert (ours - x).norm() > 1e-3 * x.norm()
    assert ours[4].eq(0).all()


def test_a_scale_of_the_next_power_of_two_is_exact_at_powers() -> None:
    scheme = InputScheme("e4m3", 32, powers=True)
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 1], x[1, 0], x[1, 1] = 448 * 2**-3, 2**-12, 450.0, 2.0**-7
    found = Inputs().round(x, scheme, None, None)
    assert found[0].equal(x[0])
    assert found[1, 0] == 448.0
    assert found[1, 1] == 2.0**-7


def test_groups_need_not_divide_the_inputs_and_rows_that_are_not_finite_stay_so() -> None:
    x = torch.randn(3, 160)
    x[1, 150] = torch.inf
    found = Inputs().round(x, InputScheme("e4m3", 128), None, None)
    assert found.shape == x.shape
    assert found[0, 128:].equal(Inputs().round(x[:1, 128:], InputScheme("e4m3"), None, None)[0])
    assert not found[1].isfinite().all()
    assert found[0].isfinite().all()
    assert found[1, :128].isfinite().all()


def test_stacked_matrices_share_the_widest_range_of_stored_scales() -> None:
    rounded = RoundedInputs(Inputs(), INT8_STATIC, CPU)
    assert rounded.scale is not None
    assert rounded.zero is not None
    rounded.place(0, 0.25, -12)
    rounded.place(64, 0.25, -12)
    assert (rounded.scale.item(), rounded.zero.item()) == (0.25, -12)
    rounded.place(64, 0.5, 3)  # -65.5 to 62, and -29 to 34.75
    assert (-128 - rounded.zero.item()) * rounded.scale.item() == pytest.approx(-65.5, abs=0.5)
    assert (127 - rounded.zero.item()) * rounded.scale.item() == pytest.approx(62, abs=0.5)
    plain = RoundedInputs(Inputs(), STATIC, CPU)
    plain.place(0, 0.25, 0)
    plain.place(64, 0.5, 0)
    plain.place(128, 0.125, 0)
    assert plain.scale is not None
    assert plain.scale.item() == 0.5


@pytest.mark.parametrize("name", ["ct-nvfp4", "ct-mxfp4", "mo-nvfp4", "mo-mxfp4"])
def test_kept_fp4_rounds_its_inputs_to_fp4(name: str, request: pytest.FixtureRequest) -> None:
    """The form's own int8 represents them within what bfloat16 loses."""
    request.getfixturevalue("built")
    scheme = OTHERS[name]
    (told,) = built(WRITTEN / name, NATIVE)[2]
    assert told.endswith(f"kept, inputs {scheme}")
    kept, decoded, half = (
        logits(name, candidates, dtype)
        for candidates, dtype in ((NATIVE, torch.float32), (REFERENCE, torch.float32), (REFERENCE, torch.bfloat16))
    )
    assert (kept - decoded).norm() <= 2 * (half - decoded).norm()
    assert (decoded - expected(name).logits).norm() > 4 * (kept - decoded).norm()


@pytest.mark.parametrize("name", ["ct-fp8", "ct-w8a8", "ct-fp8-block"])
def test_exact_activations_leave_inputs_and_say_so(name: str) -> None:
    scheme = EMULATED[name][0] if name in EMULATED else OTHERS[name]
    model, driver, (told,) = built(WRITTEN / name, {**CANDIDATES, **EXACT})
    assert told.endswith(f"inputs not quantized instead of {scheme}")
    assert all(each.inputs is None for each in model.parameters)
    assert {each["family"]: each["chosen"] for each in driver.ops.describe()}["inputs"] == "exact"


def test_kept_integers_quantize_inputs_with_the_stored_scale(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("built")
    name = "ct-w8a8-static-asym"
    assert built(WRITTEN / name, NATIVE)[2] == {"int8, a scale for each row, kept, inputs int8 with a stored scale"}
    kept, decoded = logits(name, NATIVE), logits(name, REFERENCE)
    assert (kept - decoded).norm() < 1e-4 * (decoded - expected(name).logits).norm()


def test_static_integers_are_decoded_where_the_kept_form_would_compute_other_scales(
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue("built")
    told = built(WRITTEN / "ct-w8a8-static-asym", {**NATIVE, "inputs": REFERENCE["inputs"]})[2]
    reason = "the form of int8 does not quantize inputs as int8 with a stored scale"
    assert told == {f"int8, a scale for each row, decoded: {reason}, inputs int8 with a stored scale"}


def changed(name: str, directory: Path, **content: Tensor | None) -> Path:
    """Save a written checkpoint with one tensor of its first down_proj replaced, or removed."""
    shutil.copytree(WRITTEN / name, directory)
    tensors = load_file(WRITTEN / name / "model.safetensors")
    for suffix, tensor in content.items():
        key = f"model.layers.0.mlp.down_proj.{suffix}"
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"input_scale": None}, "input_scale: missing beside"),
        ({"input_scale": torch.ones(2)}, r"input_scale: expected \[1\] or \[\], found \[2\]"),
        ({"input_scale": torch.ones(1, dtype=torch.int8)}, "input_scale: expected BF16 or F16 or F32, found I8"),
        ({"input_scale": torch.zeros(1)}, r"input_scale: a scale of inputs cannot be 0\.0"),
        ({"input_scale": torch.tensor([torch.inf])}, "input_scale: a scale of inputs cannot be inf"),
        ({"input_zero_point": None}, "input_zero_point: missing beside"),
    ],
)
def test_a_stored_scale_that_is_missing_or_no_scale_is_refused(
    content: dict[str, Tensor | None], says: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.layers\.0\.mlp\.down_proj\.{says}"):
        built(changed("ct-w8a8-static-asym", tmp_path / "c", **content), REFERENCE)


def test_groups_that_differ_in_activations_alone_are_refused() -> None:
    config = json.loads((WRITTEN / "ct-fp8" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    config["config_groups"]["other"] = {**group, "input_activations": {**group["input_activations"], "dynamic": True}}
    with pytest.raises(CheckpointError, match="equal weights with different activations"):
        read_format({"quantization_config": config})


@pytest.mark.parametrize("name", ["ct-fp8", "ct-w8a8-static-asym"])
async def test_scales_survive_sleep_and_weights_without_them_are_refused(name: str, tmp_path: Path) -> None:
    plain = unpacked(name, tmp_path / "plain")
    async with running(WRITTEN / name) as (runs, capacity):
        want = await answers(runs, capacity)
        await runs.sleep(2)
        await runs.wake(ALL)
        assert await answers(runs, capacity) == want
        await runs.load_weights(str(WRITTEN / name), "/")
        assert await answers(runs, capacity) == want
        with pytest.raises(CheckpointError, match=r"another checkpoint stores them; inputs are quantized as .*are not"):
            await runs.load_weights(str(plain), "/")
        assert await answers(runs, capacity) == want


def test_a_matrix_rounds_its_inputs_before_the_product() -> None:
    model, _, _ = built(WRITTEN / "ct-fp8", REFERENCE)
    matrix = next(each for each in model.parameters if isinstance(each, Matrix) and each.inputs is not None)
    x = torch.randn(4, matrix.form.shape[1])
    assert matrix.inputs is not None
    rounded = Inputs().round(x, STATIC, matrix.inputs.scale, None)
    assert matrix.multiply(x).equal(matrix.form.multiply(rounded, matrix.tensor))
    assert not matrix.multiply(x).equal(matrix.form.multiply(x, matrix.tensor))
