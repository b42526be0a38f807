"""Mixtures of experts: a router chooses k of E experts, which are feed-forward networks, for each of T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.adapters import Groups
    from infd.kernels.recipe import ExpertsRecipe, RouterRecipe


class Routes(NamedTuple):
    """The experts of each token. A token's experts are distinct, in the order in which they were chosen.

    experts  [T, k] int64
    weights  [T, k] float32
    """

    experts: Tensor
    weights: Tensor


class ExpertChanges(NamedTuple):
    """The low-rank changes of the experts' matrices, by adapter; see Lora."""

    gate_up: Groups
    down: Groups


class Experts(Protocol):
    """Computes routers and experts. A token's results do not depend on the other tokens."""

    def route(self, x: Tensor, router: RouterRecipe) -> Routes:
        """Return the routes of tokens x [T, hidden]."""

    def compute(self, x: Tensor, routes: Routes, layer: ExpertsRecipe, changes: ExpertChanges | None = None) -> Tensor:
        """Return the weighted sums of the chosen experts' outputs, [T, hidden] in x's dtype.

        The sums are float32, in the order of `routes`. Rows without an adapter are bitwise unchanged by `changes`.
        """

    def add_shared(self, y: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
        """Return y + shared * sigmoid(gate), all [T, hidden], gate [T, 1]; without a gate y + shared. y may change."""
