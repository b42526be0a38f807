"""Limits, mirostat and the DRY penalty, against llama.cpp's recorded samplers, transformers and hand-computed cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from infd.kernels.families.draw import LONGEST_REPETITION, History, Repeats
from infd.kernels.reference.drawing import narrowing, repeats
from infd.runner.sampling import mirostat
from tests.kernels import samplers
from tests.kernels.narrowing import different, logits_of, narrowing_of

LLAMA = json.loads((Path(samplers.__file__).parent / "llama.json").read_text())


def narrowed(logits: torch.Tensor, **asked: float) -> torch.Tensor:
    found = logits.clone()
    narrowing.narrow(found, narrowing_of(logits, [asked] * len(logits)))
    return found


def kept(logits: torch.Tensor) -> list[int]:
    return (logits > -torch.inf).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("case", LLAMA["chains"], ids=lambda case: " ".join(case["asked"]))
def test_a_chain_keeps_and_cools_the_tokens_that_llama_cpp_keeps(case):
    expected = torch.full((len(case["logits"]),), -torch.inf)
    for token, logit in case["kept"].items():
        expected[int(token)] = logit
    found = narrowed(torch.tensor([case["logits"]]), **case["asked"])[0]
    assert kept(found) == kept(expected)
    torch.testing.assert_close(found.softmax(-1), expected.softmax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", LLAMA["mirostats"], ids=lambda case: f"{case['version']} {case['tau']}")
def test_mirostat_keeps_the_tokens_that_llama_cpp_keeps_step_after_step(case):
    version, tau, eta = (torch.tensor([float(case[name])]) for name in ("version", "tau", "eta"))
    mu = 2 * tau
    for step in case["steps"]:
        logits = torch.tensor([step["logits"]])
        top_k, min_p = mirostat.limits(logits - logits.amax(), version, mu)
        found = narrowed(logits, top_k=int(top_k), min_p=float(min_p), late=0.0)
        assert kept(found[0]) == step["kept"]
        mu = mirostat.adapt(found, torch.tensor([step["selected"]]), mu, tau, eta)


@pytest.mark.parametrize("number", range(len(LLAMA["repeats"])))
def test_a_dry_penalty_is_llama_cpps(number):
    case = LLAMA["repeats"][number]
    found = torch.zeros(1, 6)
    repeats.penalize(found, torch.tensor([0]), *dry(case))
    torch.testing.assert_close(-found[0], torch.tensor(case["penalties"]), rtol=1e-5, atol=1e-6)


def dry(case, vocab: int = 6) -> tuple[History, Repeats]:
    """Return the history and the parameters of a recorded penalty."""
    tokens, heads = case["tokens"], torch.zeros(vocab, dtype=torch.int32)
    tails = [breaker[1:] for breaker in case["breakers"] if len(breaker) > 1]
    table = torch.full((len(tails), max(map(len, tails), default=1)), -1, dtype=torch.int32)
    for row, tail in zip(table, tails, strict=True):
        row[: len(tail)] = torch.tensor(tail)
    for breaker in case["breakers"]:
        heads[breaker[0]] |= 1 << (tails.index(breaker[1:]) + 1) if len(breaker) > 1 else 1
    history = History(
        torch.tensor([tokens], dtype=torch.int32),
        torch.tensor([0]),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([len(tokens)]),
        len(tokens),
    )
    numbers = (torch.tensor([case[name]], dtype=torch.float32) for name in ("multiplier", "base"))
    counts = (torch.tensor([case[name]], dtype=torch.int32) for name in ("allowed", "window"))
    return history, Repeats(*numbers, *counts, heads, table)


def test_a_repetition_counts_up_to_a_limit():
    longer = LONGEST_REPETITION + 500
    case = {"tokens": [1] * longer, "multiplier": 1.0, "base": 1.001, "allowed": 3, "window": 10**6, "breakers": []}
    found = torch.zeros(1, 6)
    repeats.penalize(found, torch.tensor([0]), *dry(case))
    assert -float(found[0, 1]) == pytest.approx(1.001**LONGEST_REPETITION, rel=1e-3)


@pytest.mark.parametrize(
    ("asked", "warper"),
    [
        ({"typical_p": 0.2}, TypicalLogitsWarper(0.2)),
        ({"typical_p": 0.9}, TypicalLogitsWarper(0.9)),
        ({"top_p": 0.7}, TopPLogitsWarper(0.7)),
        ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
        ({"top_k": 9}, TopKLogitsWarper(9)),
    ],
)
def test_each_limit_is_transformers(asked, warper):
    logits = logits_of(6, 300)
    expected = warper(torch.zeros((6, 1), dtype=torch.int64), logits.clone())
    assert different(narrowed(logits, **asked), expected) == 0


def test_top_n_sigma_counts_deviations_of_the_finite_logits():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, -torch.inf]])  # the deviation is the root of 2
    assert kept(narrowed(logits, top_n_sigma=1.0)[0]) == [3, 4]
    assert kept(narrowed(logits, top_n_sigma=2.2)[0]) == [1, 2, 3, 4]


def test_xtc_keeps_the_least_likely_of_the_top_choices():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()
    asked = {"xtc_probability": 1.0}
    assert kept(narrowed(logits, **asked, xtc_threshold=0.1)[0]) == [2, 3, 4]
    assert kept(narrowed(logits, **asked, xtc_threshold=0.35)[0]) == [0, 1, 2, 3, 4]
    assert kept(narrowed(logits, **asked, xtc_threshold=0.501)[0]) == [0, 1, 2, 3, 4]


def test_xtc_drops_tokens_as_often_as_asked_and_by_seed_and_position_alone():
    seeds = torch.arange(4000, dtype=torch.int32)
    numbers = narrowing.chance(torch.stack((seeds, seeds * 7), 1), seeds * 3)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    for probability in (0.1, 0.5, 0.9):
        assert abs(float((numbers < probability).float().mean()) - probability) < 4 * math.sqrt(0.25 / 4000)
    assert numbers[7:9].equal(narrowing.chance(torch.stack((seeds, seeds * 7), 1)[7:9], (seeds * 3)[7:9]))


def test_the_temperature_is_that_of_the_entropy():
    # Half of the mass on each of two of four tokens: the entropy is 1 of 2 bits.
    logits = torch.tensor([[0.0, 0.0, -40.0, -40.0]])
    parameters = narrowing_of(logits, [{"temperature": 1.0, "range": 0.8, "exponent": 2.0}])
    assert float(narrowing.narrow(logits.clone(), parameters)) == pytest.approx(0.2 + 1.6 * 0.5**2)


def test_the_order_decides_which_tokens_are_kept():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    hot = {"temperature": 2.0, "top_p": 0.6}
    assert kept(narrowed(logits, **hot, late=1.0)[0]) == [0, 1]
    assert kept(narrowed(logits * 3, temperature=3.0, top_p=0.75, late=0.0)[0]) == [0, 1]
    assert kept(narrowed(logits * 3, temperature=3.0, top_p=0.75, late=1.0)[0]) == [0]
