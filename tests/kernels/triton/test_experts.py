"""Experts in Triton equal those of the reference, in every form that they are stored in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infd.groups import Groups
from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.kernels.families.experts import ExpertChanges, Routes
from infd.kernels.recipe import ExpertsRecipe, RouterRecipe, StackRecipe
from infd.kernels.reference import experts as reference
from infd.kernels.reference.dense import Matrices
from infd.kernels.reference.packed import PackedRows
from infd.kernels.router import Gating, Router
from tests.kernels.packed_case import rows_of
from tests.kernels.values import draw

COUNT = 9
CLAMPED = Gating(alpha=1.7, limit=0.6, offset=1.0)
KINDS = {
    "plain": {},
    "one, on inputs": {"chosen": 1, "on_input": True},
    "two, on inputs": {"chosen": 2, "on_input": True},
    "clamped, biases": {"gating": CLAMPED, "bias": True},
    "gelu": {"gating": Gating(activation="gelu_pytorch_tanh")},
    "all": {"chosen": COUNT},
}
FORMS = {
    "int8": Groups(8, 10_000, "F32"),
    "int4": Groups(4, 32, "BF16"),
    "int4, zero points, reordered": Groups(4, 32, "F16", zeros=True, order="some"),
    "Q4_K": Groups(4, 32, "I8", minima=True),
    "mxfp4": Groups(4, 32, "BF16", table="e2m1"),
    "iq4_nl": Groups(4, 32, "F16", table="iq4_nl"),
    "fp8": Groups(8, 128, "F32", table="e4m3"),
}


@pytest.fixture
def family(device):
    from infd.kernels.triton.experts import Experts

    return Experts()


def router(hidden, *, chosen=3, on_input=False):
    design = Router(experts=COUNT, chosen=chosen, least_sum=0.0, on_input=on_input)
    return RouterRecipe(design, draw(COUNT, hidden, seed=21), None, None)


def dense(outputs, inputs, seed, *, bias, dtype):
    storage = (draw(COUNT, outputs, inputs, seed=seed) * inputs**-0.5).to(dtype)
    biases = draw(COUNT, outputs, seed=seed - 1, dtype=dtype) if bias else None
    return StackRecipe(Matrices().form(outputs, inputs, dtype), storage, biases)


def packed(outputs, inputs, seed, kind):
    from infd.kernels.triton.packed import PackedMatrix

    form = PackedMatrix(outputs, inputs, kind, torch.float32)
    storage = torch.zeros(COUNT, *form.shape, dtype=form.dtype)
    for expert in range(COUNT):
        rows = rows_of(kind, outputs, inputs, seed + expert)
        if kind.scales != "I8":
            rows = rows._replace(scales=rows.scales / 50)
        form.place_groups(storage[expert], 0, rows)
    return StackRecipe(form, storage, None)


def layer(hidden, inner, *, dtype=torch.float32, kind=None, gating=None, bias=False, **design):
    gate_up, down = (
        (dense(*sizes, seed, bias=bias, dtype=dtype) if kind is None else packed(*sizes, seed, kind))
        for sizes, seed in (((2 * inner, hidden), 100), ((hidden, inner), 200))
    )
    return ExpertsRecipe(router=router(hidden, **design), gate_up=gate_up, gating=gating or Gating(), down=down)


def moved(recipe, device):
    def there(stack):
        return StackRecipe(stack.form, stack.storage.to(device), None if stack.bias is None else stack.bias.to(device))

    return ExpertsRecipe(
        router=recipe.router, gate_up=there(recipe.gate_up), gating=recipe.gating, down=there(recipe.down)
    )


def in_reference(recipe):
    """Return the recipe with forms whose products plain torch computes."""

    def plain(stack):
        form = stack.form
        if isinstance(form, PackedRows):
            form = PackedRows(form.outputs, form.inputs, form.groups, form.activations)
        return StackRecipe(form, stack.storage, stack.bias)

    return ExpertsRecipe(
        router=recipe.router, gate_up=plain(recipe.gate_up), gating=recipe.gating, down=plain(recipe.down)
    )


def compare(family, device, recipe, x, routes, near, changes=None):
    expected = reference.Experts().compute(x, routes, in_reference(recipe), changes)
    there = Routes(*(each.to(device) for each in routes))
    found = family.compute(x.to(device), there, moved(recipe, device), changes)
    assert found.dtype == x.dtype
    assert found.isfinite().all()
    assert (found.cpu().float() - expected.float()).norm() <= near * expected.float().norm()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (50, 36), (200, 130)])
def test_outputs_are_those_of_the_reference(family, device, hidden, inner, kind):
    recipe = layer(hidden, inner, **KINDS[kind])
    for tokens in (1, 60):
        x = draw(tokens, hidden, seed=tokens)
        compare(family, device, recipe, x, reference.Experts().route(x, recipe.router), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "clamped, biases"])
def test_outputs_in_half_precision_are_those_of_the_reference(family, device, kind, dtype):
    recipe = layer(200, 130, dtype=dtype, **KINDS[kind])
    for tokens in (1, 60):
        x = draw(tokens, 200, seed=tokens, dtype=dtype)
        compare(family, device, recipe, x, reference.Experts().route(x, recipe.router), 2**-7)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_in_every_form_are_those_of_the_reference(family, device, form):
    recipe = layer(160, 96, kind=FORMS[form])
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 2**-6)):
        for tokens in (1, 60):
            x = draw(tokens, 160, seed=tokens, dtype=dtype)
            compare(family, device, recipe, x, reference.Experts().route(x, recipe.router), near)


@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_all_tokens_may_choose_the_same_experts(family, device, tokens):
    recipe, x = layer(64, 32), draw(tokens, 64)
    experts = torch.tensor([[7, 0, 2]]).expand(tokens, 3)
    compare(family, device, recipe, x, Routes(experts, draw(tokens, 3, seed=1).abs()), 1e-5)


def test_a_token_alone_is_the_same_to_the_bit_as_among_others(family, device):
    """Also among so many that another tile is used."""
    for recipe in (layer(200, 130), layer(160, 96, kind=FORMS["int4"])):
        hidden, there = recipe.router.weight.shape[1], moved(recipe, device)
        x = draw(150, hidden).to(device)
        routes = family.route(x, RouterRecipe(recipe.router.design, recipe.router.weight.to(device), None, None))
        for together in (32, 150):
            many = family.compute(x[:together], Routes(*(each[:together] for each in routes)), there)
            for token in (0, 7, 31):
                own = slice(token, token + 1)
                alone = family.compute(x[own], Routes(*(each[own] for each in routes)), there)
                assert alone[0].equal(many[token])


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(1, 1, 5), (7, 3, 5), (40, 2, 64), (700, 3, 6)])
def test_blocks_hold_each_route_once_beside_those_of_its_expert(device, unsynchronised, tokens, chosen, experts, rows):
    from infd.kernels.triton.route_blocks import block_routes

    chance = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(3))
    chance[:, 0] = 2  # all tokens choose the first expert, none the second
    chance[:, 1] = -1
    routed = chance.topk(chosen).indices
    there = routed.to(device)
    with unsynchronised():
        blocks = block_routes(there, experts, rows)
    routes, of_block = tokens * chosen, blocks.experts.tolist()
    used = [expert for expert in of_block if expert >= 0]
    assert used == sorted(used)
    assert of_block == used + [-1] * (len(of_block) - len(used))
    held = []
    for expert, order in zip(used, blocks.order.view(-1, rows).tolist(), strict=False):
        held += [route for route in order if route < routes]
        assert {expert} == {int(routed.flatten()[route]) for route in order if route < routes}
        assert all(route == routes for route in order if route >= routes)
    assert held == routed.flatten().argsort(stable=True).tolist()
    counts = routed.flatten().bincount(minlength=experts)
    assert len(used) == sum(-(-count // rows) for count in counts.tolist())


def test_the_number_of_blocks_suffices_for_all_routes(triton):
    from infd.kernels.triton.route_blocks import most_blocks

    for routes, experts, rows in ((1, 8, 16), (5, 8, 16), (40, 8, 16), (400, 8, 16), (16, 1, 16), (17, 1, 16)):
        used = min(routes, experts)
        worst = [1 + (routes - used) // rows * rows] + [1] * (used - 1)
        worst[-1] += routes - sum(worst)
        assert most_blocks(routes, experts, rows) >= sum(-(-count // rows) for count in worst)
    assert most_blocks(400, 8, 16) == 8 + 392 // 16


def test_nothing_is_read_back_and_launches_depend_on_the_number_of_tokens_alone(family, device, unsynchronised):
    recipe = layer(64, 32)
    there, x = moved(recipe, device), draw(40, 64).to(device)
    routes = family.route(x, there.router._replace(weight=there.router.weight.to(device)))
    family.compute(x, routes, there)
    with unsynchronised():
        family.compute(x, routes, there)
        family.add_shared(x.clone(), x, x[:, :1])


@pytest.mark.parametrize("size", [16, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_experts_are_added(family, device, size, dtype):
    y, shared, gate = (draw(5, width, seed=width, dtype=dtype) for width in (size, size, 1))
    for each in (None, gate):
        expected = reference.Experts().add_shared(y.clone(), shared, each)
        found = family.add_shared(y.to(device, copy=True), shared.to(device), None if each is None else each.to(device))
        torch.testing.assert_close(found.cpu(), expected)


def low_rank(tokens, inputs, outputs, ranks, seed, dtype, device):
    """Return an adapter of tokens, whose products have a part for each pair (rank, first output) of `ranks`."""
    a = 0.3 * draw(COUNT, sum(rank for rank, _ in ranks), inputs, seed=seed)
    parts, first = [], 0
    for rank, output in ranks:
        b = 0.3 * draw(COUNT, outputs - output, rank, seed=seed + 1)
        parts.append(LowRankPart(b.to(dtype).to(device), first, output))
        first += rank
    return torch.tensor(tokens).to(device), LowRank(a.to(dtype).to(device), parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "two, on inputs", "clamped, biases"])
def test_changes_by_adapters_are_those_of_the_reference(family, device, kind, dtype):
    """Tokens of no adapter keep their bits."""
    recipe, tokens = layer(64, 32, dtype=dtype, **KINDS[kind]), 23

    def changes(device):
        return ExpertChanges(
            [
                low_rank([0, 3, 22], 64, 64, [(3, 0), (2, 32)], 300, dtype, device),
                low_rank(list(range(4, 20)), 64, 64, [(5, 0)], 310, dtype, device),
            ],
            [low_rank([0, 3, 22], 32, 64, [(4, 0)], 320, dtype, device)],
        )

    x = draw(tokens, 64, seed=4, dtype=dtype)
    routes = reference.Experts().route(x, recipe.router)
    expected = reference.Experts().compute(x, routes, recipe, changes("cpu"))
    there = Routes(*(each.to(device) for each in routes))
    found = family.compute(x.to(device), there, moved(recipe, device), changes(device)).cpu()
    unchanged = family.compute(x.to(device), there, moved(recipe, device)).cpu()
    near = 1e-4 if dtype is torch.float32 else 0.02
    assert (found.float() - expected.float()).norm() <= near * expected.float().norm()
    free = [1, 2, 20, 21]
    assert found[free].equal(unchanged[free])
    for changed in ([0, 3, 22], list(range(4, 20))):
        assert (found[changed] - unchanged[changed]).abs().amax(1).min() > 0.05


def test_forms_that_no_kernel_reads_are_left_to_the_reference(family, device):
    recipe, x = layer(64, 32, kind=FORMS["int4"]), draw(3, 64).to(device)
    foreign = moved(in_reference(recipe), device)
    routes = family.route(x, recipe.router._replace(weight=recipe.router.weight.to(device)))
    assert not family.refused
    torch.testing.assert_close(
        family.compute(x, routes, foreign), family.compute(x, routes, moved(recipe, device)), atol=1e-5, rtol=1e-5
    )
    assert list(family.refused) == ["triton experts"]


class Noted:
    """A bench that runs work once, and keeps what is off from the reference."""

    def __init__(self, device):
        self.device, self.machine, self.figures = device, self, self
        self.off, self.beside = {}, []

    def floor(self, moved, operations):
        return 1.0

    def timed(self, work):
        return SimpleNamespace(best=work().float().norm().item())

    def seconds(self, work, *, times):
        return work().float().norm().item()

    def kernel(self, name, taken, floor, *, off):
        self.off[name] = off

    def note(self, name, *, times):
        self.beside.append(times)


def test_the_benchmark_compares_each_form_with_the_reference(device, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "bench")
    import gpu_experts

    noted = Noted(device)
    gpu_experts.measure(noted, gpu_experts.MIXTURES["tiny"], [1, 70])
    assert len(noted.off) == 2 * len(gpu_experts.FORMS)
    assert max(noted.off.values()) < 0.02
    assert noted.beside == pytest.approx([1.0] * len(noted.off), rel=0.02)
