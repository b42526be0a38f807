"""The layouts that bench/int4_checkpoint.py writes mean the rounded weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from int4_checkpoint import GROUP, LAYOUTS, make, rounded
from safetensors.torch import save_file

from infd.weights.checkpoint import Checkpoint
from infd.weights.encodings.rows import rows_of
from infd.weights.stored import EncodedTensor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_as_the_rounded_weights(layout: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    weight = torch.randn(24, 2 * GROUP, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = torch.ones(8, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({name: weight, "model.norm.weight": norm}, tmp_path / "plain" / "model.safetensors")

    make(tmp_path / "plain", tmp_path / "made", layout)

    numbers, scales = rounded(weight)
    kept = scales.bfloat16() if layout == "compressed-tensors" else scales
    expected = ((numbers - 8).view(24, 2, GROUP) * kept.float()[:, :, None]).view(24, -1)
    with Checkpoint(tmp_path / "made") as file:
        stored = file.tensors[name]
        assert isinstance(stored, EncodedTensor)
        assert rows_of(stored.encoding)(0, 24).float().equal(expected)
        assert "model.norm.weight" in file.tensors
