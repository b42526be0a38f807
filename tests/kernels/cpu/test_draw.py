"""Natively sampled tokens equal the reference's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.kernels.cpu.draw import Draw
from infd.kernels.reference.drawing import draw as reference
from infd.request import SamplingParams
from infd.runner.sampled import NOT_FINITE, NOTHING_ALLOWED, SOUND, SampledPositions
from infd.runner.sampler import Sampler
from tests.runner.driving import join, make_rows

ROWS = 12
limits = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.01, 0.3, 0.8, 1.0, 2.0, 100.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 20, 127, 128, 1000, 10_000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.999999, 0.99, 0.9, 0.5, 0.001]),
        "min_p": st.sampled_from([0.0, 0.0, 1.0, 0.5, 0.05, 1e-6, 1e-20]),
    }
)


def sample(kernels, logits, asked, seed=0):
    """Return the sampled tokens and verdicts of rows of logits, each row with its own sampling parameters."""
    rows = make_rows(rows=len(asked), vocab_size=logits.shape[1])
    rows.stage(
        [join(i, [1], [[1]], SamplingParams(max_tokens=9, **each), seed=seed + i) for i, each in enumerate(asked)], []
    )
    ids, ends = np.arange(len(asked)), np.full(len(asked), 7)
    asking = SampledPositions(torch.from_numpy(ids), torch.from_numpy(ends), ids, ends)
    sampled = Sampler(rows, kernels)(logits.clone(), asking, None)
    return sampled.tokens, sampled.verdict


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("rows", [[0], [1, 4], [0, 1, 2, 3, 4]])
def test_natively_forbidden_tokens_equal_the_references(library, vocabulary: int, rows: list[int]):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(5, vocabulary + 3, generator=generator)[:, :vocabulary]
    bits = torch.randint(-(2**31), 2**31, (len(rows), -(-vocabulary // 32)), generator=generator).to(torch.int32)
    bits[0, 0], bits[-1, -1] = -1, 0
    ours, theirs = logits.clone(), logits.clone()
    Draw(library).forbid(ours, torch.tensor(rows), bits)
    reference.Draw().forbid(theirs, torch.tensor(rows), bits)
    assert ours.equal(theirs)


@given(
    asked=st.lists(limits, min_size=ROWS, max_size=ROWS),
    vocabulary=st.sampled_from([2, 17, 64, 1000, 5003]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 60.0]),
    coarse=st.booleans(),
    hidden=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 2**40),
)
@settings(deadline=None, max_examples=60)
def test_native_choices_equal_the_references(library, asked, vocabulary, spread, coarse, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, vocabulary, generator=generator) * spread
    if coarse:
        logits = logits.round()  # produces equal logits
    logits[torch.rand(logits.shape, generator=generator) < hidden] = -torch.inf
    ours, verdict = sample(Draw(library), logits, asked, seed)
    theirs, expected = sample(reference.Draw(), logits, asked, seed)
    assert verdict.equal(expected)
    sound = verdict == SOUND
    assert ours[sound].equal(theirs[sound])


@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 1.0, 1e30]),
    hidden=st.sampled_from([0.0, 0.9, 1.0]),
    odd=st.sampled_from([None, torch.nan, torch.inf]),
    seed=st.integers(0, 2**40),
)
@settings(deadline=None, max_examples=150)
def test_the_largest_is_torchs_and_the_first_of_equals(library, rows, vocabulary, spread, hidden, odd, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary + 3, generator=generator) * spread).round()[:, :vocabulary]
    logits[torch.rand(logits.shape, generator=generator) < hidden] = -torch.inf
    if odd is not None:
        logits[torch.rand(logits.shape, generator=generator) < 0.002] = odd
    values, tokens = Draw(library).largest(logits)
    expected, _ = logits.max(-1)

    assert values.equal(expected) or values.nan_to_num(7.5).equal(expected.nan_to_num(7.5))
    same = (logits == expected[:, None]) | (logits.isnan() & expected.isnan()[:, None])
    assert tokens.equal(same.int().argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_sampled_as_the_same_numbers_in_float32(library, dtype):
    logits = (torch.randn(ROWS, 700, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    asked = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}] * (ROWS // 3)
    ours, verdict = sample(Draw(library), logits, asked)
    theirs, expected = sample(Draw(library), logits.float(), asked)
    assert ours.equal(theirs)
    assert verdict.equal(expected)


def test_a_large_vocabulary(library):
    logits = torch.randn(ROWS, 151_936, generator=torch.Generator().manual_seed(1)) * 3
    asked = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 3.0, "top_p": 0.95},
        {"temperature": 3.0, "top_k": 30_000},
        {"temperature": 3.0, "top_k": 151_936, "top_p": 0.7, "min_p": 1e-9},
        *[{"temperature": 1.0}] * 4,
    ]
    for seed in range(3):
        ours, _ = sample(Draw(library), logits, asked, 1000 * seed)
        theirs, _ = sample(reference.Draw(), logits, asked, 1000 * seed)
        assert ours.equal(theirs)


def test_rows_with_nan_get_their_verdict(library):
    logits = torch.randn(6, 333)
    logits[1, 200] = torch.nan
    logits[2, 332] = torch.nan
    logits[3, 5] = torch.inf
    logits[4] = -torch.inf
    _, verdict = sample(Draw(library), logits, [{"temperature": 0.7, "top_p": 0.9}] * 6)
    assert verdict.tolist() == [SOUND, NOT_FINITE, NOT_FINITE, NOT_FINITE, NOT_FINITE, SOUND]
    assert NOTHING_ALLOWED not in verdict


def test_threads_do_not_change_a_choice(library):
    before = torch.get_num_threads()
    logits = torch.randn(ROWS, 5000) * 3
    asked = [{"temperature": 0.9, "top_p": 0.9}] * ROWS
    try:
        torch.set_num_threads(1)
        one, _ = sample(Draw(library), logits, asked)
        torch.set_num_threads(3)
        assert sample(Draw(library), logits, asked)[0].equal(one)
    finally:
        torch.set_num_threads(before)
