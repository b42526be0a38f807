"""Native routers and experts against the reference, in every form that holds experts."""

from __future__ import annotations

import itertools

import pytest
import torch

from infd.groups import Groups
from infd.kernels.cpu.experts import Experts, layer_of
from infd.kernels.cpu.groups import Int4, Kept, QuantizedMXFP4
from infd.kernels.cpu.linear import PANEL, Compressed, Int8, Kernels, Matrices
from infd.kernels.cpu.packed import QuantizedFloat8
from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.kernels.families.experts import ExpertChanges
from infd.kernels.recipe import ExpertsRecipe, RouterRecipe, StackRecipe
from infd.kernels.reference import experts as reference
from infd.kernels.router import Gating, Router
from tests.kernels.cpu.placed import draw

FORMS = {"bf16": Matrices, "int8": Int8, "int4": Int4, "mxfp4": QuantizedMXFP4, "fp8": QuantizedFloat8}
COUNT = 9
DESIGNS = {
    "softmax": {},
    "renormalized": {"least_sum": 0.0},
    "floor": {"least_sum": 0.9},
    "chosen": {"scores": "chosen"},
    "sigmoid": {"scores": "sigmoid", "least_sum": 1e-20, "scale": 1.7},
    "groups": {"scores": "sigmoid", "groups": 3, "chosen_groups": 2},
    "margin": {"scores": "margin", "margin": 0.4},
    "one": {"chosen": 1, "scores": "sigmoid", "on_input": True},
    "all": {"chosen": COUNT},
}


def router(design, hidden, *, bias=False, correction=False):
    return RouterRecipe(
        Router(experts=COUNT, **{"chosen": 3, **design}),
        draw(COUNT, hidden, seed=21, dtype=torch.float32),
        draw(COUNT, seed=22, dtype=torch.float32) if bias else None,
        0.3 * draw(COUNT, seed=23, dtype=torch.float32) if correction else None,
    )


@pytest.mark.parametrize("further", [{}, {"bias": True}, {"correction": True}], ids=str)
@pytest.mark.parametrize("design", DESIGNS)
def test_routes_are_those_of_the_reference(library, design, further):
    recipe = router(DESIGNS[design], 50, **further)
    x = draw(23, 50, seed=24)
    found, expected = Experts(library).route(x, recipe), reference.Experts().route(x, recipe)
    assert found.experts.equal(expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("design", DESIGNS)
def test_of_equal_experts_the_first_are_chosen(library, design):
    recipe = router(DESIGNS[design], 16)._replace(weight=torch.zeros(COUNT, 16))
    found = Experts(library).route(draw(3, 16), recipe)
    assert found.experts.tolist() == [list(range(found.experts.shape[1]))] * 3


@pytest.mark.parametrize("scores", ["softmax", "chosen", "sigmoid"])
def test_of_many_experts_the_largest_are_chosen_in_order(library, scores):
    """Logits are whole numbers, many of them equal."""
    weight = draw(130, 1, seed=6, dtype=torch.float32).mul(3).round()
    for chosen in (1, 2, 8, 130):
        recipe = RouterRecipe(Router(experts=130, chosen=chosen, scores=scores), weight, None, None)
        found = Experts(library).route(torch.tensor([[1.0], [-1.0]]), recipe).experts
        order = [sorted(range(130), key=lambda expert, sign=sign: (-sign * weight[expert], expert)) for sign in (1, -1)]
        assert found.tolist() == [each[:chosen] for each in order]


def test_a_token_of_nan_chooses_distinct_experts(library):
    for design in DESIGNS.values():
        found = Experts(library).route(torch.full((2, 16), torch.nan, dtype=torch.bfloat16), router(design, 16))
        assert all(len(set(row)) == len(row) for row in found.experts.tolist())
        assert found.weights.isnan().all()


def stack(matrices, outputs, inputs, seed, *, bias, dtype):
    form = matrices.form(outputs, inputs, dtype)
    storage = torch.empty((COUNT, *form.shape), dtype=form.dtype)
    storage.view(torch.uint8).fill_(255)  # memory is arbitrary before it is placed
    for expert in range(COUNT):
        form.place(storage[expert], 0, draw(outputs, inputs, seed=seed + expert) * inputs**-0.5)
    return StackRecipe(form, storage, draw(COUNT, outputs, seed=seed - 1, dtype=dtype) if bias else None)


def layer(matrices, hidden, inner, *, design=None, gating=None, bias=False, dtype=torch.bfloat16):
    return ExpertsRecipe(
        router=router(design or {}, hidden),
        gate_up=stack(matrices, 2 * inner, hidden, 100, bias=bias, dtype=dtype),
        gating=gating or Gating(),
        down=stack(matrices, hidden, inner, 200, bias=bias, dtype=dtype),
    )


CLAMPED = Gating(alpha=1.7, limit=0.6, offset=1.0)
KINDS = {
    "plain": {},
    "on inputs": {"design": DESIGNS["one"]},
    "clamped, biases": {"gating": CLAMPED, "bias": True},
    "gelu": {"gating": Gating(activation="gelu_pytorch_tanh")},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (50, 36), (200, 130)])
def test_outputs_are_those_of_the_reference(library, hidden, inner, kind):
    recipe = layer(Matrices(library), hidden, inner, **KINDS[kind])
    native, plain = Experts(library), reference.Experts()
    for tokens in (1, 2, 5, 40):
        x = draw(tokens, hidden, seed=tokens)
        routes = plain.route(x, recipe.router)
        expected = plain.compute(x, routes, recipe).float()
        # The reference rounds activations to bfloat16 more often.
        torch.testing.assert_close(native.compute(x, routes, recipe).float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_in_every_form_are_those_of_the_reference(library, form):
    recipe = layer(FORMS[form](library), 160, 96)
    assert layer_of(recipe) is not None
    native, plain = Experts(library), reference.Experts()
    x = draw(33, 160, seed=3)
    routes = plain.route(x, recipe.router)
    expected = plain.compute(x, routes, recipe).float()
    torch.testing.assert_close(native.compute(x, routes, recipe).float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_in_float32_are_those_of_the_reference(library, kind):
    recipe = layer(Int4(library), 160, 96, **KINDS[kind], dtype=torch.float32)
    assert layer_of(recipe) is not None
    native, plain = Experts(library), reference.Experts()
    for tokens in (1, 33):
        x = draw(tokens, 160, seed=tokens, dtype=torch.float32)
        routes, expected = native.route(x, recipe.router), plain.route(x, recipe.router)
        assert routes.experts.equal(expected.experts)
        torch.testing.assert_close(routes.weights, expected.weights)
        computed = plain.compute(x, routes, recipe)
        torch.testing.assert_close(native.compute(x, routes, recipe), computed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_alone_is_the_same_to_the_bit_as_among_others(library, form):
    recipe, native = layer(FORMS[form](library), 160, 100), Experts(library)
    x = draw(40, 160, seed=4)
    together = native.compute(x, native.route(x, recipe.router), recipe)
    for first, rows in ((0, 1), (7, 2), (30, 10), (0, 40)):
        some = x[first : first + rows]
        assert native.compute(some, native.route(some, recipe.router), recipe).equal(together[first : first + rows])


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_compressed_experts_have_the_bits_of_plain_ones(library, tokens):
    if library.isa not in ("amx", "avx512_bf16"):
        pytest.skip("compressed matrices need AVX512-BF16")
    native, found = Experts(library), []
    for matrices in (Matrices, Compressed):
        recipe = layer(matrices(library), 300, 160)
        for experts in (recipe.gate_up, recipe.down):
            storage, inputs = experts.storage, 300 if experts is recipe.gate_up else 160
            # Rows of so many sizes are not compressed, so these panels continue behind the others.
            sizes = 2.0 ** -(torch.arange(PANEL) % 40).unsqueeze(1)
            for expert in range(COUNT):
                experts.form.place(storage[expert], PANEL, (draw(PANEL, inputs, seed=expert) * sizes).bfloat16())
        x = draw(tokens, 300, seed=5)
        found.append(native.compute(x, native.route(x, recipe.router), recipe))
    assert found[0].equal(found[1])


@pytest.mark.parametrize("tokens", [1, 5, 40, 900])
@pytest.mark.parametrize("form", ["int8", "int4", "mxfp4"])
def test_inputs_quantized_once_for_all_experts_change_no_bit(library, form, tokens, monkeypatch):
    for dtype in (torch.bfloat16, torch.float32):
        recipe, native = layer(FORMS[form](library), 160, 96, bias=True, dtype=dtype), Experts(library)
        described = layer_of(recipe)
        assert described is not None
        assert described.gate_up.first.quantize
        x = draw(tokens, 160, seed=9, dtype=dtype)
        routes = native.route(x, recipe.router)
        once = native.compute(x, routes, recipe)
        with monkeypatch.context() as context:
            context.setattr(Kernels, "describe_steps", lambda *_: None)
            assert native.compute(x, routes, recipe).equal(once)


@pytest.mark.parametrize("kind", ["plain", "on inputs"])
@pytest.mark.parametrize("tokens", [2, 40, 900])  # 900: an expert's rows are divided
def test_the_number_of_threads_changes_no_bit(library, tokens, kind):
    recipe, native = layer(Int8(library), 160, 100, **KINDS[kind]), Experts(library)
    x, threads = draw(tokens, 160, seed=5), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 64):  # 64: too many for experts, which are divided by panels
            torch.set_num_threads(count)
            native.compute(-x, native.route(-x, recipe.router), recipe)  # scratch memory has no result of x
            found.append(native.compute(x, native.route(x, recipe.router), recipe))
    finally:
        torch.set_num_threads(threads)
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


def test_more_tokens_than_one_pass_computes(library):
    recipe, native = layer(Matrices(library), 16, 8, design={"chosen": COUNT}), Experts(library)
    x = draw(2000, 16, seed=5)
    whole = native.compute(x, native.route(x, recipe.router), recipe)
    parts = [native.compute(part, native.route(part, recipe.router), recipe) for part in x.split(300)]
    assert whole.equal(torch.cat(parts))


def test_experts_whose_inputs_are_reordered_run_in_torch(library):
    reordered = Kept(library).form(64, 64, torch.bfloat16, Groups(4, 32, "F32", order="x"))
    storage = torch.zeros(COUNT, *reordered.shape, dtype=reordered.dtype)
    recipe = layer(Matrices(library), 64, 32)
    assert layer_of(recipe) is not None
    turned = ExpertsRecipe(
        router=recipe.router, gate_up=StackRecipe(reordered, storage, None), gating=Gating(), down=recipe.down
    )
    assert layer_of(turned) is None


@pytest.mark.parametrize("size", [16, 50])
def test_shared_experts_are_added(library, size):
    for dtype, gated in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        y, shared, gate = (draw(5, width, seed=width, dtype=dtype) for width in (size, size, 1))
        each = gate if gated else None
        expected = reference.Experts().add_shared(y.clone(), shared, each)
        torch.testing.assert_close(Experts(library).add_shared(y.clone(), shared, each), expected)


def low_rank(tokens, inputs, outputs, ranks, seed, dtype):
    """Return an adapter of tokens, whose products have a part for each pair (rank, first output) of `ranks`."""
    a = (0.3 * draw(COUNT * sum(rank for rank, _ in ranks), inputs, seed=seed, dtype=dtype)).view(COUNT, -1, inputs)
    parts, first = [], 0
    for rank, output in ranks:
        b = draw(COUNT * (outputs - output) * rank, 1, seed=seed + 1, dtype=dtype).view(COUNT, outputs - output, rank)
        parts.append(LowRankPart((0.3 * b).contiguous(), first, output))
        first += rank
    return torch.tensor(tokens), LowRank(a, parts)


@pytest.mark.parametrize("tokens", [7, 2800])
def test_changes_by_adapters_are_those_of_the_reference(library, tokens):
    """2800 tokens are computed in two passes. Tokens of no adapter keep their bits."""
    recipe = layer(Int4(library), 64, 32, dtype=torch.float32)
    own, other = [0, 3, tokens - 1], list(range(4, tokens - 2))
    changes = ExpertChanges(
        [
            low_rank(own, 64, 64, [(3, 0), (2, 32)], 300, torch.float32),
            low_rank(other, 64, 64, [(5, 0)], 310, torch.float32),
        ],
        [low_rank(own, 32, 64, [(4, 0)], 320, torch.float32)],
    )
    native, plain = Experts(library), reference.Experts()
    x = draw(tokens, 64, seed=4, dtype=torch.float32)
    routes = plain.route(x, recipe.router)
    found, unchanged = native.compute(x, routes, recipe, changes), native.compute(x, routes, recipe)
    torch.testing.assert_close(found, plain.compute(x, routes, recipe, changes), atol=1e-3, rtol=1e-3)
    free = [token for token in range(tokens) if token not in {*own, *other}]
    assert found[free].equal(unchanged[free])
    for changed in (own, other):
        assert (found[changed] - unchanged[changed]).abs().amax(1).min() > 0.05
    alone = native.compute(
        x[:1], routes._replace(experts=routes.experts[:1], weights=routes.weights[:1]), recipe, _first(changes)
    )
    assert alone[0].equal(found[0])


def _first(changes):
    """Return the changes of the first token alone."""
    return ExpertChanges(*([(rows[:1], low) for rows, low in each if rows[0] == 0] for each in changes))


def test_changes_in_bfloat16_are_those_of_the_reference(library):
    recipe = layer(Matrices(library), 64, 32)
    changes = ExpertChanges([], [low_rank([1, 2], 32, 64, [(4, 0)], 320, torch.bfloat16)])
    native, plain = Experts(library), reference.Experts()
    x = draw(5, 64, seed=4)
    routes = plain.route(x, recipe.router)
    expected = plain.compute(x, routes, recipe, changes).float()
    torch.testing.assert_close(native.compute(x, routes, recipe, changes).float(), expected, atol=0.06, rtol=0.06)
