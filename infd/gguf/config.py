"""Translate a GGUF file's metadata to config.json, and its tensors' names to transformers' names.

A file contains the settings that differ between models of an architecture. ARCHITECTURES contains the settings
that all models of an architecture share.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.errors import CheckpointError
from infd.gguf.file import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infd.gguf.file import Checkpoint, Part, Tensor

MOST_LAYERS: Final = 4096
_LAYER: Final = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_OUTSIDE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FREQUENCIES: Final = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_ROPE_TENSORS: Final = (_FREQUENCIES, _SHORT, _LONG)

_NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP: Final = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED_MLP: Final = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS: Final = {  # beneath the layer's feed-forward network; models/layers/experts.py APART
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
}
_SHARED_EXPERT: Final = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_ROWS: Final = ("ffn_gate_inp_shexp",)  # matrices of one row, which some converters write as vectors
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA: Final = {
    **_ATTENTION,
    **_MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Architecture(Struct, frozen=True, kw_only=True):
    """Names and settings that all GGUF files of an architecture share.

    name         of the model's class in transformers
    type         `model_type` in config.json
    modules      transformers' names of a layer's modules, by their names in GGUF
    parameters   transformers' names of a layer's tensors that belong to no module, by their modules' names in GGUF
    interleaved  whether rows of q and k are reordered: rows of each head's first and second half alternate
    norm_offset  number that GGUF's converter has added to the weights of norms
    settings     returns further settings of config.json
    """

    name: str
    type: str
    modules: Mapping[str, str]
    parameters: Mapping[str, str] = MappingProxyType({})
    interleaved: bool = False
    norm_offset: float = 0.0
    settings: Callable[[Keys], dict[str, Any]] = lambda keys: {}


class Keys:
    """The metadata under keys that begin with the architecture's name, and the tensors by name."""

    def __init__(self, file: Checkpoint, architecture: str) -> None:
        self._metadata = file.metadata
        self._prefix = f"{architecture}."
        self.tensors: dict[str, tuple[Part, Tensor]] = {
            tensor.name: (part, tensor) for part in file.parts for tensor in part.tensors
        }

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer. A list of one integer for each layer is accepted if all are equal."""
        layers = self._metadata.integer(f"{self._prefix}block_count")
        if layers > MOST_LAYERS:
            raise self.error("block_count", f"at most {MOST_LAYERS}", layers)
        if default is not None and key not in self:
            return default
        found = set(self._metadata.each(self._prefix + key, layers))
        if len(found) != 1:
            raise self.error(key, "the same number for all layers", sorted(found)[:8])
        return found.pop()

    def number(self, key: str, default: float | None = None) -> float:
        return self._metadata.number(self._prefix + key, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._metadata.text(self._prefix + key, default)

    def error(self, key: str, expected: str, found: object) -> CheckpointError:
        """Return the error for a wrong value of `key`."""
        return self._metadata.error(self._prefix + key, expected, found)

    @property
    def head(self) -> int:
        """Elements of an attention head."""
        size = self.integer("attention.key_length", self.integer("embedding_length") // self.heads)
        if size < 2:
            raise self.error("attention.key_length", "at least 2", size)
        return size

    @property
    def heads(self) -> int:
        if (heads := self.integer("attention.head_count")) < 1:
            raise self.error("attention.head_count", "at least 1", heads)
        return heads

    def factors(self, name: str) -> list[float]:
        """Return the numbers of a small tensor of rotary factors. Raises CheckpointError."""
        part, tensor = self.tensors[name]
        if tensor.kind != KINDS[0] or len(tensor.shape) != 1 or tensor.shape[0] > self.head:
            raise CheckpointError(
                f"{part.path}: {name}: expected up to {self.head} numbers of type F32, found {tensor.kind.name}"
                f" {list(tensor.shape)}"
            )
        content = bytearray(tensor.bytes)
        part.read(memoryview(content), tensor.offset)
        return list(memoryview(content).cast("f"))


def _biases(keys: Keys) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.tensors, "mlp_bias": "blk.0.ffn_up.bias" in keys.tensors}


def _granite(keys: Keys) -> dict[str, Any]:
    return {
        **_biases(keys),
        "attention_multiplier": keys.number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _partial(keys: Keys) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        "partial_rotary_factor": keys.integer("rope.dimension_count", keys.head) / keys.head,
    }


def _phi3(keys: Keys) -> dict[str, Any]:
    window = {"sliding_window": keys.integer("attention.sliding_window", 0) or None}
    return {**_partial(keys), **window}


def _gemma(layers_27b: int) -> Callable[[Keys], dict[str, Any]]:
    """Return the settings of Gemma 2 or 3. layers_27b: layers of the 27B model, which scales scores differently."""

    def settings(keys: Keys) -> dict[str, Any]:
        large = keys.integer("block_count") == layers_27b
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        return {
            "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": keys.integer("embedding_length") // keys.heads if large else keys.head,
            "sliding_window": keys.integer("attention.sliding_window"),
            **{cap: keys.number(cap) if cap in keys else None for cap in caps},
        }

    return settings


def _gemma3(keys: Keys) -> dict[str, Any]:
    return {
        **_gemma(62)(keys),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
    }


def _experts(router: str, network: str = "mlp") -> dict[str, str]:
    """Return the names of a layer's modules, with experts. router, network: names of these modules."""
    within = {**_EXPERTS, "ffn_gate_inp": router}
    return {**_NORMS, **_ATTENTION, **{name: f"{network}.{module}" for name, module in within.items()}}


def _inner(keys: Keys, name: str) -> int:
    """Return the number of inputs of a layer's down projection. Files do not always state it elsewhere."""
    if (found := keys.tensors.get(f"blk.0.{name}.weight")) is None:
        raise keys.error("expert_count", f"experts in layer 0: the file lacks blk.0.{name}.weight", "none")
    return found[1].shape[-1]


def _mixture(count: str, size: str, **constants: Any) -> Callable[[Keys], dict[str, Any]]:
    """Return the settings of a mixture of experts.

    count      config.json's name of the number of experts
    size       config.json's name of an expert's hidden size
    constants  settings that llama.cpp assumes for the architecture
    """

    def settings(keys: Keys) -> dict[str, Any]:
        return {
            **_biases(keys),
            count: keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            size: _inner(keys, "ffn_down_exps"),
            **constants,
        }

    return settings


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    mixture = _mixture("num_experts", "moe_intermediate_size", norm_topk_prob=False)(keys)
    return {**mixture, "shared_expert_intermediate_size": _inner(keys, "ffn_down_shexp")}


def _granite_moe(keys: Keys) -> dict[str, Any]:
    found = {**_granite(keys), **_mixture("num_local_experts", "intermediate_size")(keys)}
    if "blk.0.ffn_down_shexp.weight" in keys.tensors:
        found["shared_intermediate_size"] = _inner(keys, "ffn_down_shexp")
    return found


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    found = {
        **_mixture("num_local_experts", "intermediate_size")(keys),
        "sliding_window": keys.integer("attention.sliding_window"),
    }
    if (scaling := _scaling(keys).get("rope_scaling")) is not None:
        found["rope_scaling"] = {**scaling, "truncate": False}
    return found


# By general.architecture, of files with experts
MIXTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "gpt-oss": Architecture(
            name="GptOssForCausalLM",
            type="gpt_oss",
            modules={**_experts("router"), "post_attention_norm": "post_attention_layernorm"},
            parameters={"attn_sinks": "self_attn.sinks"},
            settings=_gpt_oss,
        ),
        "granitemoe": Architecture(
            name="GraniteMoeForCausalLM",
            type="granitemoe",
            modules={
                **_experts("router.layer", "block_sparse_moe"),
                "ffn_gate_shexp": "shared_mlp.gate_proj",
                "ffn_up_shexp": "shared_mlp.up_proj",
                "ffn_down_shexp": "shared_mlp.output_linear",
            },
            interleaved=True,
            settings=_granite_moe,
        ),
        "llama": Architecture(
            name="MixtralForCausalLM",
            type="mixtral",
            modules=_experts("gate", "block_sparse_moe"),
            interleaved=True,
            settings=_mixture("num_local_experts", "intermediate_size"),
        ),
        "olmoe": Architecture(
            name="OlmoeForCausalLM",
            type="olmoe",
            modules={**_experts("gate"), **_HEAD_NORMS},
            settings=_mixture("num_experts", "intermediate_size", norm_topk_prob=False),
        ),
        "qwen2moe": Architecture(
            name="Qwen2MoeForCausalLM",
            type="qwen2_moe",
            modules={**_experts("gate"), **_SHARED_EXPERT},
            settings=_qwen2_moe,
        ),
        "qwen3moe": Architecture(
            name="Qwen3MoeForCausalLM",
            type="qwen3_moe",
            modules={**_experts("gate"), **_HEAD_NORMS},
            settings=_mixture("num_experts", "moe_intermediate_size", norm_topk_prob=True),
        ),
    }
)

# By general.architecture, of other files
ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "gemma2": Architecture(
            name="Gemma2ForCausalLM", type="gemma2", modules=_GEMMA, norm_offset=1.0, settings=_gemma(46)
        ),
        "gemma3": Architecture(
            name="Gemma3ForCausalLM",
            type="gemma3_text",
            modules={**_GEMMA, **_HEAD_NORMS},
            norm_offset=1.0,
            settings=_gemma3,
        ),
        "glm4": Architecture(
            name="Glm4ForCausalLM",
            type="glm4",
            modules={
                **_NORMS,
                **_ATTENTION,
                **_FUSED_MLP,
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
            settings=_partial,
        ),
        "granite": Architecture(
            name="GraniteForCausalLM",
            type="granite",
            modules={**_NORMS, **_ATTENTION, **_MLP},
            interleaved=True,
            settings=_granite,
        ),
        "llama": Architecture(
            name="LlamaForCausalLM",
            type="llama",
            modules={**_NORMS, **_ATTENTION, **_MLP},
            interleaved=True,
            settings=_biases,
        ),
        "olmo2": Architecture(
            name="Olmo2ForCausalLM",
            type="olmo2",
            modules={
                **_ATTENTION,
                **_MLP,
                **_HEAD_NORMS,
                "post_attention_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            },
            settings=_biases,
        ),
        "phi3": Architecture(
            name="Phi3ForCausalLM",
            type="phi3",
            modules={**_NORMS, "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", **_FUSED_MLP},
            settings=_phi3,
        ),
        "qwen2": Architecture(name="Qwen2ForCausalLM", type="qwen2", modules={**_NORMS, **_ATTENTION, **_MLP}),
        "qwen3": Architecture(
            name="Qwen3ForCausalLM",
            type="qwen3",
            modules={**_NORMS, **_ATTENTION, **_MLP, **_HEAD_NORMS},
            settings=_biases,
        ),
    }
)


def architecture(file: Checkpoint) -> Architecture:
    """Return the entry of MIXTURES or ARCHITECTURES for a file. Raises CheckpointError."""
    name = file.metadata.text("general.architecture")
    experts = file.metadata.integer(f"{name}.expert_count", 0)
    table = MIXTURES if experts else ARCHITECTURES
    if (found := table.get(name)) is not None:
        return found
    if name in ARCHITECTURES:
        raise file.metadata.error(
            f"{name}.expert_count", f"0: with experts infd serves {', '.join(MIXTURES)} from GGUF", experts
        )
    known = ", ".join(sorted({*ARCHITECTURES, *MIXTURES}))
    raise file.metadata.error("general.architecture", f"one of {known}", name)


def read_config(file: Checkpoint) -> dict[str, Any]:
    """Return the content of config.json for a file. Raises CheckpointError."""
    found = architecture(file)
    keys = Keys(file, file.metadata.text("general.architecture"))
    if "token_embd.weight" not in keys.tensors:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing")
    embedding = keys.tensors["token_embd.weight"][1]
    types = {tensor.kind.name for _, tensor in keys.tensors.values() if len(tensor.shape) > 1}
    config = {
        "architectures": [found.name],
        "model_type": found.type,
        "dtype": {frozenset(("F32",)): "float32", frozenset(("F16",)): "float16"}.get(frozenset(types), "bfloat16"),
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", keys.heads),
        "head_dim": keys.head,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        **_scaling(keys),
        **found.settings(keys),
    }
    rotated = keys.integer("rope.dimension_count", keys.head)
    if rotated != keys.head and "partial_rotary_factor" not in config:
        raise keys.error("rope.dimension_count", f"{keys.head}, the size of a head", rotated)
    for role in ("bos", "eos"):
        if (key := f"tokenizer.ggml.{role}_token_id") in file.metadata:
            config[f"{role}_token_id"] = file.metadata.integer(key)
    return config


def _scaling(keys: Keys) -> dict[str, Any]:
    """Return `rope_scaling`, and the settings that belong to it."""
    length = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", length)
    if _LONG in keys.tensors and _SHORT in keys.tensors:
        scaling = {"short_factor": keys.factors(_SHORT), "long_factor": keys.factors(_LONG)}
        amplitude = keys.number("rope.scaling.attn_factor", 1.0)
        return {
            "rope_scaling": {"rope_type": "longrope", **scaling, "attention_factor": amplitude},
            "original_max_position_embeddings": original,
        }
    if _FREQUENCIES in keys.tensors:
        # Llama 3: a factor for each pair of dimensions, the same for all lengths
        factors = keys.factors(_FREQUENCIES)
        scaling = {"short_factor": factors, "long_factor": factors}
        return {"rope_scaling": {"rope_type": "longrope", **scaling, "attention_factor": 1.0}}
    match keys.text("rope.scaling.type", "none"):
        case "linear":
            return {"rope_scaling": {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}}
        case "yarn":
            factor = keys.number("rope.scaling.factor")
            yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if f"rope.scaling.{key}" in keys:
                    yarn[name] = keys.number(f"rope.scaling.{key}")
            return {"rope_scaling": yarn}
        case "none" | "longrope":
            factor = keys.number("rope.scale_linear", 1.0)  # key of files from 2023
            return {} if factor == 1 else {"rope_scaling": {"rope_type": "linear", "factor": factor}}
        case other:
            raise keys.error("rope.scaling.type", "none, linear, yarn or longrope", other)


class Renamed(Struct, frozen=True):
    """A tensor under transformers' name, and how its stored rows differ from transformers' rows.

    head    rows of a head, if the rows of its two halves alternate; 0: the rows are in order
    offset  number that GGUF's converter has added to each weight
    row     whether a vector is a matrix of one row
    """

    name: str
    head: int = 0
    offset: float = 0.0
    row: bool = False


def renamed(file: Checkpoint, config: Mapping[str, Any]) -> dict[str, Renamed]:
    """Return the new name of each tensor, by its name in the file. Tensors of rotary factors are omitted.

    config  content returned by `read_config`
    """
    found = architecture(file)
    names = (tensor.name for part in file.parts for tensor in part.tensors if tensor.name not in _ROPE_TENSORS)
    return {name: _renamed(name, found, config["head_dim"]) for name in names}


def _renamed(name: str, found: Architecture, head: int) -> Renamed:
    """Return the new name of one tensor. An unknown tensor keeps its name, so that loading refuses it by name."""
    module, _, ending = name.rpartition(".")
    if module in _OUTSIDE:
        return Renamed(f"{_OUTSIDE[module]}.{ending}", offset=found.norm_offset if module == "output_norm" else 0.0)
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in found.parameters:
        return Renamed(f"model.layers.{layer[1]}.{found.parameters[layer[2]]}")
    if layer is None or layer[2] not in found.modules:
        return Renamed(name)
    return Renamed(
        f"model.layers.{layer[1]}.{found.modules[layer[2]]}.{layer[3]}",
        head=head if found.interleaved and layer[2] in ("attn_q", "attn_k") else 0,
        offset=found.norm_offset if layer[2].endswith("norm") else 0.0,
        row=layer[2] in _ROWS,
    )
