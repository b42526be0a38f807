"""How tokens choose experts, and how an expert gates: a mixture as data, for models and kernels."""

from __future__ import annotations

from math import inf
from typing import Literal

from msgspec import Struct


class Router(Struct, frozen=True, kw_only=True):
    """How a token chooses experts, and their weights, from one logit for each expert. All arithmetic is float32.

    A token chooses the experts with the largest logits or, if there is a correction bias or there are several groups,
    with the largest sums of score and correction. Of equal experts the first is chosen.

    experts        number of experts
    chosen         number of experts that a token chooses
    scores         "softmax" of all logits; "chosen": softmax of the chosen experts' logits; "sigmoid" of each logit;
                   "margin": for each choice in turn, softmax of the logits of experts not chosen yet, see `margin`
    least_sum      weights are scores divided by their sum, or by least_sum if that is larger; None: not divided
    scale          multiplies the weights
    groups         experts form groups of consecutive experts; only experts of `chosen_groups` groups are chosen: those
                   with the largest sum of their two best experts
    margin         with "margin", an expert counts if (largest logit - logit) / max(|logit|, largest logit) is at most
                   this (Phi-MoE's sparse mixer)
    on_input       weights multiply the experts' inputs, not their outputs (Llama 4)
    """

    experts: int
    chosen: int
    scores: Literal["softmax", "chosen", "sigmoid", "margin"] = "softmax"
    least_sum: float | None = None
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    margin: float = 0.0
    on_input: bool = False


class Gating(Struct, frozen=True, kw_only=True):
    """The gated activation of an expert: activation(gate) * (up + offset).

    activation  "silu": gate * sigmoid(alpha * gate); "gelu_pytorch_tanh"
    limit       upper bound of gate, and bound of up's magnitude
    """

    activation: str = "silu"
    alpha: float = 1.0
    limit: float = inf
    offset: float = 0.0
