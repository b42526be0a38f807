"""Stacked experts are divided: each expert's projections are modules, as llm-compressor writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from infd.quantize.convert import convert
from infd.quantize.schemes import SCHEMES
from infd.weights.checkpoint import Checkpoint
from infd.weights.stored import EncodedTensor
from tests.quantize.serving import logits, names
from tests.tiny import make
from tests.weights.encodings.fixtures import matrix

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

EACH = pytest.mark.parametrize("scheme", SCHEMES)
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 64}
LAYER = "model.layers.0."
ONE_LAYER: dict[str, dict[str, list[int]]] = {"qwen3-moe": {"mlp_only_layers": []}, "llama4": {"no_rope_layers": [1]}}
# By variant: the module beneath which the experts are, and gate, up and down of an expert from its part of the stacks.
STACKED = {
    "granite-moe": ("block_sparse_moe", lambda both, down: (both[:32], both[32:], down)),
    "qwen3-moe": ("mlp", lambda both, down: (both[:32], both[32:], down)),
    "llama4": ("feed_forward", lambda both, down: (both[:, :32].T, both[:, 32:].T, down.T)),
    "gpt-oss": ("mlp", lambda both, down: (both[:, 0::2].T, both[:, 1::2].T, down.T)),
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(params=STACKED)
def stacked(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Return a variant, and its checkpoint with stacked experts, of whose weights some are zeros."""
    variant: str = request.param
    directory = make(variant, tmp_path / variant, **SIZES, **ONE_LAYER.get(variant, {}))
    tensors = load_file(directory / "model.safetensors")
    if variant == "qwen3-moe":
        parts = {
            each: torch.stack([tensors.pop(f"{LAYER}mlp.experts.{e}.{each}.weight") for e in range(8)])
            for each in PROJECTIONS
        }
        tensors[f"{LAYER}mlp.experts.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        tensors[f"{LAYER}mlp.experts.down_proj"] = parts["down_proj"]
    for name, each in tensors.items():
        if each.dim() == 3:
            each[3, 5], each[2, :, 7] = 0, 0
            tensors[name] = each.bfloat16().contiguous()
    save_file(tensors, directory / "model.safetensors")
    return variant, directory


def experts_of(variant: str, directory: Path) -> dict[str, Tensor]:
    """Return the matrices of the experts, by the name of the modules that are to be written."""
    module, divide = STACKED[variant]
    stacks = [each for _, each in sorted(load_file(directory / "model.safetensors").items()) if each.dim() == 3]
    both, down = sorted(stacks, key=lambda stack: -stack[0].numel())
    return {
        f"{LAYER}{module}.experts.{expert}.{projection}": rows
        for expert in range(8)
        for projection, rows in zip(PROJECTIONS, divide(both[expert], down[expert]), strict=True)
    }


@EACH
def test_serving_divided_experts_equals_quantizing_while_loading_to_the_bit(
    built: None, scheme: str, stacked: tuple[str, Path], tmp_path: Path
) -> None:
    variant, directory = stacked
    seen: list[tuple[int, int]] = []
    written = convert(directory, tmp_path / "out", scheme, lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1]
    assert written.before == sum(each.nbytes for each in load_file(directory / "model.safetensors").values())
    found = names(tmp_path / "out")
    assert found >= {f"{name}.weight" for name in experts_of(variant, directory)}
    assert len(found) == written.matrices
    for dtype in (torch.bfloat16, torch.float32):
        ours = logits(tmp_path / "out", "native", "none", "none", dtype)
        assert ours.isfinite().all()
        assert ours.equal(logits(directory, "native", scheme, "none", dtype)), dtype
    assert not ours.equal(logits(directory, "native", "none", "none", torch.float32))


@EACH
def test_compressed_tensors_decompresses_the_same_experts(
    scheme: str, stacked: tuple[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    variant, directory = stacked
    convert(directory, tmp_path / "out", scheme)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    with Checkpoint(tmp_path / "out") as checkpoint:
        for module, rows in experts_of(variant, directory).items():
            parts = {
                name.removeprefix(f"{module}."): each for name, each in stored.items() if name.startswith(f"{module}.")
            }
            parts.pop("bias", None)
            theirs = compressor.decompress(parts, group)["weight"]
            encoded = checkpoint.tensors[f"{module}.weight"]
            assert isinstance(encoded, EncodedTensor)
            ours = matrix(encoded.encoding)
            # compressed-tensors computes in the scales' type.
            assert theirs.float().equal((ours.bfloat16() if scheme == "int4" else ours).float()), module
            assert (ours - rows.float()).norm() < 0.13 * rows.float().norm(), module


@pytest.mark.parametrize("scheme", ["int4", "fp8"])  # of other schemes transformers 5.24 finds no experts' weights
def test_transformers_joins_divided_experts_to_the_same_stacks(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    directory = make("qwen3-moe", tmp_path / "plain", **SIZES, **ONE_LAYER["qwen3-moe"])
    convert(directory, tmp_path / "out", scheme)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model, problems = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out",
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(dequantize=True),
            output_loading_info=True,
        )
    assert not any(problems.values())
    joined = model.state_dict()
    with Checkpoint(tmp_path / "out") as checkpoint:
        for expert in range(8):
            parts = []
            for projection in PROJECTIONS:
                encoded = checkpoint.tensors[f"{LAYER}mlp.experts.{expert}.{projection}.weight"]
                assert isinstance(encoded, EncodedTensor)
                parts.append(matrix(encoded.encoding).float())
            gate, up, down = parts
            for name, ours in (("gate_up_proj", torch.cat([gate, up])), ("down_proj", down)):
                # compressed-tensors computes int4's in the scales' type.
                expected = ours.bfloat16().float() if scheme == "int4" else ours
                assert joined[f"{LAYER}mlp.experts.{name}"][expert].float().equal(expected), (expert, name)


def test_biases_of_divided_experts_are_theirs(tmp_path: Path) -> None:
    directory = make("gpt-oss", tmp_path / "plain", **SIZES)
    convert(directory, tmp_path / "out", "int4")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("plain", "out"))
    both, down = (before[f"{LAYER}mlp.experts.{each}_proj_bias"] for each in ("gate_up", "down"))
    for expert in range(8):
        found = [after[f"{LAYER}mlp.experts.{expert}.{each}.bias"] for each in PROJECTIONS]
        expected = both[expert, 0::2], both[expert, 1::2], down[expert]
        assert all(each.equal(rows) for each, rows in zip(found, expected, strict=True))
    assert not any(name.endswith("_proj_bias") for name in after)
