"""Which encoding a module has: config.json names the format, the stored tensors decide."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd.errors import CheckpointError
from infd.weights.checkpoint import Checkpoint
from infd.weights.encodings.find import FORMATS, labels, read_format
from infd.weights.encodings.scaled import Scaled
from infd.weights.stored import EncodedTensor
from tests.weights.checkpoints import write
from tests.weights.encodings.fixtures import WRITTEN, matrix

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
BYTES = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def grouped(*groups: dict[str, Any], **settings: Any) -> dict[str, Any]:
    table = {f"group_{index}": group for index, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": table, "format": "int-quantized", **settings}


def refusal(table: Any) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_format({"quantization_config": table})
    return str(refused.value)


def encodings(directory: Path, tensors: dict[str, Tensor], table: dict[str, Any]) -> dict[str, str]:
    """Return the label of each encoded matrix; "" for a plain tensor."""
    with Checkpoint(write(directory, tensors, {"quantization_config": table})) as checkpoint:
        return {
            name: each.encoding.label if isinstance(each, EncodedTensor) else ""
            for name, each in checkpoint.tensors.items()
        }


def rows_of_bytes(name: str, rows: int = 3) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.ones(rows, 64, dtype=torch.int8), f"{name}.weight_scale": torch.ones(rows, 1)}


@pytest.mark.parametrize("method", ["hqq", "quanto", "aqlm", "torchao", None, 3])
def test_an_unknown_method_is_refused_by_name_with_those_that_are_served(method: Any) -> None:
    told = refusal({"quant_method": method})
    assert f"quant_method {method!r} is not supported; supported: {', '.join(FORMATS)}; unquantized weights" in told


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("int4", "expected an object, found 'int4'"),
        (grouped(transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "transform_config: rotated weights"),
        (grouped(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: sparse weights are not supported"),
        (grouped({"targets": ["Linear"], "weights": BYTES}, format="marlin-24"), "format 'marlin-24' is not supported"),
        (grouped({"targets": ["Linear"], "weights": {"num_bits": 9}}), "`int` <= 8"),
        (grouped({"targets": ["Linear"], "weights": {"strategy": "group"}}), "group_size is missing"),
        (grouped({"targets": ["Linear"], "weights": {"strategy": "block"}}), "block_structure is missing"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {str(i): {"group_size": i} for i in range(1, 100)}},
            "99 schemes; at most 64 are read",
        ),
        (grouped(*[{"targets": ["Linear"], "weights": BYTES}] * 65), "65 schemes; at most 64 are read"),
        ({"quant_method": "gptq", "bits": 3}, "Invalid enum value 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}, "'bitblas' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "'marlin' is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ's version 'gemv' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "quant_algo 'NVFP4_SVD' is not supported"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A8_AWQ"}},
            },
            "quant_algo 'W4A8_AWQ' is not supported",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_a_scheme_that_is_not_served_is_refused_by_name(table: Any, says: str) -> None:
    told = refusal(table)
    assert told.startswith("config.json: quantization_config: ")
    assert says in told


def test_a_modules_scheme_is_the_one_that_its_tensors_fit(tmp_path: Path) -> None:
    """Names and patterns of modules are not read."""
    table = grouped(
        {"targets": ["re:(a|a)*$"], "weights": BYTES},
        {"targets": ["re:.*b$"], "weights": {**BYTES, "strategy": "tensor"}},
        {"targets": ["m.bb"], "weights": {**BYTES, "strategy": "group", "group_size": 32}},
        {"targets": ["Attention"], "weights": None},
        ignore=["m.plain", "m.a", "re:("],
    )
    tensors = {
        **rows_of_bytes("m.a"),
        "m.b.weight": torch.ones(3, 64, dtype=torch.int8),
        "m.b.weight_scale": torch.ones(1),
        "m.bb.weight": torch.ones(3, 64, dtype=torch.int8),
        "m.bb.weight_scale": torch.ones(3, 2),
        "m.plain.weight": torch.ones(3, 64),
        "m.other.weight": torch.ones(3, 64),
        "m.norm.weight": torch.ones(64),
    }

    assert encodings(tmp_path, tensors, table) == {
        "m.a.weight": "int8, a scale for each row",
        "m.b.weight": "int8, one scale",
        "m.bb.weight": "int8, groups of 32",
        "m.plain.weight": "",
        "m.other.weight": "",
        "m.norm.weight": "",
    }


def test_a_module_that_fits_no_scheme_is_refused_as_the_first_scheme_does(tmp_path: Path) -> None:
    table = grouped(
        {"targets": ["Linear"], "weights": BYTES},
        {"targets": ["Linear"], "weights": {**BYTES, "strategy": "group", "group_size": 32}},
    )
    tensors = {"m.a.weight": torch.ones(3, 64, dtype=torch.int8), "m.a.weight_scale": torch.ones(3, 3)}
    with pytest.raises(CheckpointError, match=r"m\.a\.weight_scale: expected \[3, 1\] or \[3\], found \[3, 3\]"):
        encodings(tmp_path, tensors, table)


@pytest.mark.parametrize(("point", "reason"), [(0, ""), (1, "m.a.weight_zero_point: the scheme is symmetric, but")])
def test_zero_points_of_a_symmetric_scheme_must_be_0(tmp_path: Path, point: int, reason: str) -> None:
    table = grouped({"targets": ["Linear"], "weights": BYTES})
    tensors = {**rows_of_bytes("m.a"), "m.a.weight_zero_point": torch.full((3, 1), point, dtype=torch.int8)}
    if not reason:
        assert encodings(tmp_path, tensors, table) == {"m.a.weight": "int8, a scale for each row"}
        return
    with pytest.raises(CheckpointError, match=reason):
        encodings(tmp_path, tensors, table)


@pytest.mark.parametrize(
    ("point", "reason"), [(-8, ""), (7, ""), (8, "no integers of 4 bits"), (-9, "no integers of 4 bits")]
)
def test_zero_points_have_as_many_bits_as_weights(tmp_path: Path, point: int, reason: str) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    table = grouped({"targets": ["Linear"], "weights": weights})
    table["format"] = "pack-quantized"
    tensors = {
        "m.a.weight_packed": torch.zeros(8, 8, dtype=torch.int32),
        "m.a.weight_shape": torch.tensor([8, 64]),
        "m.a.weight_scale": torch.ones(8, 2),
        "m.a.weight_zero_point": torch.full((8, 2), point, dtype=torch.int8),
    }
    if not reason:
        assert encodings(tmp_path, tensors, table) == {"m.a.weight": "int4, groups of 32, zero points"}
        return
    with pytest.raises(CheckpointError, match=f"m.a.weight_zero_point: these zero points are {reason}"):
        encodings(tmp_path, tensors, table)


def test_gptq_models_may_have_other_bits_and_groups_in_some_modules(tmp_path: Path) -> None:
    table = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    table["dynamic"] = {"-:.*plain": {}, "+:.*b": {"bits": 8, "group_size": 64}}
    tensors = {
        "m.a.qweight": torch.zeros(8, 16, dtype=torch.int32),
        "m.a.qzeros": torch.zeros(2, 2, dtype=torch.int32),
        "m.a.scales": torch.zeros(2, 16, dtype=torch.float16),
        "m.b.qweight": torch.zeros(16, 16, dtype=torch.int32),
        "m.b.qzeros": torch.zeros(1, 4, dtype=torch.int32),
        "m.b.scales": torch.zeros(1, 16, dtype=torch.float16),
        "m.plain.weight": torch.zeros(3, 3),
    }
    assert encodings(tmp_path, tensors, table) == {
        "m.plain.weight": "",
        "m.a.weight": "int4, groups of 32, zero points",
        "m.b.weight": "int8, a scale for each row, zero points",
    }


def test_modelopts_own_file_is_read_where_config_json_has_nothing(tmp_path: Path) -> None:
    directory = shutil.copytree(WRITTEN / "mo-fp8", tmp_path / "copy")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with Checkpoint(WRITTEN / "mo-fp8") as whole, Checkpoint(directory) as copy:
        assert labels(copy.tensors) == labels(whole.tensors) == {"fp8, one scale, inputs fp8 with a stored scale": 6}


def test_a_decoder_of_a_multimodal_model_may_state_the_format() -> None:
    assert read_format({"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}}) is not None
    assert read_format({"text_config": {}}) is None


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_integers_of_any_bits_are_unpacked_across_words(tmp_path: Path, bits: int) -> None:
    """The packing in plain Python: number i of a row is in bits [i * bits, (i + 1) * bits) of the row."""
    half = 1 << (bits - 1)
    numbers = torch.randint(-half, half, (70, 96), generator=torch.Generator().manual_seed(bits))
    lines = [sum((value + half) << bits * at for at, value in enumerate(row)) for row in numbers.tolist()]
    content = b"".join(line.to_bytes(96 * bits // 8, "little") for line in lines)
    scale = torch.rand(70, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors = {
        "m.weight_packed": torch.frombuffer(bytearray(content), dtype=torch.int32).view(70, -1),
        "m.weight_scale": scale,
        "m.weight_shape": torch.tensor([70, 96]),
    }
    table = grouped({"targets": ["Linear"], "weights": {**INT4, "num_bits": bits}}, format="pack-quantized")
    with Checkpoint(write(tmp_path, tensors, {"quantization_config": table})) as checkpoint:
        found = checkpoint.tensors["m.weight"]
        assert isinstance(found, EncodedTensor)
        assert matrix(found.encoding).equal(numbers * scale.float().repeat_interleave(32, 1))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_zero_points_of_any_bits_are_unpacked_across_words(tmp_path: Path, bits: int) -> None:
    """The packing in plain Python: the zero point of row i is in bits [i * bits, (i + 1) * bits) of its group."""
    half, rows = 1 << (bits - 1), 70
    points = torch.randint(-half, half, (3, rows), generator=torch.Generator().manual_seed(bits))
    lines = [sum((value + half) << bits * at for at, value in enumerate(group)) for group in points.tolist()]
    words = b"".join(line.to_bytes(-(-rows * bits // 32) * 4, "little") for line in lines)
    tensors = {
        "m.weight_packed": torch.zeros(rows, 96 * bits // 32, dtype=torch.int32),  # each number is -half
        "m.weight_scale": torch.ones(rows, 3),
        "m.weight_shape": torch.tensor([rows, 96]),
        "m.weight_zero_point": torch.frombuffer(bytearray(words), dtype=torch.int32).view(3, -1).T.contiguous(),
    }
    weights = {**INT4, "num_bits": bits, "symmetric": False}
    table = grouped({"targets": ["Linear"], "weights": weights}, format="pack-quantized")
    with Checkpoint(write(tmp_path, tensors, {"quantization_config": table})) as checkpoint:
        found = checkpoint.tensors["m.weight"]
        assert isinstance(found, EncodedTensor)
        assert matrix(found.encoding).equal((-half - points.T).float().repeat_interleave(32, 1))


def test_an_order_of_inputs_names_each_inputs_group(tmp_path: Path) -> None:
    """As llm-compressor wrote actorder "group", until compressed-tensors 0.18."""
    order = torch.randperm(96, generator=torch.Generator().manual_seed(4)) // 32
    numbers = torch.randint(0, 16, (8, 96), generator=torch.Generator().manual_seed(5))
    words = (numbers.view(8, 12, 8) << torch.arange(0, 32, 4)).sum(-1)
    scale = torch.rand(8, 3, generator=torch.Generator().manual_seed(6))
    tensors = {
        "m.weight_packed": torch.where(words >= 2**31, words - 2**32, words).to(torch.int32),
        "m.weight_scale": scale,
        "m.weight_shape": torch.tensor([8, 96]),
        "m.weight_g_idx": order.to(torch.int32),
    }
    table = grouped({"targets": ["Linear"], "weights": {**INT4, "actorder": "group"}}, format="pack-quantized")
    with Checkpoint(write(tmp_path, tensors, {"quantization_config": table})) as checkpoint:
        found = checkpoint.tensors["m.weight"]
        assert isinstance(found, EncodedTensor)
        assert found.encoding.label == "int4, groups of 32, reordered"
        assert matrix(found.encoding).equal((numbers - 8) * scale[:, order])


@pytest.mark.exhaustive
def test_experts_of_gpt_oss_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(7)
    blocks = torch.randint(256, (3, 10, 5, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 5), generator=generator, dtype=torch.uint8)
    tensors = {"m.experts.gate_up_proj_blocks": blocks, "m.experts.gate_up_proj_scales": scales}
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["m.router"]}}
    with Checkpoint(write(tmp_path, tensors, config)) as checkpoint:
        (found,) = checkpoint.tensors.values()
        assert isinstance(found, EncodedTensor)
        assert (found.name, found.shape) == ("m.experts.gate_up_proj", (3, 10, 160))
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert matrix(found.encoding).view(3, 10, 160).transpose(1, 2).equal(theirs)


def test_scales_are_read_in_every_shape_that_writers_use(tmp_path: Path) -> None:
    words = torch.randint(-128, 128, (4, 64), generator=torch.Generator().manual_seed(8), dtype=torch.int8)
    scale = torch.rand(4, generator=torch.Generator().manual_seed(9))
    table = grouped({"targets": ["Linear"], "weights": BYTES})
    tensors = {"a.weight": words, "a.weight_scale": scale, "b.weight": words, "b.weight_scale": scale[:, None]}
    with Checkpoint(write(tmp_path, tensors, {"quantization_config": table})) as checkpoint:
        for each in checkpoint.tensors.values():
            assert isinstance(each, EncodedTensor)
            assert isinstance(each.encoding, Scaled)
            assert matrix(each.encoding).equal(words * scale[:, None])
