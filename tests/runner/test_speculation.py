"""Drafts change no answer, with any sampling, at any number of steps in flight."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from infd.kernels.reference.drawing.draw import Draw
from infd.request import Chain, Dry, Mirostat, SamplingParams
from infd.runner.sampled import NOT_FINITE, NOTHING_ALLOWED, SOUND, SampledPositions
from infd.runner.sampler import Sampler
from infd.runner.sampling.acceptance import kept, kept_on_host
from infd.scheduler.plan import Draft, Grant, StepPlan
from tests.drafters import Oracle
from tests.runner.driving import config, executor, generate, join, make_rows, request, span
from tests.runner.fake_model import VOCAB, FakeModel, continuation
from tests.samplings import SAMPLING, sampled

TOKENS = 18
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2], [7, 1, 8, 2, 8]]


def test_a_request_sets_each_field_of_sampling():
    params = [SamplingParams(max_tokens=1, **fields) for fields in SAMPLING.values()]
    parts = [part for each in params for part in (each, each.chain, each.dry, each.mirostat)]
    for kind in (SamplingParams, Chain, Dry, Mirostat):
        for field in msgspec.structs.fields(kind):
            values = {repr(getattr(part, field.name)) for part in parts if isinstance(part, kind)}
            assert values - {repr(field.default)} or field.name == "seed", (kind, field.name)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("window", [None, 6])
async def test_answers_are_those_without_drafts(depth: int, window: int | None):
    runs = executor(FakeModel(window=window), config(rows=4, depth=depth, step_tokens=32))
    capacity = await runs.load()
    requests = [sampled(name, PROMPTS[i % 4], max_tokens=TOKENS + i % 3, seed=i) for i, name in enumerate(SAMPLING)]
    try:
        plain = await generate(runs, capacity, requests)
        for wrong in (0.0, 0.3, 1.0):
            drafters = [
                Oracle(each.prompt, answer, wrong=wrong, short=wrong == 0.3, vocab=VOCAB, seed=i)
                for i, (each, answer) in enumerate(zip(requests, plain, strict=True))
            ]
            drafted = await generate(runs, capacity, requests, depth=depth, drafters=drafters, max_drafts=4)
            assert drafted == plain
    finally:
        await runs.close()


async def test_right_drafts_are_all_kept_and_wrong_ones_cost_no_step():
    steps = {}
    for wrong in (None, 0.0, 1.0):
        runs = executor(FakeModel(), config(rows=1, depth=1))
        capacity, prompt = await runs.load(), [3, 1, 4]
        requests = [request(prompt, SamplingParams(max_tokens=17, temperature=0.0))]
        answer = continuation(prompt, 17)
        drafters = None if wrong is None else [Oracle(prompt, answer, wrong=wrong, vocab=VOCAB)]
        before = runs.pulse()
        assert await generate(runs, capacity, requests, drafters=drafters, max_drafts=3) == [answer]
        steps[wrong] = runs.pulse() - before
        await runs.close()
    per_step = steps[None] / 17
    assert {wrong: count / per_step for wrong, count in steps.items()} == {None: 17, 0.0: 1 + 16 / 4, 1.0: 17}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_draft_is_written_behind_the_known_tokens_only(device: str):
    rows = make_rows()
    rows.device = torch.device(device)  # tokens are in the host's memory, but written by torch
    drafts = [Draft(1, 2, [50, 51, 52]), Draft(2, 1, [60]), Draft(3, 1, [70])]
    rows.stage([join(1, [5, 6, 7], [[1]]), join(2, [8], [[2]]), join(3, [4, 4, 4], [[3]])], [Grant(2, 0, 1, 9)], drafts)
    assert rows.tokens[1, :6].tolist() == [5, 6, 7, 51, 52, 0]
    assert rows.tokens[2, :3].tolist() == [8, 60, 0]
    assert rows.tokens[3, :4].tolist() == [4, 4, 4, 0]
    assert rows.length[1:4].tolist() == [3, 1, 3]
    assert rows.tables[2, 0, :3].tolist() == [2, 9, 0]


async def test_a_span_starts_at_the_last_known_token_if_drafts_before_it_were_not_kept():
    """The second plan counts on three drafts of the first, of which one is kept."""
    runs, prompt = executor(FakeModel(), config()), [3, 1, 4]
    await runs.load()
    answer = continuation(prompt, 6)
    guess = [answer[0], (answer[1] + 1) % VOCAB, answer[2], answer[3], answer[4]]
    first = runs.forward(StepPlan(0, [join(0, prompt, [[1, 2, 3]])], [], [span(0, 0, 6, samples=4)], [], []))
    assert (await first.sample()).tokens == answer[:1]
    plans = [
        StepPlan(1, [], [], [span(0, 3, 4, samples=4)], [], [Draft(0, 4, guess[1:4])]),
        StepPlan(2, [], [], [span(0, 7, 2, samples=2)], [], [Draft(0, 4, [*guess[1:], answer[5]])]),
    ]
    results = [await step.sample() for step in [runs.forward(plan) for plan in plans]]
    assert [result.tokens for result in results] == [answer[1:2], answer[2:4]]
    await runs.close()


@pytest.mark.parametrize(
    ("tokens", "inputs", "verdicts", "samples", "expected"),
    [
        ([7, 8, 9, 5], [0, 7, 8, 0], [SOUND] * 4, [3, 1], [3, 1]),
        ([7, 8, 9, 5], [0, 6, 8, 0], [SOUND] * 4, [3, 1], [1, 1]),
        ([7, 8, 9, 5], [0, 7, 8, 0], [SOUND, SOUND, NOTHING_ALLOWED, SOUND], [3, 1], [2, 1]),
        ([7, 8, 9, 5], [0, 7, 8, 0], [SOUND, NOT_FINITE, SOUND, NOT_FINITE], [3, 1], [1, 0]),
        ([7, 8, 9, 5], [0, 0, 0, 9], [SOUND] * 4, [1, 1, 2], [1, 1, 2]),
    ],
)
def test_samples_are_kept_up_to_the_first_that_is_not_anticipated(tokens, inputs, verdicts, samples, expected):
    first = torch.from_numpy(np.cumsum(samples) - samples)
    sound = torch.tensor(verdicts) == SOUND
    count = kept(torch.tensor(inputs), torch.tensor(tokens), sound, first, torch.tensor(samples), max(samples))
    assert count.tolist() == expected
    sampled = [token if verdict == SOUND else None for token, verdict in zip(tokens, verdicts, strict=True)]
    assert kept_on_host(inputs, samples, sampled.__getitem__) == expected


BOUND = 37.7  # of chi-square with 15 degrees of freedom, exceeded with a chance of 0.001


@pytest.mark.exhaustive
def test_kept_samples_have_the_law_of_the_model():
    """20,000 draws of one token and the next; half of the drafts of the first token are right, as their law says."""
    vocab, each, rounds = 16, 2000, 10
    noise = torch.Generator().manual_seed(3)
    logits = torch.randn((2, vocab), generator=noise) * 1.5
    law = logits.double().softmax(-1)
    sampling = SamplingParams(max_tokens=9, temperature=1.0)
    counts, kept_first = torch.zeros((2, vocab)), 0
    for number in range(rounds):
        rows = make_rows(rows=each, vocab_size=vocab)
        rows.stage([join(row, [1, 2, 3], [[1]], sampling, seed=each * number + row) for row in range(each)], [])
        drafts = torch.multinomial(law[0], each, replacement=True, generator=noise).tolist()
        rows.stage([], [], [Draft(row, 3, [draft]) for row, draft in enumerate(drafts)])
        of, ends = np.repeat(np.arange(each), 2), np.tile([3, 4], each)
        at = SampledPositions(torch.from_numpy(of), torch.from_numpy(ends), of, ends)
        sampled = Sampler(rows, Draw())(logits.repeat(each, 1), at, None, samples=np.full(each, 2))
        tokens, right = sampled.tokens.view(each, 2), sampled.kept == 2
        assert (tokens[:, 0] == torch.tensor(drafts)).equal(right)
        counts[0] += tokens[:, 0].bincount(minlength=vocab)
        counts[1] += tokens[right, 1].bincount(minlength=vocab)
        kept_first += int(right.sum())
    assert kept_first / each / rounds == pytest.approx(float((law[0] ** 2).sum()), abs=0.01)
    expected = law * counts.sum(1, keepdim=True)
    assert ((counts - expected) ** 2 / expected).sum(1).max() < BOUND
