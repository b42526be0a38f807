"""Write a mixture of experts of a known shape as GGUF with random blocks, for speed measurements.

    python bench/mixture_gguf.py granite granite.q4_0.gguf --type Q4_0
    python bench/mixture_gguf.py olmoe olmoe.q4_0.gguf --type Q4_0

Shapes are those of bench/experts.py. Matrices are random blocks of the type, scaled so that a product's outputs have
the variance of its inputs; norms are ones, and routers float32, as llama.cpp's converter writes them. Tokens are
numbered words: bench/libraries.py sends token ids.
"""

from __future__ import annotations

import argparse
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from experts import COMMON, SHAPES

if TYPE_CHECKING:
    from collections.abc import Mapping

TYPES = gguf.GGMLQuantizationType
ARCHITECTURES = {"granite": "granitemoe", "olmoe": "olmoe"}
# Standard deviation of a block's numbers before its scale
DEVIATIONS = {TYPES.Q4_0: 16 / 12**0.5, TYPES.Q8_0: 256 / 12**0.5}


class Writer:
    """A GGUF file to which random matrices are added."""

    def __init__(self, path: Path, architecture: str, kind: TYPES) -> None:
        self.gguf = gguf.GGUFWriter(path, architecture)
        self._kind = kind
        self._drawn = np.random.default_rng(0)

    def matrix(self, name: str, *shape: int) -> None:
        """Add a matrix, or a stack of matrices, [..., outputs, inputs]."""
        size = shape[-1] ** -0.5
        if self._kind == TYPES.BF16:
            floats = self._drawn.standard_normal(shape, np.float32) * np.float32(size)
            stored = (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            elements, width = gguf.GGML_QUANT_SIZES[self._kind]
            blocks = self._drawn.integers(0, 256, (prod(shape) // elements, width), np.uint8)
            scale = np.array([size / DEVIATIONS[self._kind]], np.float16)
            blocks[:, :2] = scale.view(np.uint8)
            stored = blocks.reshape(*shape[:-1], shape[-1] // elements * width)
        self.gguf.add_tensor(f"{name}.weight", stored, raw_dtype=self._kind)

    def floats(self, name: str, *shape: int) -> None:
        """Add a norm of ones, or a random router."""
        content = np.ones(shape) if len(shape) == 1 else self._drawn.standard_normal(shape) * shape[-1] ** -0.5
        self.gguf.add_tensor(f"{name}.weight", content.astype(np.float32))

    def write(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def describe(writer: gguf.GGUFWriter, shape: Mapping[str, Any], experts: int) -> None:
    head = shape["hidden_size"] // shape["num_attention_heads"]
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(4096)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(COMMON["rms_norm_eps"])
    writer.add_rope_freq_base(COMMON["rope_theta"])
    writer.add_rope_dimension_count(head)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(shape["num_experts_per_tok"])
    if "num_local_experts" in shape:  # Granite
        writer.add_attention_scale(head**-0.5)
        writer.add_embedding_scale(1.0)
        writer.add_residual_scale(1.0)
        writer.add_logit_scale(1.0)
    size = shape["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["t", "0", "t0", *(f"t{number}" for number in range(3, size))])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])  # infd expects some
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def make(name: str, path: Path, kind: TYPES) -> None:
    shape = SHAPES[name]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    experts = shape.get("num_experts") or shape["num_local_experts"]
    writer = Writer(path, ARCHITECTURES[name], kind)
    describe(writer.gguf, shape, experts)
    writer.matrix("token_embd", shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            writer.floats(f"{block}.{norm}", hidden)
        if name == "olmoe":
            writer.floats(f"{block}.attn_q_norm", hidden)
            writer.floats(f"{block}.attn_k_norm", keys)
        for module, outputs in (("attn_q", hidden), ("attn_k", keys), ("attn_v", keys), ("attn_output", hidden)):
            writer.matrix(f"{block}.{module}", outputs, hidden)
        writer.floats(f"{block}.ffn_gate_inp", experts, hidden)
        writer.matrix(f"{block}.ffn_gate_exps", experts, inner, hidden)
        writer.matrix(f"{block}.ffn_up_exps", experts, inner, hidden)
        writer.matrix(f"{block}.ffn_down_exps", experts, hidden, inner)
    writer.floats("output_norm", hidden)
    if not shape["tie_word_embeddings"]:
        writer.matrix("output", shape["vocab_size"], hidden)
    writer.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    kinds = {kind.name: kind for kind in (TYPES.BF16, *DEVIATIONS)}
    parser.add_argument("--type", choices=kinds, default="Q4_0")
    arguments = parser.parse_args()
    make(arguments.shape, arguments.path, kinds[arguments.type])


if __name__ == "__main__":
    main()
