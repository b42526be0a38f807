"""Top-k, top-p and min-p, against transformers and a loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from infd.kernels.reference.drawing.truncation import truncate

VOCAB = 60


def kept(logits, width=VOCAB, *, top_k=0, top_p=1.0, min_p=0.0) -> list[int]:
    """Return the kept tokens of one row."""
    row = (logits - logits.max())[None]
    found = truncate(
        row,
        width,
        top_k=torch.tensor([top_k], dtype=torch.int32),
        top_p=torch.tensor([top_p]),
        min_p=torch.tensor([min_p]),
    )
    assert found.settled.all()
    return sorted(found.tokens[found.logits > -torch.inf].tolist())


def likely(logits) -> list[int]:
    return (logits > -torch.inf).nonzero()[:, 0].tolist()


def naive(logits, top_k, top_p, min_p) -> list[int]:
    """Apply min-p, then top-k, then top-p of the remaining tokens; for logits without ties."""
    weights = sorted(((math.exp(x), i) for i, x in enumerate(logits.double().tolist())), reverse=True)
    weights = [(w, i) for w, i in weights if w >= min_p * weights[0][0]]
    weights = weights[: top_k or None]
    total = sum(w for w, _ in weights)
    out, mass = [], 0.0
    for w, i in weights:
        if mass >= top_p * total and out:
            break
        out.append(i)
        mass += w
    return sorted(out)


distinct = st.lists(st.integers(-4000, 4000), min_size=VOCAB, max_size=VOCAB, unique=True).map(
    lambda values: torch.tensor(values) / 300
)


@settings(deadline=None, max_examples=60)
@given(distinct, st.integers(1, VOCAB))
def test_top_k_is_that_of_transformers(logits, k):
    assert kept(logits, top_k=k) == likely(TopKLogitsWarper(k)(None, logits[None])[0])


@settings(deadline=None, max_examples=60)
@given(distinct, st.floats(0.01, 0.99))
def test_top_p_is_that_of_transformers(logits, p):
    theirs = likely(TopPLogitsWarper(p)(None, logits[None])[0])
    ours = kept(logits, top_p=p)
    # If the kept mass equals p within rounding, either result is right.
    mass = logits.double().softmax(-1)
    if ours != theirs:
        assert abs(float(mass[ours].sum()) - p) < 1e-6 or abs(float(mass[theirs].sum()) - p) < 1e-6


@settings(deadline=None, max_examples=60)
@given(distinct, st.floats(0.001, 1.0))
def test_min_p_is_that_of_transformers(logits, p):
    theirs = likely(MinPLogitsWarper(p)(None, logits[None])[0])
    ratio = (logits.double() - logits.double().max()).exp()
    if not ((ratio - p).abs() < 1e-6).any():
        assert kept(logits, min_p=p) == theirs


@settings(deadline=None, max_examples=60)
@given(distinct, st.integers(0, VOCAB), st.floats(0.05, 1.0), st.floats(0.0, 0.5))
def test_together_they_apply_in_order(logits, k, p, m):
    expected = naive(logits, k, p, m)
    ours = kept(logits, top_k=k, top_p=p, min_p=m)
    if ours != expected:
        assert len(set(ours) ^ set(expected)) == 1  # a token on the boundary, within rounding


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}])
def test_tokens_that_are_equally_likely_stay_together(limits):
    logits = torch.full((VOCAB,), -9.0)
    logits[[5, 17, 23, 41]] = 2.0
    assert kept(logits, **limits) == [5, 17, 23, 41]


def test_top_p_of_zero_keeps_the_most_likely_token():
    logits = torch.arange(VOCAB).float()
    assert kept(logits, top_p=0.0) == [VOCAB - 1]


@settings(deadline=None, max_examples=60)
@given(distinct, st.integers(0, 8), st.floats(0.05, 1.0), st.floats(0.0, 0.9))
def test_a_narrow_truncation_is_final_only_if_it_holds_every_kept_token(logits, k, p, m):
    row = (logits - logits.max())[None]
    limits = {
        "top_k": torch.tensor([k], dtype=torch.int32),
        "top_p": torch.tensor([p]),
        "min_p": torch.tensor([m]),
    }
    narrow, whole = truncate(row, 16, **limits), truncate(row, VOCAB, **limits)
    if narrow.settled.all():
        few = dict(zip(narrow.tokens[0].tolist(), narrow.logits[0].tolist(), strict=True))
        for token, logit in zip(whole.tokens[0].tolist(), whole.logits[0].tolist(), strict=True):
            assert few.get(token, -math.inf) == logit


def test_a_flat_row_needs_the_full_truncation():
    row = torch.zeros((1, VOCAB))
    found = truncate(row, 16, top_k=torch.tensor([0]), top_p=torch.tensor([0.9]), min_p=torch.tensor([0.0]))
    assert not found.settled.any()
