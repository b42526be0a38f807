"""Both spellings of config.json, and the refusal of each wrong value."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from infd.errors import CheckpointError
from infd.kernels.select import select
from infd.models import registry
from infd.models.config import architecture, context_length, head_size, is_bounded, stored_dtype
from infd.scheduler.layout import PageGroup, Regimes
from tests.kernels.paging import CPU

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
PHI = {"architectures": ["Phi3ForCausalLM"]}
GEMMA3 = {"architectures": ["Gemma3ForConditionalGeneration"], "num_key_value_heads": 2}
QWEN = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 4}


class Floats:
    """A tensor that the checkpoint stores unencoded."""

    inputs = None

    def packed(self):
        return None


def build(config, max_len=64, dtype=torch.float32, stored=()):
    tensors = {name: Floats() for name in stored}
    return registry.build(config, select(CPU, dtype), dtype=dtype, device=CPU, max_len=max_len, stored=tensors)


def shapes(model):
    return {source.name: source.shape for parameter in model.parameters for source in parameter.sources}


def test_an_unknown_architecture_is_refused_by_name_with_the_known_ones():
    with pytest.raises(CheckpointError, match=r"'T5Model' is not supported: .*; supported: .*Llama.*, Qwen3"):
        build({**LLAMA, "architectures": ["T5Model"]})


def test_the_registry_imports_neither_the_families_nor_torch():
    script = (
        "import sys, infd.models.registry; print([name for name in sys.modules if 'llama' in name or name == 'torch'])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_every_registered_class_exists():
    for name in registry.ARCHITECTURES:
        assert build({**LLAMA, "num_key_value_heads": 2, "architectures": [name]}).vocab_size == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": []}, "architectures is empty"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list of strings"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "8"}, "hidden_size: expected an integer between 1 and .*, found '8'"),
        ({"hidden_size": True}, "hidden_size: expected an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer between 1 and 4096"),
        ({"vocab_size": -1}, "vocab_size: expected an integer"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        ({"head_dim": 5}, "head_dim: expected an even number"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' or 'gelu_pytorch_tanh', found 'gelu'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false"),
        ({"rope_theta": -1.0}, "rope_theta: expected a positive number"),
        ({"rope_scaling": 2}, "rope_scaling: expected an object"),
        (
            {"rope_scaling": {"type": "magic"}},
            "rope type 'magic' is not supported; supported: default, dynamic, linear",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_theta": 1.0}, "rope_theta: expected more than 1"),
        ({"rope_parameters": {"full_attention": 4}}, "rope_parameters.full_attention: expected an object"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            r"rope_parameters\.partial_rotary_factor: expected 1, since",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, 2, 3]}},
            r"rope_scaling\.short_factor: expected a list of 2 positive",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, -2]}},
            r"rope_scaling\.short_factor: expected a list of 2 positive",
        ),
        (
            {**PHI, "partial_rotary_factor": 0.3},
            "partial_rotary_factor: expected an even share of the head's 4 numbers",
        ),
        ({**PHI, "partial_rotary_factor": 1.5}, "partial_rotary_factor: expected an even share"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected null"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "is_causal or use_bidirectional_attention: without"),
        ({**QWEN, "is_causal": False}, "is_causal or use_bidirectional_attention: without"),
        ({**GEMMA3, "text_config": 3}, "text_config: expected an object"),
        ({**GEMMA3, "text_config": {"hidden_size": 0}}, r"text_config\.hidden_size: expected an integer"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change, message):
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        build({**LLAMA, **change})


def test_a_parameter_has_no_storage_before_it_is_loaded():
    with pytest.raises(AttributeError):
        _ = build(LLAMA).parameters[0].tensor


def test_fused_weights_name_the_tensors_that_they_stack():
    model = build({**LLAMA, "num_key_value_heads": 1})
    (qkv,) = (p for p in model.parameters if p.sources[0].name == "model.layers.0.self_attn.q_proj.weight")
    assert qkv.shape == (16, 8)
    assert [(source.name.split(".")[-2], source.shape, source.row) for source in qkv.sources] == [
        ("q_proj", (8, 8), 0),
        ("k_proj", (4, 8), 8),
        ("v_proj", (4, 8), 12),
    ]


def test_a_tied_head_has_no_parameter_of_its_own():
    tied, untied = build({**LLAMA, "tie_word_embeddings": True}), build(LLAMA)
    assert "lm_head.weight" not in shapes(tied)
    assert tied.unread == {"lm_head.weight"}
    assert shapes(untied)["lm_head.weight"] == (10, 8)
    assert untied.unread == frozenset()


def test_both_spellings_of_the_type_are_read():
    assert stored_dtype({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert stored_dtype({"dtype": "float16", "torch_dtype": "float32"}) == "float16"
    assert stored_dtype({"torch_dtype": None}) is None


def test_architecture_and_context_length_are_read_without_building_the_model():
    assert context_length(LLAMA) == 64
    assert architecture(LLAMA) == "LlamaForCausalLM"


def test_yarn_stretches_a_length_that_was_published_unstretched():
    yarn = {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert context_length(yarn) == 256
    assert (
        context_length({**yarn, "rope_scaling": {**yarn["rope_scaling"], "original_max_position_embeddings": 8}}) == 64
    )
    assert context_length({**yarn, "rope_scaling": {"type": "linear", "factor": 4.0}}) == 64


def test_dynamic_rope_stretches_a_length_by_its_factor_and_no_length_is_beyond_it():
    dynamic = {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.5}}
    assert context_length(dynamic) == 160
    assert not is_bounded(dynamic)
    assert is_bounded(LLAMA)


def test_longrope_is_published_with_its_stretched_length():
    longrope = {"type": "longrope", "short_factor": [1, 1], "long_factor": [2, 2], "factor": 32.0}
    config = {**LLAMA, "rope_scaling": longrope, "original_max_position_embeddings": 16}
    assert context_length(config) == 64
    assert build(config, max_len=64).cache_layout(16).regimes == Regimes(outgrown=16)
    assert build(config, max_len=16).cache_layout(16).regimes == Regimes()


def test_a_vision_model_may_omit_most_of_its_text_config():
    text = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 7, "sliding_window": 512}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    model = build(config, max_len=context_length(config))
    assert (context_length(config), model.vocab_size) == (131_072, 262_208)
    assert shapes(model)["model.layers.0.self_attn.q_proj.weight"] == (8 * 256, 8)
    assert [(group.layers, group.window) for group in model.cache_layout(16).groups if group.window is None] == [
        ((5,), None)
    ]
    assert model.unread == {"lm_head.weight"}


@pytest.mark.parametrize("root", ["model.", "language_model.model.", "model.language_model.", ""])
def test_a_decoder_is_found_where_the_checkpoint_keeps_it(root):
    stored = {f"{root}embed_tokens.weight", "lm_head.weight"}
    names = shapes(build(LLAMA, stored=stored))
    assert stored < names.keys()
    assert f"{root}norm.weight" in names
    assert f"{root}layers.3.mlp.up_proj.weight" in names
    assert "language_model.lm_head.weight" in shapes(build(LLAMA, stored={"language_model.lm_head.weight"}))


def test_null_is_an_answer_where_silence_is_not():
    config = {**LLAMA, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}
    for stated, window in (({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 100}, 100)):
        assert build({**config, **stated}, max_len=8192).cache_layout(16).groups[0].window == window


def test_a_plain_model_keeps_all_tokens_in_one_group():
    layout = build(LLAMA).cache_layout(16)
    assert layout.groups == (PageGroup(layers=(0, 1, 2, 3), page_tokens=16),)


def test_a_page_slot_holds_keys_and_values_of_one_layer():
    k, v = build({**LLAMA, "num_key_value_heads": 1}, dtype=torch.bfloat16).page_tensors(16)
    assert (k.name, v.name) == ("k", "v")
    assert k.shape == v.shape == (1, 16, 4)
    assert k.bytes == 16 * 4 * 2


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"sliding_window": 8}, [((0, 1, 2, 3), None)]),
        ({"use_sliding_window": True, "sliding_window": 8}, [((0, 1, 2, 3), None)]),  # default: from layer 28 on
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, [((0, 1, 2), None), ((3,), 8)]),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, [((0, 1, 2, 3), 8)]),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [((1, 3), None), ((0, 2), 8)],
        ),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, [((0, 1, 2, 3), None)]),
    ],
)
def test_windows_make_groups_of_their_own_where_a_sequence_can_outgrow_them(settings, groups):
    layout = build({**QWEN, **settings}).cache_layout(4)
    assert [(group.layers, group.window) for group in layout.groups] == groups


def test_few_full_layers_are_not_padded_to_many_windowed_ones():
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 3 + ["sliding_attention"] * 2
    settings = {"use_sliding_window": True, "sliding_window": 8, "layer_types": types, "num_hidden_layers": len(types)}
    groups = build({**QWEN, **settings}).cache_layout(4).groups
    assert [(len(group.layers), group.window) for group in groups] == [(3, None), *[(3, 8)] * 5, (2, 8)]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(20))


def test_a_single_full_layer_does_not_make_a_group_of_every_other():
    types = ["full_attention"] + ["sliding_attention"] * 39
    settings = {"use_sliding_window": True, "sliding_window": 8, "layer_types": types, "num_hidden_layers": 40}
    groups = build({**QWEN, **settings}).cache_layout(4).groups
    assert [len(group.layers) for group in groups] == [1, *[5] * 7, 4]


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention", "full_attention", "full_attention", "mamba"]])
def test_layer_types_must_fit_the_model(types):
    with pytest.raises(CheckpointError, match="layer_types: expected 4 of full_attention, sliding_attention"):
        build({**QWEN, "use_sliding_window": True, "layer_types": types})


def test_mistral_keeps_a_window_in_every_layer():
    config = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    assert build(config).cache_layout(4).groups == (PageGroup(layers=(0, 1, 2, 3), page_tokens=4, window=8),)
    assert build({**config, "sliding_window": None}).cache_layout(4).groups[0].window is None


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"head_dim": 96, "hidden_size": 64, "num_attention_heads": 4}, 96),
        ({"hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"text_config": {"head_dim": 32}}, 32),
        ({"n_embd": 64}, None),
    ],
)
def test_the_size_of_a_head_is_known_before_kernels_are_chosen(settings, size):
    assert head_size({"architectures": ["LlamaForCausalLM"], **settings}) == size
