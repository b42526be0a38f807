"""The family experts in plain torch: the experts run one after the other, each on the rows of its tokens."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from infd.kernels.families.adapters import LowRank
from infd.kernels.families.experts import Routes
from infd.kernels.families.matrices import LEAST_ROWS
from infd.kernels.reference.lora import Lora

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.adapters import Groups
    from infd.kernels.families.experts import ExpertChanges
    from infd.kernels.recipe import ExpertsRecipe, RouterRecipe, StackRecipe
    from infd.kernels.router import Gating, Router


class Experts:
    """Implements families.experts.Experts."""

    def route(self, x: Tensor, router: RouterRecipe) -> Routes:
        logits = F.linear(_padded(x).float(), router.weight, router.bias)[: len(x)]
        return choose(logits, router.design, router.correction)

    def compute(self, x: Tensor, routes: Routes, layer: ExpertsRecipe, changes: ExpertChanges | None = None) -> Tensor:
        count, chosen = routes.experts.shape
        on_input = layer.router.design.on_input
        expert_of = routes.experts.flatten()
        by_expert = expert_of.argsort(stable=True)
        counts = expert_of.bincount(minlength=layer.router.design.experts).tolist()
        outputs = x.new_empty(count * chosen, x.shape[1], dtype=torch.float32)
        for expert, places in enumerate(by_expert.split(counts)):
            if len(places) == 0:
                continue
            tokens = places // chosen
            rows = x[tokens]
            if on_input:
                rows = (rows * routes.weights.flatten()[places, None]).to(x.dtype)
            rows = _padded(rows)
            both = _multiply(layer.gate_up, expert, rows)
            if changes is not None:
                _change(both, rows, expert, tokens, changes.gate_up)
            hidden = gate(both, layer.gating)
            output = _multiply(layer.down, expert, hidden, wide=True)
            if changes is not None:
                _change(output, hidden, expert, tokens, changes.down)
            outputs[places] = output[: len(tokens)].float()
        weighted = outputs.view(count, chosen, -1)
        if not on_input:
            weighted = weighted * routes.weights[..., None]
        total = weighted[:, 0]
        for slot in range(1, chosen):
            total = total + weighted[:, slot]
        return total.to(x.dtype)

    def add_shared(self, y: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
        if gate is None:
            return y + shared
        return (y.float() + shared.float() * gate.float().sigmoid()).to(y.dtype)


def choose(logits: Tensor, router: Router, correction: Tensor | None) -> Routes:
    """Return the routes of tokens with these logits, [T, E] float32. correction: [E] float32."""
    if router.scores == "margin":
        return _choose_by_margin(logits, router)
    scores = logits
    if router.scores == "sigmoid":
        scores = logits.sigmoid()
    elif router.scores == "softmax":
        scores = logits.softmax(-1)
    ranked = logits
    if correction is not None or router.groups > 1:
        ranked = scores if correction is None else scores + correction
    if router.groups > 1:
        groups = ranked.unflatten(1, (router.groups, -1))
        best = _largest(groups.topk(min(2, groups.shape[2])).values.sum(-1), router.chosen_groups)
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        ranked = groups.masked_fill(~kept[..., None], -inf).flatten(1)
    experts = _largest(ranked, router.chosen)
    weights = scores.gather(1, experts)
    if router.scores == "chosen":
        weights = weights.softmax(-1)
    if router.least_sum is not None:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=router.least_sum)
    return Routes(experts, weights * router.scale)


def _choose_by_margin(logits: Tensor, router: Router) -> Routes:
    """Source: Liu et al. 2024, GRIN; Phi-MoE's reference code."""
    left, experts, weights = logits, [], []
    for _ in range(router.chosen):
        expert = _largest(left, 1)
        most = left.gather(1, expert)
        far = (most - logits) / torch.maximum(logits.abs(), most) > router.margin
        weights.append(left.masked_fill(far, -inf).softmax(-1).gather(1, expert))
        experts.append(expert)
        left = left.scatter(1, expert, -inf)
    return Routes(torch.cat(experts, 1), torch.cat(weights, 1) * router.scale)


def _largest(x: Tensor, count: int) -> Tensor:
    """Return the indices [T, count] of each row's largest elements, in descending order; of equals the first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def gate(gate_up: Tensor, gating: Gating) -> Tensor:
    """Return the gated activation [n, I] of gate_up [n, 2 I]."""
    gated, up = gate_up.chunk(2, -1)
    if gating.limit != inf:
        gated, up = gated.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    if gating.activation == "silu":
        activated = F.silu(gated) if gating.alpha == 1 else gated * (gated * gating.alpha).sigmoid()
    else:
        activated = F.gelu(gated, approximate="tanh")
    return activated * (up + gating.offset if gating.offset else up)


def _change(y: Tensor, x: Tensor, expert: int, tokens: Tensor, groups: Groups) -> None:
    """Add the low-rank products of an expert's rows x, which are those of `tokens`, to y, in place."""
    found = []
    for members, low in groups:
        rows = torch.isin(tokens, members).nonzero().flatten()
        if len(rows):
            parts = [part._replace(b=part.b[expert]) for part in low.parts]
            found.append((rows, LowRank(low.a[expert], parts)))
    Lora().add(y, x, found)


def _multiply(stack: StackRecipe, expert: int, x: Tensor, *, wide: bool = False) -> Tensor:
    bias = None if stack.bias is None else stack.bias[expert]
    return stack.form.multiply(x, stack.storage[expert], bias, wide=wide)


def _padded(x: Tensor) -> Tensor:
    """Return x [n, in], padded with zeros to LEAST_ROWS rows: from there on a row's product does not depend on n."""
    return F.pad(x, (0, 0, 0, LEAST_ROWS - len(x))) if len(x) < LEAST_ROWS else x
