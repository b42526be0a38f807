"""Untrusted adapters are refused by name, before memory is allocated, and never read from outside the root."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from infd.adapters.files import locate
from infd.adapters.reading import AdapterReader
from infd.errors import AdapterTooLarge, CheckpointError
from infd.models.parameter import Target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from infd.adapters.reading import HostWeights
    from infd.weights.load import Arena

Q, QKV = "model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.self_attn"
TARGETS = [
    Target({"model.embed_tokens": 8}, 20, table=True),
    Target({Q: 8, "model.layers.0.self_attn.k_proj": 4, "model.layers.0.self_attn.v_proj": 4}, 8),
    Target({"model.layers.0.self_attn.o_proj": 8}, 8),
    Target({"lm_head": 20}, 8),
]
CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "org/b",
}
TENSORS = {f"{QKV}.q_proj.lora_A.weight": torch.ones(2, 8), f"{QKV}.q_proj.lora_B.weight": torch.ones(8, 2)}


def refuse(size: int) -> Arena:
    raise AssertionError("memory was taken for what is refused")


class Heap:
    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)


def save(directory: Path, config: Mapping[str, Any] = CONFIG, tensors: Mapping[str, Tensor] = TENSORS) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    return directory


def read(directory: Path, dtype: torch.dtype = torch.float32) -> HostWeights:
    return AdapterReader(TARGETS, dtype, lambda size: Heap()).read(str(directory), None, 10**6)


def refused(directory: Path, *, root: Path | None = None) -> str:
    reader = AdapterReader(TARGETS, torch.float32, refuse)
    with pytest.raises(CheckpointError) as caught:
        reader.read(str(directory), None if root is None else str(root), 2**20)
    return str(caught.value)


def test_a_supported_config_is_read_with_its_scale(tmp_path: Path) -> None:
    weights = AdapterReader(TARGETS, torch.float32, lambda _: Heap()).read(str(save(tmp_path)), None, 2**20)

    (low,) = weights.changes.values()
    assert (low.a.shape, low.parts[0].b.unique().tolist()) == ((2, 8), [2.0])
    assert (weights.facts.base, weights.facts.rank) == ("org/b", 2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": "ADALORA"}, "ADALORA"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "olora"}, "'olora'"),
        ({"r": 0}, "malformed"),
        ({"r": "2"}, "malformed"),
        ({"lora_alpha": "much"}, "malformed"),
        ({"rank_pattern": {"(a+)+": 2}}, "regular expression"),
        ({"alpha_pattern": {"layers.[01]": 2}}, "regular expression"),
        ({"r": 3}, "rank 2; the config says 3"),
        ({"rank_pattern": {"q_proj": 4}}, "the config says 4"),
        ({"target_modules": ["k_proj"]}, "left over, since target_modules does not name it"),
        ({"target_modules": ["q_proj", "up_proj"]}, "target_modules names up_proj"),
    ],
)
def test_a_config_is_refused_with_the_name_of_the_unsupported_feature(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    assert said in refused(save(tmp_path, {**CONFIG, **changed}))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"LORA"', "[" * 10_000, '{"peft_type": "LORA", "lora_alpha": 1e999}', "\xff"]
)
def test_a_malformed_config_is_refused_by_field(tmp_path: Path, text: str) -> None:
    save(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(text.encode("latin-1"))

    assert "adapter_config.json" in refused(tmp_path)


A, B = f"{QKV}.q_proj.lora_A.weight", f"{QKV}.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({A: torch.ones(2, 9)}, f"{A}: expected [2, 8], found [2, 9]"),
        ({B: torch.ones(9, 2)}, f"{B}: expected [8, 2], found [9, 2]"),
        ({A: torch.ones(3, 8)}, "found [3, 8]"),
        ({A: torch.ones(0, 8), B: torch.ones(8, 0)}, "expected ['rank', 8], found [0, 8]"),
        ({A: torch.ones(16)}, "found [16]"),
        ({A: torch.ones(2, 8, dtype=torch.int32)}, "found I32"),
        ({A: None}, "there is no lora_A.weight beside it"),
        ({B: None}, "there is no lora_B.weight beside it"),
        ({A: None, B: None}, "the file does not hold"),
        ({f"{QKV}.q_proj.lora_magnitude_vector": torch.ones(8)}, "DoRA"),
        ({f"{QKV}.q_proj.lora_B.bias": torch.ones(8)}, "a bias"),
        ({"base_model.model.lm_head.weight": torch.ones(20, 8)}, "a whole tensor"),
        ({"base_model.model.lm_head.base_layer.weight": torch.ones(21, 8)}, "another shape than this model's"),
        ({"anything": torch.ones(1)}, "anything: left over"),
        (
            {A.replace("layers.0", "layers.7"): torch.ones(2, 8), B.replace("layers.0", "layers.7"): torch.ones(8, 2)},
            "this model has no module model.layers.7.self_attn.q_proj",
        ),
        (
            {A.replace("model.layers", "model.vision_tower.layers"): torch.ones(2, 8)},
            "no module model.vision_tower.layers.0",
        ),
        ({"base_model.model.model.embed_tokens.lora_A.weight": torch.ones(2, 20)}, "there is no lora_B.weight"),
        (
            {
                "base_model.model.model.embed_tokens.lora_A.weight": torch.ones(2, 20),
                "base_model.model.model.embed_tokens.lora_B.weight": torch.ones(8, 2),
            },
            "is a table here",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, changed: dict[str, Tensor | None], said: str) -> None:
    tensors = {name: tensor for name, tensor in {**TENSORS, **changed}.items() if tensor is not None}
    answer = refused(save(tmp_path, tensors=tensors))

    assert said in answer
    assert "made for org/b" in answer


EMBEDDED = {
    "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 20),
    "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(8, 2),
}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [*TENSORS, *EMBEDDED])
def test_numbers_that_are_not_finite_are_refused_with_their_tensor(tmp_path: Path, name: str, number: float) -> None:
    tensors = {each: tensor.clone() for each, tensor in (TENSORS | EMBEDDED).items()}
    tensors[name][1, 1] = number
    config = CONFIG | {"target_modules": ["q_proj", "embed_tokens"]}

    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: holds NaN or infinity"):
        read(save(tmp_path / "a", config, tensors))


def test_numbers_that_the_models_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    b = f"{QKV}.q_proj.lora_B.weight"
    directory = save(tmp_path / "a", tensors=TENSORS | {b: torch.full((8, 2), 60_000.0)})  # times its scale of two

    assert read(directory).facts.rank == 2
    with pytest.raises(CheckpointError, match=rf"{re.escape(b)}: holds .* too large for float16"):
        read(directory, torch.float16)


def test_a_rank_above_the_supported_one_is_refused(tmp_path: Path) -> None:
    tensors = {A: torch.ones(257, 8), B: torch.ones(8, 257)}

    assert "ranks up to 256" in refused(save(tmp_path, {**CONFIG, "r": 257}, tensors))


def test_a_long_list_of_faults_is_cut(tmp_path: Path) -> None:
    tensors = {f"left.over.{number}": torch.ones(1) for number in range(500)}

    assert "and 490 more" in refused(save(tmp_path, tensors={**TENSORS, **tensors}))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, keep: int) -> None:
    file = save(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])

    assert "adapter_model.safetensors" in refused(tmp_path)


def test_a_header_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path) / "adapter_model.safetensors"
    file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])

    assert "the header claims" in refused(tmp_path)


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")

    assert "adapter_model.bin is a pickle" in refused(tmp_path)


def test_an_adapter_larger_than_free_memory_is_refused_with_its_size(tmp_path: Path) -> None:
    reader = AdapterReader(TARGETS, torch.float32, refuse)
    with pytest.raises(AdapterTooLarge, match="unload others"):
        reader.read(str(save(tmp_path)), None, 100)


def test_a_model_without_targets_takes_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="takes no adapters"):
        AdapterReader([], torch.float32, refuse).read(str(save(tmp_path)), None, 2**20)


@pytest.mark.parametrize("path", ["../outside", "a/../../outside", "/etc", "link", "good/../../outside", "inner-links"])
def test_nothing_outside_the_root_is_opened(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    outside = save(tmp_path / "outside")
    save(root / "good")
    (root / "link").symlink_to(outside)
    (root / "inner-links").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "inner-links" / name).symlink_to(outside / name)

    with pytest.raises(CheckpointError, match="leads out of"):
        locate(path, str(root))


def test_links_that_stay_within_the_root_are_followed(tmp_path: Path) -> None:
    save(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
    (tmp_path / "latest").symlink_to("snapshot")

    for path in ("latest", "snapshot", str(tmp_path / "latest"), "./blobs/"):
        assert locate(path, str(tmp_path)).tensors == (tmp_path / "blobs" / "adapter_model.safetensors").resolve()


@pytest.mark.parametrize("path", ["", "absent", "nul\0", "good/adapter_config.json", "circle", "empty"])
def test_a_directory_without_an_adapter_is_refused(tmp_path: Path, path: str) -> None:
    save(tmp_path / "good")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "empty").mkdir()
    for root in (None, str(tmp_path)):
        with pytest.raises(CheckpointError):
            locate(path if root is not None or "\0" in path or not path else str(tmp_path / path), root)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    os.mkfifo(tmp_path / "adapter_config.json")

    assert "not a regular file" in refused(tmp_path)


def test_a_file_that_changes_has_another_stamp(tmp_path: Path) -> None:
    before = locate(str(save(tmp_path))).stamp()
    assert locate(str(tmp_path)).stamp() == before
    save(tmp_path, tensors={**TENSORS, A: torch.zeros(2, 8)})

    assert locate(str(tmp_path)).stamp() != before
