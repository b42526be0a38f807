"""A layer of an encoder in native code whose products let through what it computes between them, against float64."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from infd.kernels.cpu.encoder import EncoderStack
from infd.kernels.cpu.linear import Floats, Matrices
from infd.kernels.cpu.span_attention import SpanAttention
from infd.kernels.families.encoder import EncoderInputs, SampledInputs
from infd.kernels.families.span_attention import Reach, SpanBatch
from infd.kernels.recipe import EncoderLayerRecipe, LayerNormRecipe, ProductRecipe

HEAD = 16


def layer(library, hidden, up, bias, down, *, gated="none", activation="gelu", dtype=torch.bfloat16):
    """Return a function of x: a layer whose attention adds zeros, and whose norms precede the sublayers."""
    matrices = Matrices(library) if dtype is torch.bfloat16 else Floats(library)

    def product(weight, bias=None):
        form = matrices.form(*weight.shape, dtype)
        storage = torch.empty(form.shape, dtype=form.dtype)
        form.place(storage, 0, weight.to(dtype))
        return ProductRecipe(form, storage, bias)

    recipe = EncoderLayerRecipe(
        attention_norm=None,
        mlp_norm=LayerNormRecipe(torch.ones(hidden, dtype=dtype), None, 1e-5),
        normed_first=True,
        heads=1,
        kv_heads=1,
        head_size=HEAD,
        qkv=product(torch.zeros(3 * HEAD, hidden)),
        rope=None,
        reach=Reach(None, None),
        bias=None,
        scale=1.0,
        output=product(torch.zeros(hidden, HEAD)),
        up=product(up, bias),
        gated=gated,
        activation=activation,
        down=product(down),
    )
    stacked, attention = EncoderStack(library).build([recipe], None), SpanAttention(library)

    def compute(x, read=None):
        tokens, sampled = torch.arange(len(x)), None
        spans = SpanBatch(tokens=len(x), offsets=[0, len(x)], device=x.device)
        if read is not None:
            sampled = SampledInputs(torch.tensor(read), attention.prepare(replace(spans, queries=read)))
        return stacked(EncoderInputs(tokens, tokens, None, sampled), x, attention.prepare(spans), lambda: None)

    return compute


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gelu_has_the_accuracy_of_its_type_from_large_to_small_numbers(library, dtype):
    sizes = torch.logspace(-6, 2, 380, dtype=torch.float64)
    numbers = torch.cat((sizes, -sizes, torch.zeros(1), torch.linspace(-6, 6, 501))).to(dtype)
    width = len(numbers)
    compute = layer(library, width, torch.zeros(width, width), numbers, torch.eye(width), dtype=dtype)

    exact = torch.nn.functional.gelu(numbers.double())
    unit = torch.finfo(dtype).eps
    allowed = unit * exact.abs() * 0.55 + (2e-5 if dtype is torch.bfloat16 else 1e-6)
    for rows in (1, 2, 31):
        found = compute(torch.zeros(rows, width, dtype=dtype))
        assert ((found.double() - exact).abs() <= allowed).all()
        assert found[0].expand_as(found).equal(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_gelu_keeps_a_nan_and_infinity(library, number, dtype):
    bias, down = torch.full((16,), number, dtype=dtype), torch.ones(48, 16)
    compute = layer(library, 48, torch.zeros(16, 48), bias, down, dtype=dtype)

    expected = torch.full((1, 48), number, dtype=dtype)
    torch.testing.assert_close(compute(torch.zeros(1, 48, dtype=dtype)), expected, equal_nan=True)


def test_the_last_layer_computes_the_tokens_that_are_read_alone(library):
    compute = layer(library, 48, torch.zeros(16, 48), torch.ones(16, dtype=torch.bfloat16), torch.ones(48, 16))
    before = torch.arange(6 * 48, dtype=torch.bfloat16).view(6, 48) / 64
    every, x = compute(before.clone()), before.clone()
    assert not (every == before).any()

    found = compute(x, [1, 4, 4])
    assert found.equal(every[[1, 4, 4]])
    assert found.data_ptr() == x.data_ptr()
    assert x[3:].equal(before[3:])
