"""logit_bias and min_tokens."""

from __future__ import annotations

import torch

from infd.runner.sampling import bias, floor

VOCAB = 50


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(0)) * 4


def test_bias_is_added_to_single_tokens():
    logits = logits_of(3)
    expected = logits.clone()
    expected[2, 7] += 1.5
    expected[2, 9] -= 100.0
    expected[0, 7] += 2.0
    bias.add(logits, torch.tensor([2, 2, 0]), torch.tensor([7, 9, 7]), torch.tensor([1.5, -100.0, 2.0]))
    assert torch.equal(logits, expected)


def test_min_tokens_forbids_only_the_end_ids():
    logits = logits_of(2)
    expected = logits.clone()
    expected[1, [3, 49]] = -torch.inf
    early = torch.tensor([True, True, False])
    floor.forbid(logits, torch.tensor([1, 1, 0]), torch.tensor([3, 49, 5]), early)
    assert torch.equal(logits, expected)
