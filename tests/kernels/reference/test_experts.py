"""Routers against those of transformers, and the reference's experts against a loop over tokens."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch.nn import functional

from infd.kernels.families.experts import Routes
from infd.kernels.families.matrices import LEAST_ROWS
from infd.kernels.recipe import ExpertsRecipe, RouterRecipe, StackRecipe
from infd.kernels.reference.dense import Matrices
from infd.kernels.reference.experts import Experts, choose, gate
from infd.kernels.router import Gating, Router

HIDDEN, COUNT = 12, 8


def drawn(*shape: int, seed: int = 0, gain: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * gain


# By name: transformers' model type and class, settings, our router.
ROUTERS = {
    "mixtral": ("mixtral", "MixtralTopKRouter", {}, {"least_sum": 0.0}),
    "one": ("mixtral", "MixtralTopKRouter", {"num_experts_per_tok": 1}, {"least_sum": 0.0, "chosen": 1}),
    "olmoe": ("olmoe", "OlmoeTopKRouter", {}, {}),
    "olmoe-norm": ("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": True}, {"least_sum": 0.0}),
    "granite": ("granitemoe", "GraniteMoeTopKRouter", {}, {"scores": "chosen"}),
    "gpt-oss": ("gpt_oss", "GptOssTopKRouter", {}, {"scores": "chosen"}),
    "glm": ("glm4_moe", "Glm4MoeTopkRouter", {}, {"scores": "sigmoid", "least_sum": 1e-20}),
    "glm-groups": (
        "glm4_moe",
        "Glm4MoeTopkRouter",
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
        {"scores": "sigmoid", "groups": 2, "scale": 1.7},
    ),
    "glm-more-groups": (
        "glm4_moe",
        "Glm4MoeTopkRouter",
        {"n_group": 4, "topk_group": 2},
        {"scores": "sigmoid", "least_sum": 1e-20, "groups": 4, "chosen_groups": 2},
    ),
    "ernie": ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", {"moe_k": 3, "moe_norm_min": 0.6}, {"least_sum": 0.6}),
    "phimoe": (
        "phimoe",
        "PhimoeTopKRouter",
        {"router_jitter_noise": 0.2},
        {"scores": "margin", "margin": 0.4, "chosen": 2},
    ),
}


@pytest.mark.parametrize("bias", [0.0, -9.0], ids=["", "all logits negative"])
@pytest.mark.parametrize("name", ROUTERS)
def test_routes_equal_those_of_transformers(name, bias):
    from importlib import import_module

    from transformers import AutoConfig

    kind, attribute, settings, ours = ROUTERS[name]
    counts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), COUNT)
    settings = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, **counts, **settings}
    if kind == "ernie4_5_moe":
        del settings["num_experts_per_tok"], settings["num_experts"]
    config = AutoConfig.for_model(kind, **settings)
    router = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), attribute)(config).eval()
    correction = None
    with torch.no_grad():
        for number, (part, tensor) in enumerate((*router.named_parameters(), *router.named_buffers())):
            tensor.copy_(drawn(*tensor.shape, seed=number, gain=0.3 if "correction" in part else 1.0))
            correction = tensor.detach().view(-1) if "correction" in part else correction
        x = drawn(40, HIDDEN, seed=9)
        if bias:  # one direction that every expert dislikes
            router.weight[:, 0] = -1.0
            x[:, 0] = 20.0 if kind != "glm4_moe" else 4.0
        _, weights, experts = router(x)
    own_bias = getattr(router, "bias", None)
    design = Router(experts=COUNT, **{"chosen": 3, **ours})
    found = Experts().route(x, RouterRecipe(design, router.weight.detach(), own_bias, correction))
    assert found.experts.sort(1).values.equal(experts.sort(1).values)
    order, theirs = found.experts.argsort(1), experts.argsort(1)
    torch.testing.assert_close(found.weights.gather(1, order), weights.gather(1, theirs), atol=1e-6, rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen():
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    for scores in ("softmax", "chosen", "sigmoid"):
        router = Router(experts=5, chosen=2, scores=scores)
        assert choose(logits, router, None).experts.tolist() == [[1, 2], [0, 1]]
        assert choose(logits, router, torch.zeros(5)).experts.tolist() == [[1, 2], [0, 1]]
    grouped = Router(experts=4, chosen=2, scores="sigmoid", groups=2)
    assert choose(torch.zeros(1, 4), grouped, None).experts.tolist() == [[0, 1]]
    assert choose(torch.zeros(1, 4), Router(experts=4, chosen=2, scores="margin"), None).experts.tolist() == [[0, 1]]


def test_sigmoids_that_round_to_one_do_not_make_experts_equal():
    router = Router(experts=3, chosen=1, scores="sigmoid", on_input=True)
    assert choose(torch.tensor([[20.0, 40.0, 30.0]]), router, None).experts.tolist() == [[1]]


@pytest.mark.parametrize(
    "gating",
    [Gating(), Gating(activation="gelu_pytorch_tanh"), Gating(alpha=1.7, limit=0.5, offset=1.0)],
    ids=["silu", "gelu", "clamped"],
)
def test_gates(gating):
    x = drawn(5, 8, seed=2, gain=2.0)
    gated, up = x[:, :4].clamp(max=gating.limit), x[:, 4:].clamp(-gating.limit, gating.limit)
    if gating.activation == "silu":
        expected = gated * torch.sigmoid(gating.alpha * gated) * (up + gating.offset)
    else:
        expected = functional.gelu(gated, approximate="tanh") * up
    torch.testing.assert_close(gate(x, gating), expected)
    assert gating.limit == inf or bool((x.abs() > gating.limit).any())


def layer(*, bias: bool = False, on_input: bool = False, chosen: int = 3) -> ExpertsRecipe:
    inner = 6
    form = Matrices().form(2 * inner, HIDDEN, torch.float32)
    return ExpertsRecipe(
        router=RouterRecipe(
            Router(experts=COUNT, chosen=chosen, on_input=on_input), drawn(COUNT, HIDDEN, seed=5), None, None
        ),
        gate_up=StackRecipe(
            form, drawn(COUNT, 2 * inner, HIDDEN, seed=6, gain=0.3), drawn(COUNT, 2 * inner, seed=8) if bias else None
        ),
        gating=Gating(),
        down=StackRecipe(
            Matrices().form(HIDDEN, inner, torch.float32),
            drawn(COUNT, HIDDEN, inner, seed=7, gain=0.3),
            drawn(COUNT, HIDDEN, seed=9) if bias else None,
        ),
    )


@pytest.mark.parametrize("on_input", [False, True], ids=["weights on outputs", "weights on inputs"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
def test_experts_equal_a_loop_over_tokens(bias, on_input):
    recipe, x = layer(bias=bias, on_input=on_input), drawn(9, HIDDEN, seed=11)
    routes = Routes(
        torch.tensor([[0, 3, 5], [5, 1, 0], [3, 0, 1]] * 3), drawn(9, 3, seed=12).abs()
    )  # 2, 4, 6, 7 unused
    expected = torch.zeros(9, HIDDEN)
    for token in range(9):
        for expert, weight in zip(routes.experts[token], routes.weights[token], strict=True):
            row = x[token] * weight if on_input else x[token]
            hidden = recipe.gate_up.storage[expert] @ row + (recipe.gate_up.bias[expert] if bias else 0)
            down = recipe.down.storage[expert] @ gate(hidden[None], recipe.gating)[0]
            down = down + (recipe.down.bias[expert] if bias else 0)
            expected[token] += down if on_input else down * weight
    torch.testing.assert_close(Experts().compute(x, routes, recipe), expected, atol=1e-5, rtol=1e-5)


def test_a_token_does_not_depend_on_the_others():
    recipe, x, family = layer(), drawn(32, HIDDEN, seed=13), Experts()
    together = family.compute(x, family.route(x, recipe.router), recipe)
    for rows in (1, LEAST_ROWS, 7):
        some = x[:rows]
        assert family.compute(some, family.route(some, recipe.router), recipe).equal(together[:rows])
