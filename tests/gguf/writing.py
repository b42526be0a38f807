"""Write checkpoints as GGUF with the gguf package, as llama.cpp's converter writes them.

The package supplies names, keys, layout and quantization. What the converter does to weights is done here: it
interleaves the rows of q and k of Llama and Granite, adds 1 to Gemma's norms, and computes rotary factors.
"""

from __future__ import annotations

import json
import math
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from safetensors.torch import load_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Vocabulary = Callable[[gguf.GGUFWriter], None]

# GGUF's architecture by model_type
ARCHITECTURES = MappingProxyType(
    {
        "gemma3_text": "gemma3",
        "gpt_oss": "gpt-oss",
        "granitemoeshared": "granitemoe",
        "mistral": "llama",
        "mixtral": "llama",
        "qwen2_moe": "qwen2moe",
        "qwen3_moe": "qwen3moe",
    }
)
# Parts of an expert's network, by their names in Mixtral
MIXTRAL = MappingProxyType({"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})
TYPES = gguf.GGMLQuantizationType
# The places of a block's float16 scales
SCALES = MappingProxyType(
    {
        TYPES.Q2_K: (80, 82),
        TYPES.Q3_K: (108,),
        TYPES.Q4_K: (0, 2),
        TYPES.Q5_K: (0, 2),
        TYPES.Q6_K: (208,),
        TYPES.IQ4_NL: (0,),
        TYPES.IQ4_XS: (0,),
        **dict.fromkeys((TYPES.Q4_0, TYPES.Q5_0, TYPES.Q8_0), (0,)),
        **dict.fromkeys((TYPES.Q4_1, TYPES.Q5_1), (0, 2)),
    }
)
# The types that the package cannot quantize to: random blocks stand for them
DRAWN = (TYPES.Q2_K, TYPES.Q3_K, TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K, TYPES.IQ4_NL, TYPES.IQ4_XS)


def write(
    checkpoint: Path,
    path: Path,
    kind: TYPES = TYPES.F32,
    *,
    vocabulary: Vocabulary | None = None,
    parts: int = 1,
    keys: dict[str, int | float | str] | None = None,
    others: Mapping[str, TYPES] = MappingProxyType({}),
) -> Path:
    """Write a checkpoint of transformers as GGUF; return the path of the first part.

    kind        type of the matrices that `kind` can store; others and vectors are F32
    vocabulary  writes the tokenizer's keys
    parts       number of files
    keys        further keys
    others      types of the matrices of some modules
    """
    config = json.loads((checkpoint / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    weights = {key: tensor.float().numpy() for key, tensor in load_file(checkpoint / "model.safetensors").items()}
    tensors = stored(name, config, weights, kind, others)
    writer = gguf.GGUFWriter(
        path, name, split_max_tensors=math.ceil(len(tensors) / parts) if parts > 1 else 0, use_temp_file=False
    )
    describe(writer, config)
    for key, value in (keys or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    if vocabulary is not None:
        vocabulary(writer)
    for key, (content, kind_of) in tensors.items():
        writer.add_tensor(key, content, raw_dtype=kind_of)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def stored(
    name: str,
    config: dict[str, Any],
    weights: dict[str, Array],
    default: TYPES,
    others: Mapping[str, TYPES] = MappingProxyType({}),
) -> dict[str, tuple[Array, TYPES]]:
    """Return the tensors to write, and their types, by GGUF's names."""
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found = {}
    for key, weight in merged(weights).items():
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert target is not None, key
        module = key.split(".")[-2]
        kind = others.get(module, default) if key.endswith(".weight") and ".router." not in key else TYPES.F32
        if name in ("llama", "granite", "granitemoe") and module in heads:
            found[target] = quantized(interleaved(weight, heads[module]), kind)
        elif name.startswith("gemma") and key.endswith("norm.weight"):
            found[target] = quantized(weight + 1, kind)
        else:
            found[target] = quantized(weight, kind)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(rope, config["head_dim"]), TYPES.F32
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            found[f"rope_factors_{length}.weight"] = factors, TYPES.F32
    return found


def merged(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights with those of experts as llama.cpp's converter stacks them: gate, up and down apart."""
    found: dict[str, Any] = {}
    for key, weight in weights.items():
        if single := re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.\d+\.(\w+)\.weight", key):
            module = MIXTRAL.get(single[2], single[2])
            found.setdefault(f"{single[1]}.mlp.experts.{module}.weight", []).append(weight)
        elif stacked := re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias)?", key):  # gpt-oss
            rows = weight if stacked[3] else weight.swapaxes(1, 2)
            ending = "bias" if stacked[3] else "weight"
            parts = {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if stacked[2] == "gate_up" else {"down": rows}
            found |= {f"{stacked[1]}.{part}_proj.{ending}": each for part, each in parts.items()}
        elif both := re.fullmatch(r"(.*)\.(?:block_sparse_moe|(shared_mlp))\.input_linear\.weight", key):  # Granite
            network = "mlp.shared_expert" if both[2] else "mlp.experts"
            gate, up = np.split(weight, 2, axis=-2)
            found |= {f"{both[1]}.{network}.gate_proj.weight": gate, f"{both[1]}.{network}.up_proj.weight": up}
        elif key.endswith(".block_sparse_moe.output_linear.weight"):
            found[key.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")] = weight
        elif key.endswith(".sinks"):
            found[f"{key}.weight"] = weight
        else:
            found[key] = weight
    return {key: np.stack(each) if isinstance(each, list) else each for key, each in found.items()}


def interleaved(tensor: Array, heads: int) -> Array:
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def quantized(tensor: Array, kind: TYPES) -> tuple[Array, TYPES]:
    elements, _ = gguf.GGML_QUANT_SIZES[kind]
    if tensor.ndim < 2 or tensor.shape[-1] % elements:
        return np.ascontiguousarray(tensor, dtype=np.float32), TYPES.F32
    if kind not in DRAWN:
        return gguf.quantize(np.ascontiguousarray(tensor), kind), kind
    return random_blocks(kind, tensor.shape, seed=tensor.size), kind


def random_blocks(kind: TYPES, shape: tuple[int, ...], seed: int, size: float = 2e-4) -> Array:
    """Return a matrix of random blocks whose float16 scales are finite numbers of both signs, of about `size`."""
    elements, width = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (math.prod(shape) // elements, width), dtype=np.uint8)
    for place in SCALES.get(kind, ()):
        scales = generator.normal(0, size, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], shape[-1] // elements * width)


def llama3_factors(rope: dict[str, Any], head: int) -> Array:
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for pair in range(0, head, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (pair / head)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the keys of config.json that converters write."""
    rope = config.get("rope_parameters") or {}
    by_layer = rope.get("full_attention")
    if by_layer is not None:  # Gemma 3
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = by_layer
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    writer.add_key_length(head)
    writer.add_value_length(head)
    if count := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)
    match rope.get("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "longrope":
            original = config["original_max_position_embeddings"]
            stretch = config["max_position_embeddings"] / original
            amplitude = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
            writer.add_rope_scaling_attn_factors(amplitude)
            writer.add_rope_scaling_orig_ctx_len(original)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window_pattern(config["layer_types"].index("full_attention") + 1)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"].startswith("granite"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
