"""Token sampling on a GPU, against the reference: noise, limits, tokens."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.families.draw import Drawing
from infd.kernels.reference.drawing import noise, temperature
from infd.kernels.reference.drawing.draw import Draw as Reference
from infd.kernels.reference.drawing.truncation import truncate

ROWS, VOCAB = 8, 5000  # more than one block of tokens

LIMITS = {
    "none": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 400, "top_p": 0.95, "min_p": 0.001},
    "of the likeliest alone": {"min_p": 1.0},
    "none of the mass": {"top_p": 0.0},
    "all of it but little": {"top_p": 0.9999},
}


@pytest.fixture
def draw(device, unsynchronised):
    """Return a function that samples tokens with the kernel, and moves them to the CPU."""
    from infd.kernels.triton.draw import Draw

    def run(logits, drawing, *, truncated):
        logits, drawing = logits.to(device), Drawing(*(each.to(device) for each in drawing))
        with unsynchronised():
            tokens = Draw()(logits, drawing, truncated=truncated)
        return tokens.cpu()

    return run


def logits_of(rows: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(rows)) * scale


def drawing_of(logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Drawing:
    count = len(logits)
    seeds = torch.randint(-(2**31), 2**31, (count, 2), generator=torch.Generator().manual_seed(5))
    return Drawing(
        rows=torch.arange(count).flip(0),
        largest=logits.amax(-1).flip(0),
        seed=seeds.to(torch.int32),
        position=torch.arange(count, dtype=torch.int32) * 1000,
        temperature=torch.linspace(0.5, 2, count),
        top_k=torch.full((count,), top_k, dtype=torch.int32),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
    )


def test_noise_is_that_of_the_reference_to_the_last_bit(device):
    from tests.kernels.triton.probes import show_noise

    drawing, size = drawing_of(logits_of(ROWS)), 4096
    seeds, positions = drawing.seed.to(device), drawing.position.to(device)
    keys = torch.empty((ROWS, 2), dtype=torch.int32, device=device)
    bits = torch.empty((ROWS, size), dtype=torch.int32, device=device)
    values = torch.empty((ROWS, size), device=device)
    show_noise[(ROWS,)](seeds, positions, keys, bits, values, SIZE=size)

    expected = noise.row_keys(drawing.seed[:, 0], drawing.seed[:, 1], drawing.position)
    assert keys.cpu().equal(expected)
    hashed = noise.token_hash(torch.arange(size))
    assert bits.cpu().equal(noise.uniform_bits(expected, hashed))
    torch.testing.assert_close(values.cpu(), noise.gumbel(expected, hashed), rtol=2e-6, atol=2e-6)


def test_noise_keeps_its_digits_at_both_ends(device):
    from tests.kernels.triton.probes import show_gumbel

    bits = torch.tensor([0, 1, 2, 255, 2**20, 2**30, 2**31 - 256, 2**31 - 1], dtype=torch.int32)
    given = torch.empty(8, device=device)
    show_gumbel[(1,)](bits.to(device), given, SIZE=8)
    u = (bits.float() * (2.0**-31 * (1 - 2.0**-24)) + 2.0**-32).double()
    torch.testing.assert_close(given.cpu().double(), -(-(-u).log1p()).log(), rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_tokens_are_those_of_the_reference(draw, limits):
    logits = logits_of(ROWS)
    drawing = drawing_of(logits, **limits)
    expected = Reference()(logits, drawing, truncated=bool(limits))
    assert draw(logits, drawing, truncated=bool(limits)).equal(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limits", [{}, LIMITS["all"]], ids=["none", "all"])
def test_logits_of_16_bits_are_sampled_as_the_same_numbers_in_float32(draw, dtype, limits):
    logits = logits_of(ROWS).to(dtype)
    drawing = drawing_of(logits.float(), **limits)
    expected = Reference()(logits.float(), drawing, truncated=bool(limits))
    assert draw(logits, drawing, truncated=bool(limits)).equal(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_likeliest_token_is_the_first_of_equals_and_its_logit_is_float32(device, dtype):
    from infd.kernels.triton.draw import Draw

    logits = logits_of(ROWS).to(dtype)
    logits[1, [7, 4500]] = 100.0
    logits[2, 4321] = torch.nan
    values, tokens = (each.cpu() for each in Draw().largest(logits.to(device)))
    assert values.dtype is torch.float32
    assert values.nan_to_num(7.5).equal(logits.float().amax(-1).nan_to_num(7.5))
    assert tokens[:3].tolist() == [int(logits[0].float().argmax()), 7, 4321]


def test_where_no_row_is_limited_limits_are_not_looked_at(draw):
    logits = logits_of(ROWS)
    assert draw(logits, drawing_of(logits, top_k=1), truncated=False).equal(
        draw(logits, drawing_of(logits), truncated=True)
    )


@pytest.mark.parametrize("limits", list(LIMITS.values())[1:], ids=list(LIMITS)[1:])
@pytest.mark.parametrize("scale", [0.01, 8.0])
@pytest.mark.parametrize("block", [4096, 256])  # lanes hold all of their tokens, or a fifth
def test_kept_tokens_are_those_of_the_reference(device, limits, scale, block):
    from tests.kernels.triton.probes import show_reach

    logits = logits_of(4, scale=scale)
    logits[0, 100:120] = logits[0].max()  # ties
    logits[1, 50:] = -torch.inf
    logits -= logits.amax(-1, keepdim=True)
    drawing = drawing_of(logits, **limits)
    cooled = temperature.apply(logits, torch.zeros(4), drawing.temperature)
    kept = truncate(cooled, VOCAB, top_k=drawing.top_k, top_p=drawing.top_p, min_p=drawing.min_p)
    least = kept.logits.masked_fill(kept.logits == -torch.inf, 0).amin(-1)

    bits = torch.empty(4, dtype=torch.int32, device=device)
    floats = torch.stack((drawing.temperature, drawing.top_p, drawing.min_p.log().abs()), 1)
    show_reach[(4,)](logits.to(device), floats.to(device), drawing.top_k.to(device), bits, VOCAB, BLOCK=block)
    within = -cooled <= bits.cpu().view(torch.float32)[:, None]
    expected = (cooled >= least[:, None]) & (cooled > -torch.inf)
    different = ((within & (cooled > -torch.inf)) != expected).sum(-1)
    # If the kept mass equals top_p within rounding, either result is right.
    assert int(different.max()) <= (1 if limits.get("top_p", 0) > 0 else 0)


@pytest.mark.parametrize("limits", [{"top_k": 12}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.4}])
def test_all_likely_tokens_may_be_in_one_lane(device, limits):
    from tests.kernels.triton.probes import show_reach

    block, vocab = 64, 1500
    logits = logits_of(2, vocab, scale=0.1)
    logits[:, 7::block][:, :20] += torch.linspace(3, 6, 20)
    logits -= logits.amax(-1, keepdim=True)
    drawing = drawing_of(logits, **limits)
    cooled = temperature.apply(logits, torch.zeros(2), drawing.temperature)
    kept = truncate(cooled, vocab, top_k=drawing.top_k, top_p=drawing.top_p, min_p=drawing.min_p)
    bits = torch.empty(2, dtype=torch.int32, device=device)
    floats = torch.stack((drawing.temperature, drawing.top_p, drawing.min_p.log().abs()), 1)
    show_reach[(2,)](logits.to(device), floats.to(device), drawing.top_k.to(device), bits, vocab, BLOCK=block)
    within = (-cooled <= bits.cpu().view(torch.float32)[:, None]).sum(-1)
    expected = (kept.logits > -torch.inf).sum(-1)
    assert int((within - expected).abs().max()) <= (1 if "top_p" in limits else 0)


def test_tokens_that_are_masked_are_never_chosen(draw):
    logits = torch.full((ROWS, VOCAB), -torch.inf)
    logits[:, [7, 4500]] = 1.0
    tokens = draw(logits, drawing_of(logits), truncated=False)
    assert set(tokens.tolist()) == {7, 4500}


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_a_row_without_a_choice_gives_a_token_that_exists(draw, broken):
    logits = torch.full((2, VOCAB), broken)
    tokens = draw(logits, drawing_of(logits, top_p=0.5, top_k=3), truncated=True)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
