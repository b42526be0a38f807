"""Rows with different sampling share a step, and each gets its result of a step alone."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from infd.kernels.reference.drawing import draw as module
from infd.request import SamplingParams
from infd.runner.sampled import NOT_FINITE, NOTHING_ALLOWED, SOUND, Sampled, SampledPositions
from infd.runner.sampler import Sampler
from infd.scheduler.plan import Draft
from tests.runner.driving import join, make_rows

VOCAB = 600
PROMPT = [5, 9, 5, 7]
ANSWER = [9, 11, 11]


def params(**settings) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **settings})


MIXED = [
    params(),
    params(temperature=1.0),
    params(temperature=0.7, top_k=20),
    params(temperature=1.3, top_p=0.9),
    params(temperature=1.0, min_p=0.05, logprobs=3),
    params(repetition_penalty=1.3),
    params(presence_penalty=0.5, frequency_penalty=0.7),
    params(temperature=0.9, top_p=0.999, repetition_penalty=0.8, logit_bias={3: 4.0, 7: -100.0}),
    params(min_tokens=5, logprobs=0),
    params(temperature=2.0, min_tokens=2, top_k=400, top_p=0.95, min_p=0.001),
    params(temperature=1.0, allowed_token_ids=(3, 77, 410)),
    params(bad_words=((11, 11, 5), (8,)), top_k=3, temperature=0.5),
]


def ready(asked: list[SamplingParams], *, end_ids: frozenset[int] = frozenset({2, 4})):
    """Return rows that have generated ANSWER after PROMPT, a sampler over them, and the positions to sample."""
    rows = make_rows(rows=len(asked), vocab_size=VOCAB)
    rows.stage(
        [
            join(row, PROMPT + ANSWER, [[1, 2]], each, prompt=len(PROMPT), end_ids=end_ids, seed=100 + row)
            for row, each in enumerate(asked)
        ],
        [],
    )
    ids = np.arange(len(asked))
    ends = np.full(len(asked), len(PROMPT + ANSWER))
    return (
        rows,
        Sampler(rows, module.Draw()),
        SampledPositions(torch.from_numpy(ids), torch.from_numpy(ends), ids, ends),
    )


def pick(asking: SampledPositions, which: list[int]) -> SampledPositions:
    index = torch.tensor(which)
    return SampledPositions(asking.rows[index], asking.ends[index], asking.row_ids[which], asking.positions[which])


def logits_of(count: int, *, scale: float = 2.0) -> torch.Tensor:
    return torch.randn((count, VOCAB), generator=torch.Generator().manual_seed(count)) * scale


def sample_one(logits: torch.Tensor, asked: SamplingParams, mask=None, **kwargs) -> Sampled:
    _, sampler, asking = ready([asked], **kwargs)
    return sampler(logits[None].clone(), asking, mask)


@pytest.mark.parametrize("order", [list(range(len(MIXED))), list(reversed(range(len(MIXED)))), [3, 0, 9, 4]])
def test_a_row_gets_the_same_token_alone_and_in_a_batch(order):
    logits = logits_of(len(MIXED))
    _, sampler, asking = ready(MIXED)
    alone = [int(sampler(logits[i : i + 1].clone(), pick(asking, [i]), None).tokens) for i in range(len(MIXED))]
    together = sampler(logits[order], pick(asking, order), None)
    assert together.tokens.tolist() == [alone[i] for i in order]
    assert together.verdict.tolist() == [SOUND] * len(order)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [list(range(len(MIXED))), [0, 1, 2, 3], [5, 6, 7], [0], [1, 2], [4, 7, 0, 9]])
def test_logits_of_16_bits_are_sampled_as_the_same_numbers_in_float32(dtype, which):
    logits = logits_of(len(which)).to(dtype)
    logits[:, :50] = logits.amax()  # equally likely tokens
    logits[-1, 60] = torch.inf
    mask = np.full((len(which), -(-VOCAB // 32)), -1, dtype=np.int32)
    mask[0, 0] = 0b1010
    for allowed in (None, mask):
        rows, sampler, asking = ready(MIXED)
        wide = sampler(logits.float(), pick(asking, which), allowed)
        narrow = sampler(logits.clone(), pick(asking, which), allowed)
        assert narrow.tokens.equal(wide.tokens)
        assert narrow.verdict.equal(wide.verdict)
        assert rows.tokens[which, len(PROMPT + ANSWER)].tolist() == narrow.tokens.tolist()
        assert narrow.scored == wide.scored
        if wide.scores is not None:
            assert all(map(torch.equal, narrow.scores, wide.scores))


class Watched(module.Draw):
    """Notes the dtype of logits, and the number of rows, whose likeliest token is sought or that are sampled from."""

    def __init__(self) -> None:
        super().__init__()
        self.sought: list[tuple[torch.dtype, int]] = []
        self.sampled: list[tuple[torch.dtype, int]] = []

    def largest(self, logits):
        self.sought.append((logits.dtype, len(logits)))
        return super().largest(logits)

    def __call__(self, logits, drawing, *, truncated):
        self.sampled.append((logits.dtype, len(drawing.rows)))
        return super().__call__(logits, drawing, truncated=truncated)


def test_only_rows_whose_logits_are_changed_are_widened():
    asked = [params(), params(temperature=1.0), params(logit_bias={3: 1.0}), params(temperature=1.0, min_tokens=9)]
    rows, _, asking = ready(asked)
    watched = Watched()
    Sampler(rows, watched)(logits_of(len(asked)).bfloat16(), asking, None)
    assert watched.sought == [(torch.bfloat16, 4), (torch.float32, 2)]
    assert watched.sampled == [(torch.bfloat16, 1), (torch.float32, 1)]


def test_masked_rows_are_neither_widened_nor_copied():
    asked = [params(), params(temperature=1.0), params(allowed_token_ids=(7, 8))]
    rows, _, asking = ready(asked)
    watched, logits = Watched(), logits_of(len(asked)).bfloat16()
    sampled = Sampler(rows, watched)(logits, asking, bits({31, 599}, None, None))
    assert watched.sought == [(torch.bfloat16, 3)], "one pass over all rows"
    assert watched.sampled == [(torch.bfloat16, 1)]
    assert logits[0].isfinite().nonzero().flatten().tolist() == [31, 599], "masked in place"
    assert sampled.tokens[0] in (31, 599)
    assert sampled.tokens[2] in (7, 8)


def test_a_masked_token_that_a_graph_had_appended_is_replaced():
    logits = logits_of(2)
    rows, sampler, asking = ready([params(), params()])
    appended = sampler.likeliest(logits)
    rows.append(asking.rows, asking.ends, appended.tokens)
    mask = bits(None, {int(logits[1].argmin())})
    tokens = sampler(logits, asking, mask, appended).tokens.tolist()
    assert tokens == [int(appended.tokens[0]), int(logits_of(2)[1].argmin())]
    assert rows.tokens[:2, len(PROMPT + ANSWER)].tolist() == tokens
    assert rows.length[:2].tolist() == [len(PROMPT + ANSWER) + 1] * 2


def test_a_mask_that_allows_the_likeliest_token_changes_no_logit():
    logits = logits_of(4)
    first, second, *_, last = logits.argmax(-1).tolist()
    rows, _, asking = ready([params(), params(temperature=3.0), params(), params()])
    cases = [
        ((None, None), 0),
        (({31, 599}, None), 1),
        (({second, 31}, None), 1),
        ((None, {32}), 1),
        ((set(), set()), 1),
    ]
    for others, passes in cases:
        for spoilt in (False, True):  # by a token that is not allowed, which the likeliest tokens were found beside
            given, mask = logits.clone(), bits({first, 7}, *others, {last, 9})
            likeliest = Sampler(rows, module.Draw()).likeliest(given)
            if spoilt:
                given[3, 40] = torch.nan
                likeliest.verdict[3] = NOT_FINITE
            watched = Watched()
            found = Sampler(rows, watched)(given.clone(), asking, mask, likeliest)
            assert len(watched.sought) == (passes or spoilt)
            expected = Sampler(rows, module.Draw())(given.clone(), asking, mask)
            assert found.tokens[expected.verdict == SOUND].equal(expected.tokens[expected.verdict == SOUND])
            assert found.verdict.equal(expected.verdict)


def test_sampled_tokens_are_appended_to_their_rows():
    rows, sampler, asking = ready(MIXED)
    sampled = sampler(logits_of(len(MIXED)), asking, None)
    assert rows.tokens[: len(MIXED), len(PROMPT + ANSWER)].tolist() == sampled.tokens.tolist()
    assert rows.length[: len(MIXED)].tolist() == [len(PROMPT + ANSWER) + 1] * len(MIXED)


def test_greedy_takes_the_largest_logit():
    logits = logits_of(1)[0]
    assert sample_one(logits, params()).tokens.item() == logits.argmax()


def test_greedy_is_greedy_whatever_the_truncation():
    logits = logits_of(1)[0]
    assert sample_one(logits, params(top_k=5, top_p=0.1, min_p=0.9)).tokens.item() == logits.argmax()


def test_a_seed_decides_the_token_and_another_seed_another():
    logits = torch.zeros((1, VOCAB))
    rows, sampler, asking = ready([params(temperature=1.0)])
    first = sampler(logits.clone(), asking, None).tokens.item()
    assert sampler(logits.clone(), asking, None).tokens.item() == first
    rows.stage([join(0, PROMPT + ANSWER, [[1, 2]], params(temperature=1.0), seed=101)], [])
    assert sampler(logits.clone(), asking, None).tokens.item() != first


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.5}])
def test_samples_are_among_the_tokens_that_truncation_kept(limits):
    logits = torch.full((VOCAB,), -20.0)
    logits[[10, 20, 30]] = torch.tensor([3.0, 2.9, 2.8])
    seen = Counter()
    rows, sampler, asking = ready([params(temperature=1.0, **limits)])
    for seed in range(60):
        rows.stage([join(0, PROMPT + ANSWER, [[1, 2]], params(temperature=1.0, **limits), seed=seed)], [])
        seen[sampler(logits[None].clone(), asking, None).tokens.item()] += 1
    expected = {10, 20} if "top_p" in limits else {10, 20, 30}
    assert set(seen) == expected


def test_a_distribution_too_flat_for_the_first_look_is_looked_at_further_down(monkeypatch):
    logits = logits_of(1, scale=0.01)
    whole = sample_one(logits[0], params(temperature=1.0, top_p=0.9)).tokens.item()
    monkeypatch.setattr(module, "WIDTH", 4)
    monkeypatch.setattr(module, "WIDER", 2)
    assert sample_one(logits[0], params(temperature=1.0, top_p=0.9)).tokens.item() == whole


def test_penalties_read_the_history_of_the_row():
    logits = torch.zeros(VOCAB)
    logits[[5, 7, 9, 11, 13]] = torch.tensor([4.0, 3.9, 3.8, 3.7, 1.0])
    # The repetition penalty halves tokens of prompt and answer.
    logits[20] = 2.5
    assert sample_one(logits, params(repetition_penalty=2.0)).tokens.item() == 20
    # Presence and frequency leave the prompt's 5 alone, and count 11 twice.
    assert sample_one(logits, params(presence_penalty=2.0)).tokens.item() == 5
    logits[5] = 0.0
    logits[7] = 0.0
    assert sample_one(logits, params(frequency_penalty=1.0)).tokens.item() == 9


def test_an_answer_below_min_tokens_cannot_end_and_one_that_has_them_can():
    logits = torch.zeros(VOCAB)
    logits[4], logits[2], logits[50] = 9.0, 8.0, 7.0
    assert sample_one(logits, params(min_tokens=len(ANSWER) + 1)).tokens.item() == 50
    assert sample_one(logits, params(min_tokens=len(ANSWER))).tokens.item() == 4


def test_min_tokens_hold_while_many_drafts_are_in_flight():
    logits = torch.zeros((2, VOCAB))
    logits[:, 4], logits[:, 50] = 9.0, 7.0
    rows, sampler, asking = ready([params(min_tokens=len(ANSWER) + 2)])
    rows.stage([], [], [Draft(0, len(PROMPT + ANSWER), [8] * 15)])
    for _ in range(2):  # the host plans 7 steps of 15 wrong drafts ahead; each sample adds one known token
        at = replace(asking, ends=rows.length[:1].clone(), positions=asking.positions + 7 * 15)
        assert sampler(logits[:1].clone(), at, None).tokens.item() == 50
    at = replace(asking, ends=rows.length[:1].clone())
    assert sampler(logits[:1].clone(), at, None).tokens.item() == 4


def test_a_row_that_has_min_tokens_is_not_shaped():
    drawing = Watched()
    rows, _, asking = ready([params(min_tokens=len(ANSWER) + 1)])
    sampler = Sampler(rows, drawing)
    for _ in range(2):
        sampler(logits_of(1).to(torch.bfloat16), replace(asking, ends=rows.length[:1].clone()), None)
    assert drawing.sought == [(torch.bfloat16, 1), (torch.float32, 1), (torch.bfloat16, 1)]


def test_logprobs_are_those_of_the_raw_logits():
    logits = logits_of(1)[0]
    asked = params(temperature=0.3, logprobs=4, logit_bias={17: 100.0}, repetition_penalty=1.5)
    sampled = sample_one(logits, asked)
    expected = logits.double().log_softmax(-1)

    assert sampled.tokens.item() == 17
    assert sampled.scored == [(0, 4)]
    assert math.isclose(sampled.scores.chosen.item(), expected[17], abs_tol=1e-5)
    assert sampled.scores.top_ids.tolist() == [expected.topk(4).indices.tolist()]
    torch.testing.assert_close(sampled.scores.top.double(), expected.topk(4).values[None], atol=1e-5, rtol=1e-5)


def test_only_rows_that_ask_are_scored():
    _, sampler, asking = ready(MIXED)
    sampled = sampler(logits_of(len(MIXED)), asking, None)
    assert sampled.scored == [(4, 3), (8, 0)]
    assert len(sampled.scores.chosen) == 2


def bits(*allowed: set[int] | None) -> np.ndarray:
    """Return a mask; None allows everything."""
    mask = np.zeros((len(allowed), -(-VOCAB // 32)), dtype=np.uint32)
    for i, tokens in enumerate(allowed):
        if tokens is None:
            mask[i] = 0xFFFFFFFF
        for token in tokens or ():
            mask[i, token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


def test_a_mask_binds_its_own_row():
    logits = logits_of(3)
    _, sampler, asking = ready([params(), params(temperature=1.0), params()])
    tokens = sampler(logits.clone(), asking, bits(None, {31, 599}, {32})).tokens.tolist()
    assert tokens[0] == logits[0].argmax()
    assert tokens[1] in {31, 599}
    assert tokens[2] == 32


def test_only_allowed_tokens_are_chosen_and_a_grammar_narrows_them():
    logits = logits_of(3)
    asked = [params(allowed_token_ids=(40, 31, 599)), params(), params(temperature=1.0, allowed_token_ids=(7,))]
    _, sampler, asking = ready(asked)
    expected = [max((31, 40, 599), key=lambda token: logits[0, token]), int(logits[1].argmax()), 7]

    assert sampler(logits.clone(), asking, None).tokens.tolist() == expected
    assert sampler(logits.clone(), asking, bits({31, 5}, {32}, None)).tokens.tolist() == [31, 32, 7]


def best_of(allowed: list[int], asked: SamplingParams) -> int:
    """Return the token chosen if the tokens of `allowed` are likely, the first most."""
    logits = torch.zeros(VOCAB)
    logits[allowed] = torch.arange(len(allowed), 0, -1).float()
    return int(sample_one(logits, asked).tokens)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ((), 20),
        (((20,),), 21),  # a word of one token never comes
        (((11, 20),), 21),  # the answer ends 9, 11, 11
        (((11, 11, 20),), 21),
        (((9, 11, 11, 20),), 21),
        (((9, 11, 20),), 20),
        (((7, 9, 11, 11, 20),), 20),  # begun in the prompt, which does not count
        (((5, 9, 5, 7, 9, 11, 11, 3, 3, 20),), 20),  # longer than all there is
        (((9, 20), (11, 20)), 21),  # two that end alike, one of them under way
        (((11, 20), (9, 20)), 21),
        (((11, 20), (11, 11, 20), (20, 21), (21,)), 22),
    ],
)
def test_the_token_that_would_complete_a_bad_word_is_not_chosen(words, chosen):
    assert best_of([20, 21, 22], params(bad_words=words)) == chosen


def test_each_row_minds_its_own_bad_words():
    logits = torch.zeros((3, VOCAB))
    logits[:, 20], logits[:, 21] = 2.0, 1.0
    asked = [params(bad_words=((11, 20), (300,))), params(), params(bad_words=((9, 20), (11, 21), (11, 20)))]
    _, sampler, asking = ready(asked)

    assert sampler(logits.clone(), asking, None).tokens.tolist()[:2] == [21, 20]
    assert sampler(logits.clone(), asking, None).tokens.tolist()[2] not in (20, 21)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(temperature, bad):
    logits = logits_of(3)
    clean = logits[[0, 2]]
    logits[1, 77] = bad
    asked = [params(temperature=temperature, top_k=5)] * 3
    _, sampler, asking = ready(asked)
    sampled = sampler(logits, asking, None)
    assert sampled.verdict.tolist() == [SOUND, NOT_FINITE, SOUND]
    assert sampled.tokens[[0, 2]].tolist() == sampler(clean, pick(asking, [0, 2]), None).tokens.tolist()
    assert 0 <= sampled.tokens[1] < VOCAB


def test_a_logit_of_minus_infinity_is_a_token_that_cannot_be():
    logits = logits_of(1)[0]
    best = logits.argmax()
    logits[best] = -math.inf
    sampled = sample_one(logits, params())
    assert sampled.verdict.item() == SOUND
    assert sampled.tokens.item() != best


@pytest.mark.parametrize("bias", [{}, {7: 1.0}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_without_a_token_fails_its_row_alone(temperature, bias):
    logits = logits_of(3)
    logits[2, 5] = math.nan
    _, sampler, asking = ready([params(temperature=temperature, logit_bias=bias)] * 3)
    assert sampler(logits, asking, bits(set(), None, {5})).verdict.tolist() == [NOTHING_ALLOWED, SOUND, NOT_FINITE]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_fails(temperature):
    asked = params(temperature=temperature, min_tokens=8)
    sampled = sample_one(logits_of(1)[0], asked, bits({2, 4}))  # the grammar allows ends only, min_tokens none
    assert sampled.verdict.item() == NOTHING_ALLOWED
