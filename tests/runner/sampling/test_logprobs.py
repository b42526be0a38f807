"""Log-probabilities of each mode, of listed tokens and of all tokens, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from infd.kernels.cpu.draw import Draw as Native
from infd.kernels.reference.drawing.draw import Draw as Reference
from infd.request import SamplingParams
from infd.runner.sampled import Sampled, SampledPositions
from infd.runner.sampler import Sampler
from tests.runner.driving import join, make_rows

VOCAB, PROMPT = 300, [5, 9, 7]
SHAPED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.5}
LOGITS = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(4)) * 3 + 5


@pytest.fixture(params=[Reference, Native])
def draw(request, built):
    return request.param()


def sample(draw, *asked: SamplingParams) -> Sampled:
    rows = make_rows(rows=len(asked), vocab_size=VOCAB)
    rows.stage([join(row, PROMPT, [[1]], each, seed=7) for row, each in enumerate(asked)], [])
    ids, ends = np.arange(len(asked)), np.full(len(asked), len(PROMPT))
    at = SampledPositions(torch.from_numpy(ids), torch.from_numpy(ends), ids, ends)
    return Sampler(rows, draw)(LOGITS.expand(len(asked), -1).clone(), at, None)


def params(mode: str = "raw_logprobs", logprobs: int = VOCAB, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=3, logprobs=logprobs, logprobs_mode=mode, **{"temperature": 1.0, **settings})


def processed() -> torch.Tensor:
    prompt = torch.tensor([PROMPT])
    logits = RepetitionPenaltyLogitsProcessor(1.5)(prompt, LOGITS.clone())
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9)):
        logits = warper(prompt, logits)
    return logits[0]


EXPECTED = {
    "raw_logprobs": LOGITS[0].log_softmax(-1),
    "raw_logits": LOGITS[0],
    "processed_logprobs": processed().log_softmax(-1),
    "processed_logits": processed(),
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_the_log_probabilities_of_all_tokens_are_transformers(draw, mode):
    found = sample(draw, params(mode, **SHAPED))
    assert found.scores is not None
    values = torch.full((VOCAB,), torch.nan)
    values[found.scores.top_ids[0]] = found.scores.top[0]
    torch.testing.assert_close(values, EXPECTED[mode], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.scores.chosen[0], EXPECTED[mode][found.tokens[0]], rtol=1e-5, atol=1e-5)


def test_the_mode_changes_no_token(draw):
    asked = [params(mode, **SHAPED) for mode in EXPECTED] + [SamplingParams(max_tokens=3, **SHAPED)]
    assert len(set(sample(draw, *asked).tokens.tolist())) == 1


def test_a_greedy_token_is_reported_before_temperature_and_limits(draw):
    found = sample(draw, params("processed_logprobs", temperature=0.0, top_k=2, top_p=0.1))
    assert found.scores is not None
    torch.testing.assert_close(found.scores.top[0], EXPECTED["raw_logprobs"].sort(descending=True).values)
    assert found.tokens.tolist() == [int(LOGITS.argmax())]


def test_listed_tokens_replace_the_likeliest_of_their_row(draw):
    likeliest = LOGITS[0].topk(3)
    found = sample(
        draw,
        params(logprobs=1, logprob_ids=(7, 250, 3, 8)),
        params(logprobs=3),
        params("processed_logits", logprobs=0, logprob_ids=(2,), **SHAPED),
        SamplingParams(max_tokens=3),
    )
    assert found.scores is not None
    rows = {at: (n, count) for n, (at, count) in enumerate(found.scored)}
    assert {at: count for at, (_, count) in rows.items()} == {0: 4, 1: 3, 2: 1}
    expected = {
        0: ([7, 250, 3, 8], "raw_logprobs"),
        1: (likeliest.indices.tolist(), "raw_logprobs"),
        2: ([2], "processed_logits"),
    }
    for at, (ids, mode) in expected.items():
        n, count = rows[at]
        assert found.scores.top_ids[n, :count].tolist() == ids
        torch.testing.assert_close(found.scores.top[n, :count], EXPECTED[mode][ids], rtol=1e-5, atol=1e-5)
