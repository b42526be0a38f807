"""Llama 4 (text): attention in chunks with rope, every few layers full attention without positions, and experts.

Of a multimodal Llama 4 only the text decoder is served; the weights of the vision tower are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.router import Router
from infd.models.config import Settings, rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, HeadNorms, LayerIndex
from infd.models.layers.experts import STACKED, ExpertsDesign
from infd.models.layers.norm import Constant, RMSNorm
from infd.models.mixture import Mixture, chosen, experts
from infd.scheduler.layout import Chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.models.blueprint import Blueprint

SIGHT = ("vision_model.", "model.vision_model.", "multi_modal_projector.", "model.multi_modal_projector.")
FULL, CHUNKED = "full_attention", "chunked_attention"


class Llama4(Decoder):
    """The decoder of Llama4ForCausalLM and of Llama4ForConditionalGeneration."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        sizes = Dimensions.read(settings)
        dims = Dimensions.read(settings.completed({}, {"intermediate_size": settings.integer("intermediate_size_mlp")}))
        bias = settings.boolean("attention_bias", False)
        rotated = _rotated(settings, dims.layers)
        router = Router(experts=experts(settings), chosen=chosen(settings), scores="sigmoid", on_input=True)

        rope = blueprint.rope(rope_parameters(settings), dims.head)
        none = blueprint.rope(
            Settings({"rope_type": "none", "partial_rotary_factor": 1.0, "rope_theta": 2.0}), dims.head
        )
        temperature = _temperature(settings, blueprint) if settings.boolean("attn_temperature_tuning") else None
        turned = AttentionDesign(rope, interleaved=True, qkv_bias=bias, output_bias=bias)
        unturned = turned._replace(rope=none, temperature=temperature)
        # Rotation keeps lengths, so norms before rope equal Llama 4's norms after rope.
        length = Constant(blueprint, dims.head, dims.norm_eps) if settings.boolean("use_qk_norm") else None
        mixture = Mixture(
            design=ExpertsDesign(router, sizes.inner, (STACKED._replace(turned=True),), gate="router"),
            sparse=_sparse(settings, dims.layers),
            shared=("shared_expert", sizes.inner),
        )

        def block(name: str, index: LayerIndex) -> Block:
            design = turned if rotated[index.layer] else unturned
            norms = HeadNorms(length, length) if length is not None and rotated[index.layer] else None
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index, norms),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=mixture.network(blueprint, f"{name}.feed_forward", dims, index.layer),
            )

        super().__init__(blueprint, dims, _ranges(settings, rotated), block)
        self.unread |= {name for name in blueprint.stored if name.startswith(SIGHT)}


def _rotated(settings: Settings, layers: int) -> Sequence[bool]:
    """Return which layers have rope. Raises CheckpointError."""
    interval = settings.integer("no_rope_layer_interval")
    usual = [(layer + 1) % interval != 0 for layer in range(layers)]
    if "no_rope_layers" not in settings:
        return usual
    stated = settings.integers("no_rope_layers")
    if stated and len(stated) != layers:
        raise settings.error("no_rope_layers", f"{layers} numbers", stated)
    return [each != 0 for each in stated] or usual


def _ranges(settings: Settings, rotated: Sequence[bool]) -> list[int | Chunk | None]:
    """Return by layer the chunks of attention; None: full attention. Raises CheckpointError."""
    types = [CHUNKED if each else FULL for each in rotated]
    if "layer_types" in settings:
        types = settings.strings("layer_types")
        if len(types) != len(rotated) or not set(types) <= {FULL, CHUNKED}:
            raise settings.error("layer_types", f"{len(rotated)} of {FULL}, {CHUNKED}", types)
    chunk = Chunk(settings.integer("attention_chunk_size"))
    return [chunk if kind == CHUNKED else None for kind in types]


def _sparse(settings: Settings, layers: int) -> Sequence[int]:
    if "moe_layers" in settings:
        return settings.integers("moe_layers")
    step = settings.integer("interleave_moe_layer_step")
    return range(step - 1, layers, step)


def _temperature(settings: Settings, blueprint: Blueprint) -> Tensor:
    """Return by position the factor of the queries of layers without rope.

    Source: Nakanishi 2025, Scalable-Softmax.
    """
    positions = torch.arange(blueprint.max_len, dtype=torch.float32)
    steps = torch.floor((positions + 1) / settings.number("floor_scale"))
    return (torch.log1p(steps) * settings.number("attn_scale") + 1).to(blueprint.device)
