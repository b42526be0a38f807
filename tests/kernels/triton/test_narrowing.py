"""Limits of llama.cpp's samplers and the DRY penalty on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.families.draw import History, Narrowing, Repeats
from infd.kernels.reference.drawing import narrowing
from infd.kernels.reference.drawing import repeats as reference
from tests.kernels.narrowing import CASES, different, logits_of, narrowing_of
from tests.kernels.triton.test_shaping import moved

VOCAB = 5000  # more than one block of tokens


@pytest.fixture
def narrowed(device, unsynchronised):
    """Return a function that gives the kernel's logits and temperatures, on the CPU, and the reference's."""
    from infd.kernels.triton.draw import Draw

    def both(logits, asked, rows=None):
        parameters = narrowing_of(logits, asked, rows)
        there = Narrowing(*(each.to(device) for each in parameters))
        found, expected = logits.to(device, copy=True), logits.clone()
        with unsynchronised():
            temperatures = Draw().narrow(found, there)
        return (found.cpu(), temperatures.cpu()), (expected, narrowing.narrow(expected, parameters))

    return both


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES)
def test_limits_are_the_references(narrowed, asked):
    logits = logits_of(3, VOCAB)
    logits[1, 30:] = -torch.inf
    logits[2, 100:120] = logits[2].max()  # ties
    (found, temperatures), (expected, wanted) = narrowed(logits, [asked] * 2, [1, 2])
    assert found[0].equal(logits[0])
    assert different(found, expected) <= 1
    torch.testing.assert_close(temperatures, wanted, rtol=1e-4, atol=1e-5)
    both = (found > -torch.inf) & (expected > -torch.inf)
    torch.testing.assert_close(found[both], expected[both], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tails", [[], [[1, 2], [2], [0, 0, 3]]], ids=["tokens", "tails"])
def test_dry_penalties_are_the_references(device, unsynchronised, tails):
    from infd.kernels.triton.draw import Draw

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 4, (5, 700), generator=generator).to(torch.int32)
    tokens[1, 350:700] = tokens[1, :350]
    tokens[2] = 2
    heads = torch.zeros(VOCAB, dtype=torch.int32)
    heads[3] = 1 if not tails else 0b1010
    heads[2] = 0b100 if tails else 0
    table = torch.full((len(tails), 3), -1, dtype=torch.int32)
    for row, tail in zip(table, tails, strict=True):
        row[: len(tail)] = torch.tensor(tail)
    history = History(
        tokens, torch.tensor([1, 4, 2]), torch.tensor([3, 3, 3]), torch.tensor([700, 680, 650]), longest=700
    )
    repeats = Repeats(
        torch.tensor([0.8, 1.5, 0.5]),
        torch.tensor([1.75, 1.0, 1.1]),
        torch.tensor([2, 1, 0], dtype=torch.int32),
        torch.tensor([2000, 64, 650], dtype=torch.int32),
        heads,
        table,
    )
    rows, logits = torch.tensor([0, 1, 3]), torch.randn(4, VOCAB, generator=generator)
    found, expected = logits.to(device, copy=True), logits.clone()
    reference.penalize(expected, rows, history, repeats)
    with unsynchronised():
        Draw().penalize_repeats(
            found, rows.to(device), moved(history, device), Repeats(*(each.to(device) for each in repeats))
        )
    assert not expected.equal(logits)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
