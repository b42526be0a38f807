"""Models without a file in infd: transformers' code over infd's attention, cache and weights."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from infd.config import Config, ModelConfig
from infd.errors import CheckpointError
from infd.kernels.select import CACHED, CANDIDATES, quantized, select
from infd.models import registry
from infd.models.blueprint import Blueprint
from infd.quantize.schemes import SCHEMES, described, quantize
from infd.runner.arenas.arena import Arena
from infd.runner.start.resolve import candidates
from infd.runner.start.setup import set_up
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load, required_bytes
from tests.e2e.test_parity import Expected, generate, serving
from tests.kernels.paging import CPU
from tests.models.driving import MAX_LEN, Driver, Heap, load_model
from tests.models.foreign import FOREIGN, make
from tests.models.test_parity import (
    CLOSE,
    LENGTH,
    ForgetsTheOldestKey,
    Pair,
    WritesOneSlotLate,
    device,
    off,
    test_a_prompt_computed_at_once,
    test_a_prompt_computed_in_chunks,
    test_greedy_generation_equals_generate,
    test_one_token_at_a_time,
    test_other_sequences_in_the_batch_change_nothing,
    text,
)
from tests.weights.checkpoints import write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0, "short_mscale": 1.0, "long_mscale": 1.1}

# The parity tests of infd's own models, run over the `pair` below.
__all__ = [
    "device",
    "test_a_prompt_computed_at_once",
    "test_a_prompt_computed_in_chunks",
    "test_greedy_generation_equals_generate",
    "test_one_token_at_a_time",
    "test_other_sequences_in_the_batch_change_nothing",
]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function from a variant's name to its checkpoint's directory. Saves each checkpoint once."""
    return cache(lambda variant: make(variant, tmp_path_factory.mktemp(variant)))


@pytest.fixture(scope="module", params=sorted(FOREIGN))
def pair(request, foreign, device):
    return Pair(foreign(request.param), device=device)


def test_a_borrowed_model_may_keep_its_cache_in_int8(built, foreign):
    def compute(candidates):
        ops = select(CPU, torch.float32, candidates)
        driver = Driver(load_model(foreign("gpt-neox"), ops=ops), ops=ops, seed=3)
        sequence = driver.start(text(1))
        return torch.cat([driver.step((sequence, count))[0] for count in (20, 1, 20)])

    plain, small = compute(CANDIDATES), compute({**CANDIDATES, **CACHED["int8"]})
    assert 0 < (small - plain).abs().mean() < 0.05 * plain.std()


def blueprint(dtype=torch.float32, max_len=MAX_LEN):
    return Blueprint(ops=select(CPU, dtype), dtype=dtype, device=CPU, max_len=max_len)


def tiny_config(kind, **settings):
    """Return the config.json of a small model of type `kind`, as transformers writes it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    small = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50, **settings}
    config = AutoConfig.for_model(kind, **small).to_dict()
    return {**config, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}


def build(config, dtype=torch.float32, max_len=MAX_LEN, stored=frozenset()):
    return registry.build(config, select(CPU, dtype), dtype=dtype, device=CPU, max_len=max_len, stored=stored)


@pytest.mark.parametrize("variant", sorted(FOREIGN))
def test_infd_has_no_model_file_for_the_architectures_tested_here(foreign, variant):
    with Checkpoint(foreign(variant)) as checkpoint:
        assert checkpoint.config["architectures"][0] not in registry.ARCHITECTURES


def test_infds_own_models_do_without_transformers():
    script = """
import sys
from importlib import import_module
from infd.models import registry
for place in registry.ARCHITECTURES.values():
    import_module(place.partition(":")[0])
print("transformers" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_llama_computed_by_transformers_code_equals_infds_own(tiny):
    from infd.models.transformers.model import TransformersModel

    own = load_model(tiny("llama"))
    with Checkpoint(tiny("llama")) as checkpoint:
        borrowed = TransformersModel(checkpoint.config, blueprint())
        load(borrowed, checkpoint, Arena(required_bytes(borrowed), CPU, "weights"))
    assert borrowed.cache_layout(4) == own.cache_layout(4)
    assert borrowed.page_tensors(4) == own.page_tensors(4)
    assert borrowed.vocab_size == own.vocab_size
    results = []
    for model in (own, borrowed):
        driver = Driver(model)
        first, second = driver.start(text(1)), driver.start(text(2))
        driver.step((first, 20))
        results.append(torch.cat(driver.step((first, 21), (second, 7))))
    assert off(*results) < CLOSE


async def test_greedy_answers_through_the_engine_equal_generate(foreign):
    directory = foreign("vaultgemma")
    expected = Expected(directory)
    async with serving(directory, step_tokens=13, rows=7) as engine:
        expected.compare(await asyncio.gather(*(generate(engine, prompt) for prompt in expected.prompts)))
        assert engine.status().steps > sum(map(len, expected.prompts)) // 13


def test_a_model_on_transformers_code_requests_few_kernel_families(foreign):
    config = Config(model=ModelConfig(dtype="float32"))
    with Checkpoint(foreign("gpt-neox")) as checkpoint:
        setup = set_up(config, checkpoint, CPU, CPU, candidates(config))
    assert [row.family for row in setup.ops.selection] == ["attention", "draw", "linear", "rows", "vocabulary"]


@pytest.mark.parametrize("broken", [ForgetsTheOldestKey(), WritesOneSlotLate()])
def test_attention_is_infds(foreign, broken):
    pair = Pair(foreign("gpt-neox"), ops=select(CPU, torch.float32).replace(attention=broken))
    driver = pair.driver()
    sequence = driver.start(text(1))
    logits = torch.cat([driver.step((sequence, count))[0] for count in (20, 1, 20)])
    assert off(logits, pair.expect(text(1))) > CLOSE


# The survey: properties observed by running the code


@pytest.mark.parametrize(
    ("variant", "groups"),
    [
        ("cohere2-windows", [((1,), None), ((0,), 10), ((2,), 10)]),
        ("starcoder2-window", [((0, 1, 2), 9)]),
        ("smollm3", [((0, 1, 2), None)]),
    ],
)
def test_the_windows_that_layers_ask_for_become_page_groups(foreign, variant, groups):
    layout = load_model(foreign(variant)).cache_layout(4)
    assert [(group.layers, group.window) for group in layout.groups] == groups


def test_a_window_that_no_sequence_outgrows_is_none():
    config = tiny_config("starcoder2", sliding_window=32)
    assert build(config, max_len=33).cache_layout(4).groups[0].window == 32
    assert build(config, max_len=32).cache_layout(4).groups[0].window is None


def test_pages_have_the_shape_of_the_keys(foreign):
    k, v = load_model(foreign("minicpm3")).page_tensors(16)
    assert (k.name, k.shape) == ("k", (4, 16, 12))
    assert (v.name, v.shape) == ("v", (4, 16, 12))  # values of 6 numbers, padded


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mpt", {}, "position biases"),
        ("bloom", {}, "position biases"),
        ("falcon", {"alibi": True}, "position biases"),
        ("falcon", {"new_decoder_architecture": True}, "does not use transformers' attention interface"),
        ("gptj", {"rotary_dim": 4}, "does not use transformers' attention interface"),
        ("mamba", {}, "has a recurrent state"),
        ("roberta", {"is_decoder": True}, "positions start behind the padding token"),
        ("rwkv", {}, "has a recurrent state"),
        ("openai-gpt", {}, "2 of its 2 layers do not attend through"),
        ("stablelm", {}, "does not pass its forward"),
        ("bart", {"d_model": 16}, "encoder with a decoder"),
        ("bert", {}, "sees other tokens than all its own"),
        ("doge", {"num_key_value_heads": 1}, "layer 0 has a mask that transformers did not build"),
        ("diffllama", {}, "attends 4 times in 2 layers"),
        ("granite_swa", {"head_dim": 8, "num_key_value_heads": 1}, "'s_aux', which infd's attention does not support"),
        ("gemma4_text", {"head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 1}, "keys of different shapes"),
        ("phi4_multimodal", {}, r"reads more than text \(vision_config\)"),
        ("olmo", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("olmo", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1e4}, "'dynamic'"),
        ("olmo", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}}, "'longrope'"),
        (
            "modernbert-decoder",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "'dynamic'",
        ),
    ],
)
def test_an_unsupported_model_is_refused_with_the_reason(kind, settings, reason):
    with pytest.raises(CheckpointError, match=rf"is not supported: .*{reason}.*; supported: .*Llama"):
        build(tiny_config(kind, **settings))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["OursForCausalLM"]}, "has no decoder of this name"),
        ({"architectures": ["OursForCausalLM"], "auto_map": {"AutoModelForCausalLM": "ours.Ours"}}, "never runs"),
        ({"architectures": ["os"]}, "has no decoder of this name"),
        ({"model_type": "ours"}, "does not know model_type 'ours'"),
        ({"model_type": None}, "model_type is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer between 1 and 4096"),
        ({"hidden_size": "many"}, "transformers cannot read config.json"),
        ({"num_attention_heads": 0}, "transformers cannot build it"),
    ],
)
def test_a_config_that_fits_no_class_is_refused(change, reason):
    with pytest.raises(CheckpointError, match=reason):
        build({**tiny_config("olmo"), **change})


def test_code_in_the_repository_is_ignored_where_transformers_has_its_own():
    config = tiny_config("olmo")
    models = build(config), build({**config, "auto_map": {"AutoModelForCausalLM": "ours.Ours"}})
    names, found = ([source.name for each in model.parameters for source in each.sources] for model in models)
    assert names == found != []


@pytest.mark.parametrize(("how", "near"), [("int8", 0.03), ("int4", 0.3), ("fp8", 0.15), ("mxfp4", 0.5)])
def test_weights_are_quantized_while_loading_for_transformers_code(built, foreign, how, near):
    driver = Driver(load_model(foreign("gpt-neox")))
    want = driver.step((driver.start(text(1)), LENGTH))[0]
    ops = select(CPU, torch.bfloat16, quantized(how))
    driver = Driver(load_model(foreign("gpt-neox"), ops=ops, dtype=torch.bfloat16), ops=ops)
    found = driver.step((driver.start(text(1)), LENGTH))[0]
    assert 1e-3 < (found - want).norm() / want.norm() < near
    chosen = {row.family: row.chosen for row in ops.selection}
    assert chosen["linear"] == f"native {how}"


def test_integers_are_kept_for_transformers_code(built, foreign, tmp_path):
    """Linear layers are written by `infd quantize`'s own scheme int8."""
    tensors = load_file(foreign("gpt-neox") / "model.safetensors")
    plain, packed, scheme = {}, {}, SCHEMES["int8"]
    for name, tensor in tensors.items():
        if name.endswith("dense.weight"):
            stored = quantize(scheme, tensor)
            packed |= {name.removesuffix(".weight") + suffix: each for suffix, each in stored.items()}
            plain[name] = scheme.decoded(tensor, stored[".weight_scale"])
        else:
            plain[name] = packed[name] = tensor
    config = json.loads((foreign("gpt-neox") / "config.json").read_text())
    found = []
    for kind, held, method in (("plain", plain, None), ("packed", packed, described(scheme, []))):
        directory = tmp_path / kind
        directory.mkdir()
        save_file({name: each.contiguous() for name, each in held.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
        with Checkpoint(directory) as checkpoint:
            ops = select(CPU, torch.float32)
            parts = {"dtype": torch.float32, "device": CPU, "max_len": 256, "stored": checkpoint.tensors}
            model = registry.build(checkpoint.config, ops, **parts)
            told = load(model, checkpoint, Heap(CPU))
        driver = Driver(model, ops=ops)
        found.append(driver.step((driver.start(text(1)), LENGTH))[0])
    assert told.keys() == {"int8, a scale for each row, kept, inputs int8 by token"}
    assert 0 < (found[0] - found[1]).norm() < 0.02 * found[0].norm()  # activations are int8


def test_quantized_weights_are_decoded_for_transformers_code(foreign, tmp_path):
    """Quantized as bitsandbytes' int8."""
    tensors = load_file(foreign("gpt-neox") / "model.safetensors")
    plain, packed = {}, {}
    for name, tensor in tensors.items():
        if name.endswith("dense.weight"):
            scale = tensor.abs().amax(1)
            rows = (tensor / scale[:, None] * 127).round().to(torch.int8)
            packed |= {name: rows, name.replace("weight", "SCB"): scale}
            plain[name] = rows.float() * scale[:, None] * 7.874015718698502e-3
        else:
            plain[name] = packed[name] = tensor
    assert len(packed) > len(plain)
    config = json.loads((foreign("gpt-neox") / "config.json").read_text())
    found = []
    for kind, held, method in (("plain", plain, {}), ("packed", packed, {"quant_method": "bitsandbytes"})):
        directory = tmp_path / kind
        directory.mkdir()
        save_file(held, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": method or None}))
        driver = Driver(load_model(directory))
        found.append(driver.step((driver.start(text(1)), LENGTH))[0])
    assert found[0].equal(found[1])


def test_a_config_that_asks_for_more_outputs_gets_the_same_model(foreign):
    with Checkpoint(foreign("gpt-neox")) as checkpoint:
        config = {**checkpoint.config, "return_dict": False, "output_hidden_states": True, "use_cache": True}
        model = build(config)
        load(model, checkpoint, Arena(required_bytes(model), CPU, "weights"))
    driver, usual = Driver(model), Driver(load_model(foreign("gpt-neox")))
    results = [each.step((each.start(text(1)), LENGTH))[0] for each in (driver, usual)]
    assert off(*results) == 0


def test_padding_is_not_looked_for(foreign, caplog):
    """GPT-2 checks each step's tokens for padding, to warn; on a GPU that check would wait for the device."""
    from transformers.utils import logging

    driver = Driver(load_model(foreign("gpt2")))
    logging.warning_once.cache_clear()
    logging.enable_propagation()
    try:
        driver.step((driver.start([0, 0, 0, 0]), 4))
    finally:
        logging.disable_propagation()
    assert not caplog.records


# Weights


@pytest.mark.parametrize("variant", ["cohere2-windows", "flex-olmo"])
def test_every_weight_is_in_the_arena_once(foreign, variant):
    with Checkpoint(foreign(variant)) as checkpoint:
        model = build(checkpoint.config)
        arena = Arena(required_bytes(model), CPU, "weights")
        load(model, checkpoint, arena)
        stored = sorted(checkpoint.tensors)
    first = arena.content.data_ptr()
    held = {tensor.data_ptr(): tensor for part in (model._decoder, model._head) for tensor in part.parameters()}
    assert all(first <= address < first + arena.size for address in held)
    assert sorted(source.name for parameter in model.parameters for source in parameter.sources) == stored


def test_experts_are_read_one_by_one_into_one_tensor(foreign):
    model = load_model(foreign("flex-olmo"))
    joined = next(p for p in model.parameters if "experts.0.gate_proj" in p.sources[0].name)
    assert [source.name.split(".")[-3:-1] for source in joined.sources[:3]] == [
        ["0", "gate_proj"],
        ["0", "up_proj"],
        ["1", "gate_proj"],
    ]
    assert joined.shape == (5 * 2 * 24, 48)
    assert joined.sources[2].row == 2 * 24


def test_a_tensor_is_known_by_the_name_that_checkpoints_keep(foreign):
    model = load_model(foreign("gpt-neox"))
    names = {source.name for parameter in model.parameters for source in parameter.sources}
    assert "embed_out.weight" in names
    assert "lm_head.weight" not in names


def test_tied_weights_are_loaded_once_and_may_be_stored_twice(foreign):
    with Checkpoint(foreign("cohere2-windows")) as checkpoint:
        model = build(checkpoint.config)
        assert "lm_head.weight" not in checkpoint.tensors
    assert "lm_head.weight" in model.unread
    assert "model.embed_tokens.weight" not in model.unread


def test_names_without_the_heads_prefix_are_found_too(foreign):
    """GPT-2's published checkpoint stores its tensors without the prefix."""
    with Checkpoint(foreign("gpt2")) as checkpoint:
        names = [name.removeprefix("transformer.") for name in checkpoint.tensors]
        model = build(checkpoint.config, stored=names)
    assert {source.name for parameter in model.parameters for source in parameter.sources} == set(names)
    assert "lm_head.weight" in model.unread


def test_tied_weights_are_found_under_either_name(foreign):
    with Checkpoint(foreign("gpt2")) as checkpoint:
        names = {*checkpoint.tensors, "lm_head.weight"} - {"transformer.wte.weight"}
        model = build(checkpoint.config, stored=names)
    assert {source.name for parameter in model.parameters for source in parameter.sources} == names


def test_experts_that_are_stored_as_one_tensor_are_read_as_one(foreign):
    with Checkpoint(foreign("flex-olmo")) as checkpoint:
        joined = "model.layers.0.mlp.experts.gate_up_proj"
        model = build(checkpoint.config, stored={**checkpoint.tensors, joined: next(iter(checkpoint.tensors.values()))})
    (source,) = next(p.sources for p in model.parameters if p.sources[0].name == joined)
    assert source.shape == (5, 48, 48)


def test_tensors_that_transformers_ignores_are_ignored_and_others_refused():
    model = build(tiny_config("gpt_neox"))
    assert "gpt_neox.layers.0.attention.masked_bias" in model.unread
    assert "gpt_neox.layers.2.attention.dense.weight" not in model.unread


def test_a_missing_tensor_is_named(tmp_path):
    model = build(tiny_config("olmo", intermediate_size=24))
    with (
        Checkpoint(write(tmp_path, {"lm_head.weight": torch.zeros(50, 16)})) as checkpoint,
        pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight: missing, expected \[50, 16\]"),
    ):
        load(model, checkpoint, Arena(required_bytes(model), CPU, "weights"))


def test_bfloat16_stays_near_float32(foreign):
    model = load_model(foreign("olmo"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters} == {torch.bfloat16}
    driver = Driver(model)
    (ours,) = driver.step((driver.start(text(1)), LENGTH))
    theirs = Pair(foreign("olmo")).expect(text(1))
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_modules_computed_in_float32_stay_in_float32(dtype):
    """AFMoE's norms overflow in float16; transformers lists them as float32."""
    model = build(tiny_config("afmoe", head_dim=8, num_key_value_heads=1, num_experts=8), dtype=dtype)
    types = {source.name: parameter.dtype for parameter in model.parameters for source in parameter.sources}
    assert types["model.norm.weight"] is (torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)
    assert types["model.embed_tokens.weight"] is dtype
