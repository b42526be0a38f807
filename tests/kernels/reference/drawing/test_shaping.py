"""Penalties, masks and temperature, against transformers or a loop in float64."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from infd.kernels.families.draw import History
from infd.kernels.reference.drawing import shaping, temperature

VOCAB = 50


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 4


histories = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=4)


def padded(rows: list[list[int]], prompts: list[int], fill: int) -> History:
    """Return histories with prompts of the given lengths; positions behind the end hold `fill`."""
    width = max(map(len, rows)) + 3
    tokens = torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.int32)
    end = torch.tensor([len(row) for row in rows])
    return History(tokens, torch.arange(len(rows)), torch.tensor(prompts, dtype=torch.int32), end, width - 3)


@settings(deadline=None, max_examples=60)
@given(histories, st.floats(0.5, 2.0), st.integers(0, VOCAB - 1))
def test_repetition_counts_prompt_and_answer_as_transformers_does(rows, penalty, fill):
    logits = logits_of(len(rows))
    expected = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([row]), logits[i : i + 1].clone())
            for i, row in enumerate(rows)
        ]
    )
    history = padded(rows, [0] * len(rows), fill)
    shaping.penalize_repetition(logits, history.sequence, history, torch.full((len(rows),), penalty))
    torch.testing.assert_close(logits, expected)


@settings(deadline=None, max_examples=60)
@given(histories, st.floats(-2, 2), st.floats(-2, 2), st.integers(0, VOCAB - 1), st.data())
def test_presence_and_frequency_count_the_answer_only(rows, presence, frequency, fill, data):
    prompts = [data.draw(st.integers(0, len(row))) for row in rows]
    logits = logits_of(len(rows))
    expected = logits.double()
    for i, row in enumerate(rows):
        for token in row[prompts[i] :]:
            expected[i, token] -= frequency
        for token in set(row[prompts[i] :]):
            expected[i, token] -= presence
    history, many = padded(rows, prompts, fill), torch.ones(len(rows))
    shaping.penalize_answer(logits, history.sequence, history, presence * many, frequency * many)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=3))
def test_a_mask_allows_the_tokens_of_its_bits(allowed):
    bits = np.zeros((len(allowed), 2), dtype=np.uint32)
    for i, row in enumerate(allowed):
        for token, yes in enumerate(row):
            bits[i, token // 32] |= np.uint32(yes) << np.uint32(token % 32)
    logits = logits_of(len(allowed))
    expected = logits.masked_fill(~torch.tensor(allowed), -torch.inf)
    shaping.forbid(logits, torch.arange(len(allowed)), torch.from_numpy(bits.view(np.int32)))
    assert torch.equal(logits, expected)


def test_unlisted_rows_are_unchanged():
    logits, rows = logits_of(4), torch.tensor([1, 3])
    before, history, many = logits.clone(), padded([[3, 4], [5]], [1, 0], 0), torch.ones(2)
    shaping.forbid(logits, rows, torch.zeros(2, 2, dtype=torch.int32))
    assert (logits[rows] == -torch.inf).all()
    logits.copy_(before)
    shaping.penalize_repetition(logits, rows, history, 2 * many)
    shaping.penalize_answer(logits, rows, history, many, many)
    assert logits[[0, 2]].equal(before[[0, 2]])
    assert (logits != before).nonzero().tolist() == [[1, 3], [1, 4], [3, 5]]


def test_temperature_is_that_of_transformers_up_to_a_shift():
    logits = logits_of(2)
    largest = logits.amax(-1)
    cooled = temperature.apply(logits, largest, torch.tensor([0.3, 1.7]))
    for i, t in enumerate((0.3, 1.7)):
        expected = TemperatureLogitsWarper(t)(torch.tensor([[0]]), logits[i : i + 1])[0].softmax(-1)
        torch.testing.assert_close(cooled[i].softmax(-1), expected)


def test_a_tiny_temperature_does_not_overflow():
    logits = logits_of(1) * 1e4
    cooled = temperature.apply(logits, logits.amax(-1), torch.tensor([1e-5]))
    assert not cooled.isnan().any()
    assert cooled.amax() == 0
