"""Mixtures of experts: routes within models, disk layouts, and that other models do not load experts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from infd.kernels.reference import mxfp4
from infd.kernels.reference.experts import Experts
from infd.kernels.reference.int4 import grouped
from infd.kernels.select import select
from infd.weights.checkpoint import Checkpoint
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.models.test_parity import LENGTH, text
from tests.tiny import FURTHER, MIXTURES, oracle


class Recording(Experts):
    """Keeps the routes of every layer."""

    def __init__(self):
        self.routes = []

    def route(self, x, router):
        self.routes.append(super().route(x, router))
        return self.routes[-1]


def logits(directory, ops=None):
    driver = Driver(load_model(directory, ops=ops), ops=ops)
    return driver.step((driver.start(text(1)), LENGTH))[0]


def routes(module, logits, *chosen):
    """Return the weights and experts that a router of transformers chose; Llama 4's returns scores of all experts."""
    return chosen if len(chosen) == 2 else tuple(logits.topk(module.top_k))


@pytest.mark.parametrize("variant", sorted(set(MIXTURES) - FURTHER))
def test_routes_equal_the_router_indices_of_transformers(tiny, variant):
    theirs, expected = oracle(tiny(variant)), []
    for module in theirs.modules():
        if type(module).__name__.lower().endswith("router"):
            module.register_forward_hook(lambda module, _inputs, output: expected.append(routes(module, *output)))
    with torch.inference_mode():
        theirs(torch.tensor([text(1)]))
    recording = Recording()
    logits(tiny(variant), select(CPU, torch.float32).replace(experts=recording))
    assert len(recording.routes) == len(expected) > 1
    for found, (weights, experts) in zip(recording.routes, expected, strict=True):
        assert found.experts.sort(1).values.equal(experts.sort(1).values)
        order, own = found.experts.argsort(1), experts.argsort(1)
        torch.testing.assert_close(found.weights.gather(1, order), weights.gather(1, own), atol=1e-5, rtol=1e-4)


def test_a_dense_model_does_not_load_experts(tiny):
    ops = select(CPU, torch.float32)
    logits(tiny("llama"), ops)
    assert "experts" not in {row.family for row in ops.selection}


def rewritten(directory, to, change, config=None):
    """Save a checkpoint whose tensors `change` has changed in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    settings = json.loads((directory / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**settings, **(config or {})}))
    return to


def test_experts_stored_as_one_tensor_are_those_stored_one_by_one(tiny, tmp_path):
    def stack(tensors):
        for layer in (0, 2):
            name = f"model.layers.{layer}.mlp.experts"
            parts = {
                part: [tensors.pop(f"{name}.{expert}.{part}_proj.weight") for expert in range(8)]
                for part in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            tensors[f"{name}.gate_up_proj"], tensors[f"{name}.down_proj"] = (
                torch.stack(both),
                torch.stack(parts["down"]),
            )

    stacked = rewritten(tiny("qwen3-moe"), tmp_path, stack)
    assert logits(stacked).equal(logits(tiny("qwen3-moe")))


def test_experts_in_mxfp4_are_the_numbers_that_they_represent(tiny, tmp_path):
    """gpt-oss stores MXFP4 [experts, rows, inputs], floats [experts, inputs, rows]; gate and up alternate in both."""
    encoded, decoded = tmp_path / "encoded", tmp_path / "decoded"
    for directory in (encoded, decoded):
        directory.mkdir()

    def round_to_fp4(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            groups = grouped(tensors[name].transpose(1, 2).flatten(0, 1))
            exponents = mxfp4.exponents_of(groups)
            experts, inputs, rows = tensors[name].shape
            values = mxfp4.decoded(mxfp4.codes_of(groups, exponents), exponents).flatten(1)[:, :inputs]
            tensors[name] = values.view(experts, rows, inputs).transpose(1, 2)

    def encode(tensors):
        round_to_fp4(tensors)
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            rows = tensors.pop(name).transpose(1, 2)
            groups = grouped(rows.flatten(0, 1))
            exponents = mxfp4.exponents_of(groups)
            codes = mxfp4.codes_of(groups, exponents)
            shape = (*rows.shape[:2], -1)
            tensors[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).view(*shape, 16)
            tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8).view(shape)

    sizes = {"hidden_size": 64}
    from tests.tiny import make

    wide = make("gpt-oss", tmp_path / "wide", **sizes)
    quantization = {"quantization_config": {"quant_method": "mxfp4"}}
    whole = rewritten(wide, decoded, round_to_fp4)
    packed = rewritten(wide, encoded, encode, quantization)
    with Checkpoint(packed) as checkpoint:
        assert checkpoint.tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 64)
    reference = select(CPU, torch.float32)
    found, expected = logits(packed, reference.replace(packed=NoForms())), logits(whole)
    assert found.equal(expected)


class NoForms:
    """The family packed without forms, so that matrices are decoded."""

    def form(self, outputs, inputs, dtype, groups):
        return "decoded in this test"
