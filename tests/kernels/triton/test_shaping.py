"""Penalties and masks on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.families.draw import History
from infd.kernels.reference.drawing import shaping

ROWS, VOCAB, LONGEST = 6, 5003, 1500  # more than one block of tokens and of positions; no multiple of 32
SOME = [0, 2, 5]  # rows to change


@pytest.fixture
def shaped(device, unsynchronised):
    """Return a function that gives the kernel's logits, on the CPU, and the reference's."""
    from infd.kernels.triton.draw import Draw

    def both(what, rows, *given):
        logits = torch.randn((ROWS, VOCAB), generator=torch.Generator().manual_seed(1)) * 4
        logits[0, 0] = 0.0
        rows = torch.tensor(rows)
        expected, found = logits.clone(), logits.to(device, copy=True)
        getattr(shaping, what)(expected, rows, *given)
        there = [moved(each, device) for each in (rows, *given)]
        with unsynchronised():
            getattr(Draw(), what)(found, *there)
        assert not expected.equal(logits)
        return found.cpu(), expected

    return both


def moved(given, device):
    if isinstance(given, History):
        return History(*(each.to(device) for each in given[:4]), given.longest)
    return given.to(device)


def history(count: int) -> History:
    """Return histories of some of seven sequences: no generated tokens, few tokens, and many repetitions."""
    chance = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (7, LONGEST + 100), generator=chance).to(torch.int32)
    tokens[4] %= 40
    return History(
        tokens,
        torch.tensor([4, 1, 6])[:count],
        torch.tensor([700, 3, 20], dtype=torch.int32)[:count],
        torch.tensor([LONGEST, 3, 1200])[:count],
        LONGEST,
    )


def test_repeated_tokens_are_penalized_in_prompt_and_answer(shaped):
    found, expected = shaped("penalize_repetition", SOME, history(3), torch.tensor([1.3, 0.7, 2.0]))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_tokens_of_the_answer_are_penalized_as_often_as_they_occur(shaped):
    found, expected = shaped(
        "penalize_answer", SOME, history(3), torch.tensor([0.5, 1.0, -2.0]), torch.tensor([0.1, 0.3, -0.2])
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def test_a_mask_forbids_the_tokens_of_its_bits(shaped):
    bits = torch.randint(-(2**31), 2**31, (3, -(-VOCAB // 32)), generator=torch.Generator().manual_seed(3))
    bits[1] = -1
    found, expected = shaped("forbid", SOME, bits.to(torch.int32))
    assert found.equal(expected)


def test_parameters_may_be_columns_of_one_table(shaped):
    floats = torch.tensor([[0.5, 0.1], [1.0, 0.3]])
    found, expected = shaped("penalize_answer", [1, 3], history(2), floats[:, 0], floats[:, 1])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
