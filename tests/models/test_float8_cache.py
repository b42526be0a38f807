"""Models over an fp8 cache, against transformers with a cache that rounds to fp8."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from infd.errors import CheckpointError
from infd.kernels.select import CACHED, CANDIDATES, select
from infd.weights.encodings.find import read_format
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.models.test_parity import text
from tests.tiny import oracle

CUT = (13, 1, 1, 16, 10)
SCALES = {0: (torch.tensor(0.25), torch.tensor(0.5)), 1: (torch.tensor([0.02, 2.0]), torch.tensor([0.5, 0.03]))}
CLOSE = 0.02  # mean difference of logits; numbers halfway between two fp8 values may round either way


class Rounding(DynamicCache):
    """A cache that rounds keys and values to fp8."""

    def update(self, key, value, layer, *rest, **named):
        scales = SCALES.get(layer, (torch.tensor(1.0),) * 2)
        kept = (
            (x / s.view(-1, 1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * s.view(-1, 1, 1)
            for x, s in zip((key, value), scales, strict=True)
        )
        return super().update(*kept, layer, *rest, **named)


@pytest.fixture
def calibrated(tiny, tmp_path):
    """A checkpoint with cache scales: one for the first layer, one a head for the second, none for the third."""

    def make(variant, spelling):
        copy = shutil.copytree(tiny(variant), tmp_path / variant)
        held = load_file(copy / "model.safetensors")
        for layer, pair in SCALES.items():
            for name, scale in zip(spelling, pair, strict=True):
                held[f"model.layers.{layer}.self_attn.{name}"] = scale
        save_file(held, copy / "model.safetensors")
        return copy

    return make


def ours(directory, candidates, tokens):
    ops = select(CPU, torch.float32, candidates)
    driver = Driver(load_model(directory, ops=ops), ops=ops)
    sequence, logits = driver.start(tokens), []
    for count in CUT:
        logits += driver.step((sequence, count))
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("variant", "spelling"),
    [("llama", ("k_scale", "v_scale")), ("qwen3", ("k_proj.output_scale", "v_proj.output_scale"))],
)
def test_a_calibrated_model_equals_transformers_over_an_fp8_cache(tiny, calibrated, variant, spelling):
    tokens = text(4, sum(CUT))
    with torch.inference_mode():
        expected = oracle(tiny(variant))(torch.tensor([tokens]), past_key_values=Rounding()).logits[0]
    directory = calibrated(variant, spelling)
    found = ours(directory, {**CANDIDATES, **CACHED["fp8"]}, tokens)
    plain = ours(directory, CANDIDATES, tokens)  # ignores the scales
    assert (found - expected).abs().mean() < CLOSE
    assert (plain - expected).abs().mean() > 5 * CLOSE


def test_scales_in_llm_compressors_shapes_are_the_same(calibrated, tmp_path):
    """One number has shape [1], one a head [K, 1, 1]; scales of queries and zero points may lie beside them."""
    tokens, directory = text(4, sum(CUT)), calibrated("llama", ("k_scale", "v_scale"))
    candidates = {**CANDIDATES, **CACHED["fp8"]}
    want = ours(directory, candidates, tokens)
    held = load_file(directory / "model.safetensors")
    for name in [each for each in held if each.endswith(("k_scale", "v_scale"))]:
        scale = held[name]
        held[name] = scale.view(-1, 1, 1) if scale.numel() > 1 else scale.view(1)
        held[name.replace("scale", "zero_point")] = torch.zeros_like(held[name]).to(torch.float8_e4m3fn)
        held[name.replace("_scale", "_other").replace("k_other", "q_scale").replace("v_other", "q_scale")] = held[
            name
        ].clone()
    save_file(held, directory / "model.safetensors")
    assert ours(directory, candidates, tokens).equal(want)
    assert not ours(directory, CANDIDATES, tokens).equal(want)


def test_a_cache_with_zero_points_is_refused():
    scheme = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor"}
    table = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    with pytest.raises(CheckpointError, match="kv_cache_scheme: zero points"):
        read_format({"quantization_config": table})
