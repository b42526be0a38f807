"""Natively limited logits equal the reference's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.kernels.cpu.draw import Draw
from infd.kernels.reference.drawing import draw as reference
from tests.kernels.narrowing import CASES, different, logits_of, narrowing_of
from tests.kernels.reference.drawing.test_narrowing import LLAMA, dry

chance = {
    "temperature": st.sampled_from([0.01, 0.7, 1.0, 2.0]),
    "late": st.sampled_from([0.0, 1.0]),
    "top_n_sigma": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    "top_k": st.sampled_from([0, 0, 1, 2, 20, 1000]),
    "top_p": st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.3]),
    "min_p": st.sampled_from([0.0, 0.0, 0.5, 0.05, 1e-6]),
    "typical_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
    "xtc_threshold": st.sampled_from([0.5, 0.1, 0.01, 0.0, 0.7]),
    "range": st.sampled_from([0.0, 0.0, 0.5, 3.0]),
    "exponent": st.sampled_from([1.0, 0.3, 2.0, 0.0]),
}


def compare(library, logits, asked, rows=None):
    """Assert that the native and the reference's logits and temperatures are equal but for rounding."""
    ours, theirs = logits.clone(), logits.clone()
    found = Draw(library).narrow(ours, narrowing_of(logits, asked, rows))
    expected = reference.Draw().narrow(theirs, narrowing_of(logits, asked, rows))
    assert different(ours, theirs) <= 1
    both = (ours > -torch.inf) & (theirs > -torch.inf)
    assert both.any(-1)[(theirs > -torch.inf).sum(-1) > 1].all()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(ours[both], theirs[both], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES)
@pytest.mark.parametrize("vocabulary", [40, 5003, 151_936])
def test_native_limits_are_the_references(library, asked, vocabulary):
    compare(library, logits_of(3, vocabulary), [asked] * 3)


def test_a_threshold_of_0_keeps_the_least_likely_token_though_its_share_is_no_float(library):
    logits = torch.tensor([[0.0, -1.0, -2.0, -3.0, -4.0, -torch.inf]])
    asked = {"late": 0.0, "temperature": 0.01, "xtc_probability": 1.0, "xtc_threshold": 0.0}
    compare(library, logits, [asked])
    found = logits.clone()
    Draw(library).narrow(found, narrowing_of(logits, [asked]))
    assert (found > -torch.inf).tolist() == [[False, False, False, False, True, False]]


@given(
    asked=st.lists(st.fixed_dictionaries(chance), min_size=4, max_size=4),
    vocabulary=st.sampled_from([2, 17, 64, 1000]),
    spread=st.sampled_from([0.3, 1.0, 4.0]),
    hidden=st.sampled_from([0.0, 0.5, 0.9]),
    seed=st.integers(0, 2**40),
)
@settings(deadline=None, max_examples=60)
def test_native_limits_are_the_references_of_any_rows(library, asked, vocabulary, spread, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocabulary, generator=generator) * spread
    logits[torch.rand(logits.shape, generator=generator) < hidden] = -torch.inf
    logits[:, 1] = torch.randn(6, generator=generator)  # one token is finite
    compare(library, logits, asked, [0, 2, 3, 5])


def test_other_rows_are_not_changed(library):
    logits = logits_of(4, 300)
    changed = logits.clone()
    Draw(library).narrow(changed, narrowing_of(logits, [{"top_k": 2}] * 2, [1, 3]))
    assert changed[[0, 2]].equal(logits[[0, 2]])
    assert (changed[[1, 3]] > -torch.inf).sum(-1).tolist() == [2, 2]


@pytest.mark.parametrize("number", range(len(LLAMA["repeats"])))
def test_a_native_dry_penalty_is_llama_cpps(library, number):
    case = LLAMA["repeats"][number]
    found = torch.zeros(3, 6)
    Draw(library).penalize_repeats(found, torch.tensor([1]), *dry(case))
    torch.testing.assert_close(-found[1], torch.tensor(case["penalties"]), rtol=1e-5, atol=1e-6)
    assert not found[[0, 2]].any()


def test_a_native_repetition_counts_up_to_the_references_limit(library):
    case = {"tokens": [1] * 1600, "multiplier": 1.0, "base": 1.001, "allowed": 3, "window": 10**6, "breakers": []}
    ours, theirs = torch.zeros(1, 6), torch.zeros(1, 6)
    Draw(library).penalize_repeats(ours, torch.tensor([0]), *dry(case))
    reference.Draw().penalize_repeats(theirs, torch.tensor([0]), *dry(case))
    torch.testing.assert_close(ours, theirs)
