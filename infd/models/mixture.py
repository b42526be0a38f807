"""Which layers of a decoder are mixtures of experts, and their feed-forward networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from infd.models.layers.experts import Experts, Shared
from infd.models.layers.linear import Linear
from infd.models.layers.mlp import GatedMLP

if TYPE_CHECKING:
    from collections.abc import Container

    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings
    from infd.models.dimensions import Dimensions
    from infd.models.layers.experts import ExpertsDesign

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class Mixture(Struct, frozen=True, kw_only=True):
    """The feed-forward networks of a decoder with experts.

    design       of the experts
    sparse       indices of the layers with experts; other layers have a network of the size in Dimensions
    shared       name and hidden size of the shared experts; None: none
    shared_gate  name of the gate of the shared experts; "": none
    bias         whether the networks without router have biases
    """

    design: ExpertsDesign
    sparse: Container[int]
    shared: tuple[str, int] | None = None
    shared_gate: str = ""
    bias: bool = False

    def network(self, blueprint: Blueprint, name: str, dims: Dimensions, layer: int) -> Experts | GatedMLP:
        """Build the network of a layer. name: prefix of the checkpoint's names."""
        if layer not in self.sparse:
            return GatedMLP(blueprint, name, dims, bias=self.bias)
        shared = None
        if self.shared is not None:
            part, inner = self.shared
            mlp = GatedMLP(blueprint, f"{name}.{part}", replace(dims, inner=inner), bias=self.bias)
            gate = Linear(blueprint, {f"{name}.{self.shared_gate}": 1}, dims.hidden) if self.shared_gate else None
            shared = Shared(mlp, gate)
        return Experts(blueprint, name, dims.hidden, self.design, shared)


MOST_EXPERTS: Final = 2**18  # in all layers together; published models have up to 2**15


def experts(settings: Settings) -> int:
    """Return the number of experts, under any of the names that configs have for it. Raises CheckpointError."""
    key = next((key for key in COUNTS if key in settings), COUNTS[0])
    layers = settings.integer("num_hidden_layers", most=2**12)
    # A blueprint has sources for each expert of each layer, before any tensor of the checkpoint is looked at.
    return settings.integer(key, most=min(2**15 - 1, MOST_EXPERTS // layers))


def chosen(settings: Settings, key: str = "num_experts_per_tok") -> int:
    """Return the number of experts that a token chooses. Raises CheckpointError."""
    return settings.integer(key, most=min(experts(settings), 64))


def every(settings: Settings, layers: int) -> frozenset[int]:
    """Return the layers with experts of a Qwen model: every `decoder_sparse_step`-th but those of `mlp_only_layers`.

    Raises CheckpointError.
    """
    step = settings.integer("decoder_sparse_step", 1)
    dense = settings.integers("mlp_only_layers") if "mlp_only_layers" in settings else []
    return frozenset(layer for layer in range(layers) if (layer + 1) % step == 0) - frozenset(dense)
