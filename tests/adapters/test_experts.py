"""Adapters that change experts equal PEFT in float32, in both spellings, beside shared experts and other adapters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infd.errors import CheckpointError
from infd.kernels.select import CANDIDATES, insisting, select
from tests.adapters.making import make
from tests.adapters.test_parity import CLOSE, LENGTH, Bench, check_logits, expect, off, text
from tests.gguf.test_parity import made
from tests.gguf.writing import write
from tests.tiny import oracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

CPU = torch.device("cpu")
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "both matrices": ("qwen3-moe", {"target_modules": [], "target_parameters": STACKED}),
    "down alone, first in the file": ("mixtral", {"target_modules": [], "target_parameters": STACKED[1:]}),
    "beside attention and the gate of shared experts": (
        "qwen2-moe",
        {"target_modules": ["q_proj", "shared_expert_gate"], "target_parameters": STACKED},
    ),
    "modules of single experts, which PEFT turns into parameters": (
        "qwen3-moe-norm",
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    ),
    "transposed matrices, rows alternating": ("gpt-oss", {"target_modules": ["o_proj"], "target_parameters": STACKED}),
    "weights on inputs": ("llama4", {"target_modules": [], "target_parameters": STACKED, "use_rslora": True}),
    "a factor on the output": ("granite-moe", {"target_modules": [], "target_parameters": STACKED}),
    "ranks and alphas by parameter": (
        "olmoe",
        {
            "target_modules": [],
            "target_parameters": STACKED,
            "rank_pattern": {"experts.gate_up_proj": 3},
            "alpha_pattern": {"experts.down_proj": 20},
        },
    ),
}


def bench(checkpoint: Path, kernels: str = "native") -> Bench:
    ops = select(CPU, torch.float32, insisting("reference", CANDIDATES) if kernels == "reference" else CANDIDATES)
    # Decoders multiply float32 with torch, whose matrices native experts do not read; encoders do not.
    return Bench(checkpoint, CPU, ops.replace(linear=ops.encoder_linear) if kernels == "native" else ops)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(
    built: None, tiny: Callable[[str], Path], tmp_path: Path, case: str, kernels: str
) -> None:
    variant, settings = CASES[case]
    check_logits(bench(tiny(variant), kernels), tmp_path, make(tiny(variant), tmp_path, **settings))


def numbered(
    checkpoint: Path, directory: Path, names: tuple[str, str, str], ranks: dict[int, int], *, seed: int
) -> PreTrainedModel:
    """Save an adapter of single experts' modules; return transformers' model with its products merged.

    names  of gate, up and down, with the prefix beneath a layer
    ranks  rank by expert; other experts are not changed
    """
    model, generator, tensors = oracle(checkpoint), torch.Generator().manual_seed(seed), {}
    stacks = [(name, each) for name, each in model.named_parameters() if name.endswith((".gate_up_proj", ".down_proj"))]
    for name, parameter in stacks:
        layer = name.split(".")[2]
        both = name.endswith("gate_up_proj")
        inner = parameter.shape[1] // 2
        for expert, rank in ranks.items():
            for number, module in enumerate(names[:2] if both else names[2:]):
                rows = slice(number * inner, (number + 1) * inner) if both else slice(None)
                weight = parameter.data[expert, rows]
                a, b = (
                    torch.randn(shape, generator=generator) * 0.1
                    for shape in ((rank, weight.shape[1]), (len(weight), rank))
                )
                weight += b @ a * 8 / rank
                key = f"base_model.model.model.layers.{layer}.{module.format(expert)}"
                tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    patterns = {f"experts.{expert}.{name.rpartition('.')[2]}": rank for expert, rank in ranks.items() for name in names}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": patterns}
    config["target_modules"] = [name.rpartition(".")[2] for name in names]
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return model


QWEN = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
MIXTRAL = ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2")


@pytest.mark.parametrize(("variant", "names"), [("qwen3-moe", QWEN), ("mixtral", MIXTRAL)])
def test_modules_of_single_experts_are_changed_alone(
    built: None, tiny: Callable[[str], Path], tmp_path: Path, variant: str, names: tuple[str, str, str]
) -> None:
    theirs = numbered(tiny(variant), tmp_path, names, {0: 2, 3: 5, 6: 4}, seed=1)
    infd = bench(tiny(variant))
    infd.hold(1, tmp_path)
    driver = infd.driver()
    (ours,) = driver.step((driver.start(text(2), slot=1), LENGTH))
    (plain,) = driver.step((driver.start(text(2)), LENGTH))

    want = expect(theirs, text(2))
    assert off(ours, want) < CLOSE
    assert off(plain, want) > 100 * CLOSE


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_in_one_batch_each_sequence_has_its_own_adapter_or_none(
    built: None, tiny: Callable[[str], Path], tmp_path: Path, kernels: str
) -> None:
    checkpoint = tiny("qwen3-moe")
    models = {
        0: oracle(checkpoint),
        1: make(checkpoint, tmp_path / "1", seed=1, r=2, target_modules=[], target_parameters=STACKED),
        2: make(checkpoint, tmp_path / "2", seed=2, r=9, target_modules=["q_proj"], target_parameters=STACKED[:1]),
        3: numbered(checkpoint, tmp_path / "3", QWEN, {1: 3, 2: 7}, seed=3),
        4: make(checkpoint, tmp_path / "4", seed=4, target_modules=["v_proj"]),
    }
    infd = bench(checkpoint, kernels)
    for slot in (1, 2, 3, 4):
        infd.hold(slot, tmp_path / str(slot))
    driver = infd.driver()
    slots = (2, 0, 1, 3, 0, 4, 1)
    told = [driver.start(text(seed), slot) for seed, slot in enumerate(slots)]
    parts = [driver.step(*((each, count) for each in told)) for count in (3, 1, 1, LENGTH - 5)]
    for seed, (slot, logits) in enumerate(zip(slots, zip(*parts, strict=True), strict=True)):
        assert off(torch.cat(logits), expect(models[slot], text(seed))) < CLOSE

    if kernels == "native":  # every row has the bits that it has alone
        alone = infd.driver()
        plain = alone.start(text(1))
        for count, together in zip((3, 1, 1, LENGTH - 5), (part[1] for part in parts), strict=True):
            assert alone.step((plain, count))[0].equal(together)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("mlp.experts.lora_A", "mlp.gate.lora_A", r"no module model.layers.0.mlp.gate that adapters may change"),
        ("mlp.experts.base_layer.lora_A", "mlp.experts.base_layer.lora_C", r"there is no lora_A.weight beside it"),
    ],
)
def test_other_tensors_are_refused_by_name(
    tiny: Callable[[str], Path], tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    make(tiny("qwen3-moe"), tmp_path, target_modules=[], target_parameters=STACKED)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match=complaint):
        bench(tiny("qwen3-moe"), "reference").hold(1, tmp_path)


def test_a_parameter_of_another_shape_and_one_changed_twice_are_refused(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    make(tiny("gpt-oss"), tmp_path, target_modules=[], target_parameters=["experts.gate_up_proj_bias"])
    with pytest.raises(CheckpointError, match=r"experts.lora_A.weight: expected \[8 x rank, 48\] and \[64, 8 x rank\]"):
        bench(tiny("gpt-oss"), "reference").hold(1, tmp_path)

    make(tiny("qwen3-moe"), tmp_path, target_modules=[], target_parameters=STACKED)
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    single = tmp_path / "single"
    numbered(tiny("qwen3-moe"), single, QWEN, {1: 4}, seed=3)
    save_file(load_file(file) | load_file(single / "adapter_model.safetensors"), file)
    written = json.loads(config.read_text())
    config.write_text(json.dumps(written | {"target_modules": ["gate_proj", "up_proj", "down_proj"]}))
    with pytest.raises(CheckpointError, match="the experts are changed twice"):
        bench(tiny("qwen3-moe"), "reference").hold(1, tmp_path)


def turn(adapter: Path, experts: int) -> None:
    """Write the factors of stacked parameters again as PEFT 0.18 does, which takes outputs for inputs."""
    file, turned = adapter / "adapter_model.safetensors", {}
    for name, tensor in (tensors := load_file(file)).items():
        if name.endswith("lora_A.weight"):
            other = name.replace("lora_A", "lora_B")
            rank = len(tensor) // experts
            b = tensors[other].view(-1, rank, experts).permute(2, 1, 0)
            a = tensor.view(experts, rank, -1).permute(2, 1, 0)
            turned |= {name: b.reshape(len(tensor), -1), other: a.reshape(-1, len(tensor))}
    save_file({name: tensor.contiguous() for name, tensor in turned.items()}, file)


def rewrite(adapter: Path, **fields: object) -> None:
    config = adapter / "adapter_config.json"
    written = {**json.loads(config.read_text()), **fields}
    config.write_text(json.dumps({name: value for name, value in written.items() if value is not None}))


SQUARE = {"hidden_size": 48, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("parameters", "older", "version"),
    [
        (STACKED[:1], False, "0.19.1"),
        (STACKED[:1], True, "0.19.0"),
        (STACKED[:1], True, "0.18.1"),
        (STACKED, True, None),  # down is not square, and tells it
        (STACKED, False, None),
    ],
)
def test_the_version_of_peft_or_the_other_parameter_says_which_factor_of_square_matrices_multiplies_the_inputs(
    built: None, tmp_path: Path, parameters: list[str], older: bool, version: str | None
) -> None:
    checkpoint, adapter = made("qwen3-moe", tmp_path / "checkpoint", **SQUARE), tmp_path / "adapter"
    adapted = make(checkpoint, adapter, target_modules=[], target_parameters=parameters)
    if older:
        turn(adapter, 8)
    rewrite(adapter, peft_version=version)
    check_logits(bench(checkpoint), adapter, adapted)


@pytest.mark.parametrize("version", [None, "0.18.2.dev0@51d2a50"])
def test_an_adapter_of_square_matrices_without_a_known_peft_version_is_refused(
    tmp_path: Path, version: str | None
) -> None:
    checkpoint, adapter = made("qwen3-moe", tmp_path / "checkpoint", **SQUARE), tmp_path / "adapter"
    make(checkpoint, adapter, target_modules=[], target_parameters=STACKED[:1])
    rewrite(adapter, peft_version=version)
    with pytest.raises(CheckpointError, match=r"gate_up_proj are square, .* not peft_version (missing|0.18.2.dev0)"):
        bench(checkpoint, "reference").hold(1, adapter)


def test_peft_0_19_leaves_factors_of_square_transposed_matrices_ambiguous(tmp_path: Path) -> None:
    checkpoint = made("gpt-oss", tmp_path / "checkpoint", hidden_size=48, intermediate_size=48)
    for version, told in (("0.18.1", True), ("0.19.1", False)):
        adapter = tmp_path / version
        make(checkpoint, adapter, target_modules=[], target_parameters=STACKED[1:])
        rewrite(adapter, peft_version=version)
        if told:
            bench(checkpoint, "reference").hold(1, adapter)
        else:
            with pytest.raises(CheckpointError, match=r"down_proj are square, .* not peft_version 0.19.1"):
                bench(checkpoint, "reference").hold(1, adapter)


def test_an_adapter_fits_the_model_whatever_file_its_experts_come_from(
    built: None, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """The rows of gate and up alternate in gpt-oss and in its adapters, but not in GGUF."""
    checkpoint = made("gpt-oss", tmp_path / "checkpoint")
    path = write(checkpoint, tmp_path / "model.gguf")
    adapted = make(checkpoint, tmp_path / "adapter", target_modules=["o_proj"], target_parameters=STACKED)
    check_logits(bench(path), tmp_path / "adapter", adapted)
