"""The parts of a model, each against the part of transformers that it stands for."""

from __future__ import annotations

import pytest
import torch

from infd.models.config import Settings
from infd.models.layers.rope import rope_table
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.tiny import FAMILIES, VOCAB, oracle

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def theirs(scaling, theta, head, length):
    """Return transformers' cosines and sines, [length, 2, head / 2]."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    config = LlamaConfig(head_dim=head, rope_parameters=parameters, max_position_embeddings=length)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    return torch.stack((cos[0], sin[0]), dim=1)[..., : head // 2]


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_angles_are_those_of_transformers_to_the_bit_at_every_position(scaling, theta):
    new = Settings({"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta}})
    assert rope_table(new, 128, 9000, CPU).equal(theirs(scaling, theta, 128, 9000))


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_older_spelling_gives_the_same_angles(key):
    scaling = {key: "linear", "factor": 4.0}
    old = rope_table(Settings({"rope_theta": 500.0, "rope_scaling": scaling}), 16, 32, CPU)
    new = rope_table(Settings({"rope_parameters": {**scaling, "rope_theta": 500.0}}), 16, 32, CPU)
    assert old.equal(new)


def test_a_config_that_says_nothing_of_rope_gets_the_usual_angles():
    assert rope_table(Settings({}), 16, 32, CPU).equal(theirs(None, 10_000.0, 16, 32))


@pytest.mark.parametrize("variant", [*FAMILIES, "llama-biases", "qwen3-windows"])
def test_the_residual_stream_agrees_after_every_layer(tiny, variant):
    tokens = torch.randint(VOCAB, (33,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        reference = oracle(tiny(variant))
        expected = []
        for layer in reference.model.layers:
            layer.register_forward_hook(lambda module, inputs, output: expected.append(output[0]))
        reference(tokens[None])

    model = load_model(tiny(variant))
    streams = []

    def watched(block):
        def compute(x, residual, batch):
            x, residual = block(x, residual, batch)
            streams.append(x + residual)
            return x, residual

        return compute

    model._blocks = [watched(block) for block in model._blocks]
    driver = Driver(model)
    driver.step((driver.start(tokens.tolist()), 33))
    assert len(streams) == len(expected) > 0
    for ours, want in zip(streams, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


def test_a_window_frees_the_pages_behind_it_and_a_full_group_keeps_them(tiny):
    driver = Driver(load_model(tiny("qwen3-windows")), page_tokens=4)
    told = driver.start(list(range(1, 60)))
    driver.step((told, 40))
    for _ in range(18):
        driver.step((told, 1))
    full, window = (driver.held(told, group) for group in range(2))
    assert full == 15
    assert window <= 4  # 10 tokens, anywhere on 4-token pages
