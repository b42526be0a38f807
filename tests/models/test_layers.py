"""Layers of a model, each against its counterpart in transformers."""

from __future__ import annotations

import pytest
import torch

from infd.errors import CheckpointError
from infd.kernels.select import select
from infd.models.blueprint import Blueprint
from infd.models.config import Settings, rope_parameters
from infd.models.gemma2 import embedding_scale
from infd.models.layers.rope import lay_out
from infd.scheduler.layout import Regimes
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.tiny import FAMILIES, VOCAB, oracle

LENGTH = 9000  # context length of the models below
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 50 for i in range(64)],
    "long_factor": [1 + i / 2 for i in range(64)],
}
SCALINGS = [
    {},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {**LLAMA3, "original_max_position_embeddings": 8192},
    {**YARN, "original_max_position_embeddings": 2048},
    {**YARN, "original_max_position_embeddings": 2048, "truncate": False, "beta_fast": 20, "beta_slow": 2.0},
    {**YARN, "original_max_position_embeddings": 2048, "attention_factor": 0.9},
    {**YARN, "original_max_position_embeddings": 2048, "mscale": 1.2, "mscale_all_dim": 0.7},
    {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.3},
    {**LONGROPE, "original_max_position_embeddings": 9000},
]


def theirs(scaling, theta, head, length, trained=LENGTH):
    """Return transformers' cosines and sines, [length, 2, R / 2], for a sequence of `length`."""
    return angles(fresh(scaling, head, trained, theta), torch.arange(length))


def fresh(scaling, head, trained, theta=10_000.0):
    """Return a new rotary module of transformers; dynamic modules keep the longest sequence seen as state."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    # The simplest family with partial rope; its config validates longrope only.
    config = Phi3Config(hidden_size=head, num_attention_heads=1, pad_token_id=0)
    config.max_position_embeddings = trained
    config.rope_parameters = {"rope_type": "default", "partial_rotary_factor": 1.0, **scaling, "rope_theta": theta}
    config.original_max_position_embeddings = scaling.get("original_max_position_embeddings", trained)
    return Phi3RotaryEmbedding(config)


def angles(module, positions):
    cos, sin = module(torch.zeros(1), positions[None])
    return torch.stack((cos[0], sin[0]), dim=1)[..., : cos.shape[-1] // 2]


def ours(settings, head, length, *, layers="full_attention", partial=False):
    """Return infd's table for sequences of up to `length`."""
    rope = declared(settings, head, length, layers=layers, partial=partial)
    lay_out([rope])
    return rope.table


def declared(settings, head, length, **options):
    layers = options.pop("layers", "full_attention")
    blueprint = Blueprint(ops=select(CPU, torch.float32), dtype=torch.float32, device=CPU, max_len=length)
    return blueprint.rope(rope_parameters(Settings(settings), layers), head, **options)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.get("rope_type", "default"))
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_angles_are_those_of_transformers_to_the_bit_at_every_position(scaling, theta):
    settings = {"rope_parameters": {**scaling, "rope_theta": theta}, "max_position_embeddings": LENGTH}
    assert ours(settings, 128, LENGTH).equal(theirs(scaling, theta, 128, LENGTH))


@pytest.mark.parametrize("factor", [0.5, 0.75, 1.0])
def test_a_part_of_a_head_has_frequencies_of_its_own(factor):
    scaling = {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": factor}
    table = ours({"rope_parameters": scaling}, 64, 50, partial=True)
    assert table.equal(theirs(scaling, 10_000.0, 64, 50))
    assert table.shape[-1] == factor * 32


@pytest.mark.parametrize(
    "stated", [{}, {"factor": 16.0}, {"attention_factor": 1.3}, {"short_mscale": 1.1, "long_mscale": 1.2}]
)
def test_longrope_has_short_angles_up_to_the_original_length_and_behind_them_long_ones_from_0_on(stated):
    scaling = {**LONGROPE, **stated, "original_max_position_embeddings": 4096}
    settings = {"rope_parameters": scaling, "max_position_embeddings": LENGTH}
    short, long = theirs(scaling, 10_000.0, 128, 4096), theirs(scaling, 10_000.0, 128, LENGTH)
    assert ours(settings, 128, LENGTH).equal(torch.cat((short, long)))
    assert ours(settings, 128, 4096).equal(short)
    assert not short.equal(long[:4096])


@pytest.mark.parametrize("outside", [True, False])
def test_the_original_length_is_beside_the_rope_parameters_or_among_them(outside):
    original = {"original_max_position_embeddings": 32}
    settings = {"max_position_embeddings": 64, **(original if outside else {})}
    scaling = {**LONGROPE, **({} if outside else original)}
    both = {**settings, "rope_scaling": {**scaling, "original_max_position_embeddings": 32 if not outside else 40}}
    for stated in ({**settings, "rope_scaling": scaling}, {**settings, "rope_parameters": scaling}, both):
        rope = declared(stated, 128, 64)
        assert rope.regimes == Regimes(outgrown=32)
    assert declared(settings, 128, 64).regimes == Regimes()


def test_layers_of_one_model_are_laid_out_alike():
    blueprint = Blueprint(ops=select(CPU, torch.float32), dtype=torch.float32, device=CPU, max_len=64)
    long = {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 48}, "max_position_embeddings": 64}
    ropes = [blueprint.rope(rope_parameters(Settings(settings)), 128) for settings in ({}, long)]
    assert lay_out(ropes) == Regimes(outgrown=48)
    plain = ours({}, 128, 64)
    assert ropes[0].table.equal(torch.cat((plain[:48], plain)))
    assert ropes[1].table.equal(ours(long, 128, 64))
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}
    ropes.append(blueprint.rope(rope_parameters(Settings(dynamic)), 128))
    with pytest.raises(CheckpointError, match="layers whose angles change at different lengths, or in different ways"):
        lay_out(ropes)


TRAINED, DYNAMIC = 32, {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.7])
@pytest.mark.parametrize("prompt", [1, 20, 31, 32, 33, 50, 63])
def test_dynamic_angles_are_those_of_a_prompt_and_then_single_tokens(prompt, factor):
    settings = {"rope_scaling": {**DYNAMIC, "factor": factor}, "max_position_embeddings": TRAINED}
    rope = declared(settings, 16, 64)
    lay_out([rope])
    positions = torch.arange(64)
    regime = rope.regimes.of(prompt, 64)
    assert regime == (prompt if prompt > TRAINED else 0)
    stepwise = fresh({**DYNAMIC, "factor": factor}, 16, TRAINED)
    want = [angles(stepwise, positions[:prompt]), *(angles(stepwise, positions[at, None]) for at in range(prompt, 64))]
    got = rope.angles(positions, torch.full((64,), regime))
    torch.testing.assert_close(got, torch.cat(want), rtol=0, atol=2e-5)  # a few float32 ulps at these positions
    assert got[:prompt].equal(want[0]) or prompt > TRAINED
    assert got[max(0, prompt - 1) :].equal(rope.table[max(0, prompt - 1) :])  # captured steps read the table only
    parts = [rope.angles(at, torch.full((len(at),), regime)) for at in positions.split(7)]
    assert got.equal(torch.cat(parts))


def test_dynamic_angles_are_plain_up_to_the_trained_length():
    settings = {"rope_scaling": DYNAMIC, "max_position_embeddings": TRAINED}
    assert ours(settings, 16, TRAINED).equal(ours({}, 16, TRAINED))
    assert declared(settings, 16, TRAINED).regimes == Regimes()
    assert declared(settings, 16, TRAINED + 1).regimes == Regimes(prompt_over=TRAINED)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_older_spelling_gives_the_same_angles(key):
    scaling = {key: "linear", "factor": 4.0, "partial_rotary_factor": 0.5}
    old = {"rope_theta": 500.0, "rope_scaling": {key: "linear", "factor": 4.0}, "partial_rotary_factor": 0.5}
    new = {"rope_parameters": {**scaling, "rope_theta": 500.0}}
    assert ours(old, 16, 32, partial=True).equal(ours(new, 16, 32, partial=True))


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_the_first_phi_files_call_longrope_by_other_names(kind):
    settings = {"original_max_position_embeddings": 4096, "max_position_embeddings": LENGTH}
    scaling = {**LONGROPE, "original_max_position_embeddings": 4096}
    old = ours({**settings, "rope_scaling": {**LONGROPE, "rope_type": None, "type": kind}}, 128, LENGTH)
    short, long = theirs(scaling, 10_000.0, 128, 4096), theirs(scaling, 10_000.0, 128, LENGTH)
    assert old.equal(torch.cat((short, long)))


def test_both_spellings_of_positions_behind_a_window_are_read():
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 500.0, "rope_local_base_freq": 20.0, "rope_scaling": scaling}
    new = {
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        }
    }
    for layers in ("full_attention", "sliding_attention"):
        assert ours(old, 16, 32, layers=layers).equal(ours(new, 16, 32, layers=layers))
    assert ours(old, 16, 32, layers="sliding_attention").equal(theirs({}, 20.0, 16, 32))


def test_a_config_without_rope_parameters_gets_the_default_angles():
    assert ours({}, 16, 32).equal(theirs({}, 10_000.0, 16, 32))


def test_gemma_scales_embeddings_by_the_root_rounded_to_the_dtype():
    assert embedding_scale(3072, torch.bfloat16) == 55.5
    assert embedding_scale(3072, torch.float32) == pytest.approx(3072**0.5)


@pytest.mark.parametrize("variant", [*FAMILIES, "llama-biases", "qwen3-windows", "gemma2", "olmo2", "glm4", "granite"])
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

        compute.recipe = lambda: None  # forces layer-by-layer computation
        return compute

    model._blocks = [watched(block) for block in model._blocks]
    driver = Driver(model)
    driver.step((driver.start(tokens.tolist()), 33))
    assert len(streams) == len(expected) > 0
    for ours, want in zip(streams, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


def test_a_window_frees_the_pages_behind_it_and_a_full_group_keeps_them(tiny):
    driver = Driver(load_model(tiny("qwen3-windows")), page_tokens=4)
    sequence = driver.start(list(range(1, 60)))
    driver.step((sequence, 40))
    for _ in range(18):
        driver.step((sequence, 1))
    full, window = (driver.held(sequence, group) for group in range(2))
    assert full == 15
    assert window <= 4  # pages of 4 tokens that overlap a window of 10
