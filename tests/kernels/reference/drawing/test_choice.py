"""The noise is Gumbel noise, and sampled tokens have the right distribution."""

from __future__ import annotations

import math

import torch

from infd.kernels.reference.drawing import choice, noise
from infd.kernels.reference.drawing.truncation import Candidates, truncate

VOCAB = 64


def keys_of(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    low = (seeds & 0xFFFFFFFF).to(torch.int32)
    return noise.row_keys(low, (seeds >> 32).to(torch.int32), positions.to(torch.int32))


def hashed(vocab: int = VOCAB) -> torch.Tensor:
    return noise.token_hash(torch.arange(vocab))


def chi_square(observed: torch.Tensor, probability: torch.Tensor) -> float:
    """Return Pearson's statistic in standard deviations from its mean; a wrong distribution gives far more than 0."""
    expected = probability.double() * observed.sum()
    statistic = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(probability) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


DRAWS = 20_000


def test_the_choice_follows_the_softmax_over_positions_of_one_seed():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    keys = keys_of(torch.full((DRAWS,), 7), torch.arange(DRAWS))
    tokens = choice.among_all(logits.expand(DRAWS, VOCAB), keys, hashed())
    assert chi_square(tokens.bincount(minlength=VOCAB), logits.softmax(-1)) < 4


def test_the_choice_follows_the_softmax_over_seeds_at_one_position():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    keys = keys_of(torch.arange(DRAWS), torch.full((DRAWS,), 100))
    tokens = choice.among_all(logits.expand(DRAWS, VOCAB), keys, hashed())
    assert chi_square(tokens.bincount(minlength=VOCAB), logits.softmax(-1)) < 4


def test_seeds_that_differ_only_above_32_bits_differ():
    seeds = torch.arange(DRAWS) << 32
    tokens = choice.among_all(torch.zeros((DRAWS, VOCAB)), keys_of(seeds, torch.zeros(DRAWS)), hashed())
    assert chi_square(tokens.bincount(minlength=VOCAB), torch.full((VOCAB,), 1 / VOCAB)) < 4


def test_consecutive_choices_are_independent():
    vocab = 8
    for pair in (
        keys_of(torch.full((DRAWS,), 3), torch.arange(DRAWS)),
        keys_of(torch.arange(DRAWS), torch.full((DRAWS,), 3)),
    ):
        tokens = choice.among_all(torch.zeros((DRAWS, vocab)), pair, hashed(vocab))
        pairs = (tokens[:-1] * vocab + tokens[1:]).bincount(minlength=vocab * vocab)
        assert chi_square(pairs, torch.full((vocab * vocab,), 1 / vocab**2)) < 4


def test_a_large_vocabulary_has_its_unlikely_tokens_chosen_as_often_as_they_should_be():
    vocab = 50_000
    logits = torch.full((vocab,), -math.log(vocab))  # all others together are as likely as token 0
    logits[0] = 0.0
    count = 500
    tokens = choice.among_all(
        logits.expand(count, vocab), keys_of(torch.full((count,), 5), torch.arange(count)), hashed(vocab)
    )
    assert abs(int((tokens == 0).sum()) - count / 2) < 4 * math.sqrt(count / 4)
    assert len(set(tokens[tokens > 0].tolist())) > 0.98 * int((tokens > 0).sum())


def test_noise_has_the_moments_of_a_gumbel_distribution():
    values = noise.gumbel(keys_of(torch.arange(200), torch.zeros(200)), hashed(2000)).double()
    assert values.isfinite().all()
    assert abs(float(values.mean()) - 0.5772156649) < 0.01
    assert abs(float(values.var()) - math.pi**2 / 6) < 0.02


def test_noise_depends_on_the_row_alone():
    keys = keys_of(torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30]))
    together = noise.gumbel(keys, hashed())
    for i in range(3):
        assert torch.equal(noise.gumbel(keys[i : i + 1], hashed())[0], together[i])


def test_the_noise_of_a_token_is_pinned():
    # Other devices must compute equal noise, and a seed must give the same text in later versions.
    keys = keys_of(torch.tensor([42]), torch.tensor([7]))
    assert keys.tolist() == [[1041043582, 1385428533]]
    torch.testing.assert_close(noise.gumbel(keys, hashed(3)), torch.tensor([[0.1143473, -0.0220347, 0.9355881]]))


def test_a_tokens_noise_is_the_same_among_candidates_as_in_the_whole_row():
    count = 300
    logits = torch.randn((count, VOCAB), generator=torch.Generator().manual_seed(3))
    logits -= logits.amax(-1, keepdim=True)
    keys = keys_of(torch.arange(count), torch.arange(count))
    whole = Candidates(*logits.sort(-1, descending=True), torch.ones(count, dtype=torch.bool))
    assert torch.equal(choice.among(whole, keys), choice.among_all(logits, keys, hashed()))


def test_truncated_tokens_are_never_chosen():
    count = 2000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    logits -= logits.max()
    found = truncate(
        logits.expand(count, VOCAB),
        16,
        top_k=torch.full((count,), 5),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
    )
    tokens = choice.among(found, keys_of(torch.arange(count), torch.zeros(count)))
    five = logits.topk(5).indices
    assert set(tokens.tolist()) == set(five.tolist())
    observed = tokens.bincount(minlength=VOCAB)[five]
    assert chi_square(observed, logits[five].softmax(-1)) < 4


def test_a_gpu_computes_the_same_noise(gpu):
    keys = keys_of(torch.arange(100), torch.arange(100) * 7)
    on_gpu = noise.gumbel(
        keys_of(torch.arange(100).to(gpu), torch.arange(100).to(gpu) * 7), noise.token_hash(torch.arange(VOCAB).to(gpu))
    )
    torch.testing.assert_close(on_gpu.cpu(), noise.gumbel(keys, hashed()))
