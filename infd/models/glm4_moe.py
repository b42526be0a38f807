"""GLM-4.5 and GLM-4.6: Llama with partial rope and optional query and key norms, then experts beside shared ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.router import Router
from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, HeadNorms, LayerIndex
from infd.models.layers.experts import ExpertsDesign
from infd.models.layers.norm import RMSNorm
from infd.models.mixture import Mixture, experts

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Glm4Moe(Decoder):
    """The decoder of Glm4MoeForCausalLM. Layers after `num_hidden_layers`, which draft tokens, are not read."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        normed, bias = settings.boolean("use_qk_norm", False), settings.boolean("attention_bias", False)
        inner = settings.integer("moe_intermediate_size")

        rope = blueprint.rope(rope_parameters(settings), dims.head, partial=True)
        design = AttentionDesign(rope, qkv_bias=bias)
        mixture = Mixture(
            design=ExpertsDesign(_router(settings), inner, correction="gate.e_score_correction_bias"),
            sparse=range(settings.integer("first_k_dense_replace", least=0), dims.layers),
            shared=("shared_experts", inner * settings.integer("n_shared_experts", 1)),
        )

        def block(name: str, index: LayerIndex) -> Block:
            def norm(part: str, size: int = dims.hidden) -> RMSNorm:
                return RMSNorm(blueprint, f"{name}.{part}", size, dims.norm_eps)

            norms = (
                HeadNorms(norm("self_attn.q_norm", dims.head), norm("self_attn.k_norm", dims.head)) if normed else None
            )
            return Block(
                input_norm=norm("input_layernorm"),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index, norms),
                post_norm=norm("post_attention_layernorm"),
                mlp=mixture.network(blueprint, f"{name}.mlp", dims, index.layer),
            )

        super().__init__(blueprint, dims, [None] * dims.layers, block)
        further = f".layers.{dims.layers}."
        self.unread |= {name for name in blueprint.stored if further in name}


def _router(settings: Settings) -> Router:
    count, groups = experts(settings), settings.integer("n_group", 1, most=1024)
    if count % groups:
        raise settings.error("n_group", f"a divisor of the number of experts ({count})", groups)
    kept = settings.integer("topk_group", 1, most=groups)
    return Router(
        experts=count,
        chosen=settings.integer("num_experts_per_tok", most=min(64, count // groups * kept)),
        scores="sigmoid",
        least_sum=1e-20 if settings.boolean("norm_topk_prob") else None,
        scale=settings.number("routed_scaling_factor", 1.0),
        groups=groups,
        chosen_groups=kept,
    )
