"""All layers in one call give the results of the layers' own code, to the bit."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu import attention, experts, groups, linear, stack, tokens
from infd.kernels.cpu.stack import Stack, Stacked
from infd.kernels.reference import dense
from infd.kernels.select import select
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.models.test_parity import text
from tests.tiny import FURTHER, VARIANTS


def compute(directory, ops, dtype=torch.bfloat16):
    driver = Driver(load_model(directory, ops=ops, dtype=dtype), ops=ops, seed=3)
    sequence, other, third, fourth = (driver.start(text(seed)) for seed in (1, 2, 3, 4))
    logits = driver.step((sequence, 20))
    logits += driver.step((sequence, 1), (other, 30))
    logits += driver.step((other, 1), (sequence, 1))
    logits += driver.step((sequence, 9))
    logits += driver.step((sequence, 10), (third, 9), (fourth, 1), last=True)
    return torch.cat(logits)


def one_by_one(ops):
    return ops.replace(stack=dense.Stack())


@pytest.mark.parametrize("layers", [1, 2, stack.SLICE])
@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - FURTHER))
def test_a_stack_equals_its_layers(built, tiny, variant, layers, monkeypatch):
    monkeypatch.setattr(stack, "SLICE", layers)
    ops = select(CPU, torch.bfloat16)
    assert load_model(tiny(variant), ops=ops, dtype=torch.bfloat16).stacked is not None
    assert compute(tiny(variant), ops).equal(compute(tiny(variant), one_by_one(ops)))


def all_in(library, paged_attention, dtype=torch.bfloat16):
    matrices = linear.Matrices(library) if dtype == torch.bfloat16 else linear.Floats(library)
    return select(CPU, dtype).replace(
        attention=paged_attention(library),
        linear=matrices,
        vocabulary=matrices,
        norm=tokens.Norm(library),
        rope=tokens.Rope(library),
        activation=tokens.Activation(library),
        experts=experts.Experts(library),
        stack=Stack(library),
    )


@pytest.mark.parametrize("paged_attention", [attention.PagedAttention, attention.Int8PagedAttention])
@pytest.mark.parametrize(
    "variant", ["qwen3", "gemma2", "granite", "qwen2-moe", "glm4-moe", "gpt-oss", "llama4", "phimoe"]
)
def test_layers_in_one_call_equal_each_layer_in_every_instruction_set(library, tiny, variant, paged_attention):
    ops = all_in(library, paged_attention)
    assert load_model(tiny(variant), ops=ops, dtype=torch.bfloat16).stacked is not None
    assert compute(tiny(variant), ops).equal(compute(tiny(variant), one_by_one(ops)))


@pytest.mark.parametrize("matrices", [linear.Int8, groups.Int4])
def test_with_quantized_weights(library, tiny, matrices):
    ops = select(CPU, torch.bfloat16).replace(linear=matrices(library))
    assert load_model(tiny("qwen3"), ops=ops, dtype=torch.bfloat16).stacked is not None
    assert compute(tiny("qwen3"), ops).equal(compute(tiny("qwen3"), one_by_one(ops)))


@pytest.mark.parametrize("cached", [attention.PagedAttention, attention.Int8PagedAttention])
@pytest.mark.parametrize(
    "variant", ["qwen3", "gemma2", "granite", "olmo2", "qwen2-moe", "glm4-moe", "gpt-oss", "llama4", "phimoe"]
)
def test_in_float32(library, tiny, variant, cached):
    ops = all_in(library, cached, torch.float32).replace(linear=groups.Int4(library))
    assert load_model(tiny(variant), ops=ops, dtype=torch.float32).stacked is not None
    expected = compute(tiny(variant), one_by_one(ops), torch.float32)
    assert compute(tiny(variant), ops, torch.float32).equal(expected)


def test_a_stack_beats_between_layers_and_can_be_stopped_there(built, tiny):
    class Enough(BaseException):
        pass

    beats = []

    def beat():
        beats.append(None)
        if len(beats) == 2:
            raise Enough

    ops = select(CPU, torch.bfloat16)
    model = load_model(tiny("gemma3"), ops=ops, dtype=torch.bfloat16)
    driver = Driver(model, ops=ops, beat=beat)
    driver.step((driver.start(text(1)), 4))
    assert len(beats) == 1
    with pytest.raises(Enough):
        driver.step((driver.start(text(1)), 4))


def test_weights_in_a_form_of_torch_are_left_to_the_layers(built, tiny):
    ops = select(CPU, torch.bfloat16).replace(linear=dense.Matrices())
    assert load_model(tiny("llama"), ops=ops, dtype=torch.bfloat16).stacked is None


class Routing(Driver):
    """Keeps the experts that the tokens of each step choose, in ascending order."""

    def _batch(self, spans):
        batch = super()._batch(spans)
        if len(batch.tokens) > 4:  # not that of the sampled tokens alone
            sizes = self.model.experts
            batch.routes = torch.full((len(batch.tokens), sizes.layers, sizes.chosen), -1, dtype=torch.int16)
            self.routes = batch.routes
        return batch


@pytest.mark.parametrize("variant", ["qwen2-moe", "granite-moe"])
def test_a_stack_reports_the_experts_that_its_layers_report(built, tiny, variant):
    found = []
    for ops in (select(CPU, torch.bfloat16), one_by_one(select(CPU, torch.bfloat16))):
        model = load_model(tiny(variant), ops=ops, dtype=torch.bfloat16)
        driver = Routing(model, ops=ops, seed=3)
        driver.step((driver.start(text(1)), 20), (driver.start(text(2)), 5))
        whole = driver.routes
        driver.step((driver.start(text(3)), 20), (driver.start(text(4)), 5), last=True)
        found.append((whole, driver.routes))
    (whole, last), (whole_by_layers, last_by_layers) = found
    assert whole.equal(whole_by_layers)
    assert whole.min() >= 0
    assert whole.max() < model.experts.experts
    assert last.equal(last_by_layers)
    assert (last[2:, -1] == -1).all(), "the last layer routes sampled tokens alone"
    assert last[:, :-1].min() >= 0


@pytest.mark.parametrize("stacked", [True, False])
def test_no_experts_are_reported_of_repeated_sampled_tokens(built, tiny, stacked):
    ops = select(CPU, torch.bfloat16)
    ops = ops if stacked else one_by_one(ops)
    model = load_model(tiny("qwen2-moe"), ops=ops, dtype=torch.bfloat16)
    driver = Routing(model, ops=ops, seed=3, least_rows=4)
    driver.step((driver.start(text(3)), 20), (driver.start(text(4)), 5), last=True)

    assert driver.routes[:2].min() >= 0
    assert (driver.routes[2:, -1] == -1).all()
    assert driver.routes[:, :-1].min() >= 0


class Careless(Stacked):
    """Rotates by the wrong positions."""

    def __call__(self, x, batch):
        batch.positions.add_(1)
        return super().__call__(x, batch)


class Mistaken(Stacked):
    """Returns the wrong sampled positions."""

    def __call__(self, x, batch):
        if batch.sampled is not None:
            batch.sampled.tokens.sub_(1)
        return super().__call__(x, batch)


@pytest.mark.parametrize("stacked", [Careless, Mistaken])
def test_a_broken_stack_is_noticed(built, tiny, stacked):
    class Broken(Stack):
        def build(self, layers):
            return stacked(self._compute, layers)

    ops = select(CPU, torch.bfloat16)
    broken = ops.replace(stack=Broken())
    assert not compute(tiny("llama"), broken).equal(compute(tiny("llama"), ops))
