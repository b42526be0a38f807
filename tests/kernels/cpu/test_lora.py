"""Native LoRA against the reference: float32 within rounding; bfloat16 rounded once, where torch rounds twice."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.lora import Lora
from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.kernels.reference.lora import Lora as Reference
from tests.kernels.lora_case import RANKS, ROWS, adapter
from tests.kernels.values import draw

TOKENS, OUTPUTS = 45, 150
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def single(low: LowRank) -> LowRank:
    return LowRank(low.a.float(), [LowRankPart(part.b.float(), *part[1:]) for part in low.parts])


def close(ours: torch.Tensor, exact: torch.Tensor, size: int) -> None:
    """Compare with the float32 result; bfloat16 rounds once, at the end."""
    half = ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours.float(), exact, rtol=2**-8 if half else 2e-6, atol=2e-6 * size)


@BOTH
@pytest.mark.parametrize("inputs", [1, 7, 16, 72, 1000, 1024])
def test_each_row_gets_the_product_of_its_own_adapter(library, dtype, inputs):
    groups = [(rows, adapter(ranks, inputs, dtype=dtype)) for rows, ranks in zip(ROWS, RANKS, strict=True)]
    x, y = draw(TOKENS, inputs, seed=1, dtype=dtype), draw(TOKENS, OUTPUTS, seed=2, dtype=dtype)
    exact, given = y.float(), y.clone()
    Reference().add(exact, x.float(), [(rows, single(low)) for rows, low in groups])
    Lora(library).add(given, x, groups)

    close(given, exact, inputs)
    others = [row for row in range(TOKENS) if not any(row in rows for rows in ROWS)]
    assert given[others].equal(y[others])


@pytest.mark.parametrize("rank", [1, 3, 8, 15, 16, 17, 64, 256])
@BOTH
def test_every_rank(library, dtype, rank):
    low = adapter([rank], 64, dtype=dtype)
    x, y = draw(TOKENS, 64, seed=1, dtype=dtype), torch.zeros(TOKENS, 50, dtype=dtype)
    exact = torch.zeros(TOKENS, 50)
    Reference().add(exact, x.float(), [(torch.arange(TOKENS), single(low))])
    Lora(library).add(y, x, [(torch.arange(TOKENS), low)])

    close(y, exact, 64 * rank)


@BOTH
def test_a_table_is_looked_up(library, dtype):
    groups = [(rows, adapter(ranks, 30, table=True, dtype=dtype)) for rows, ranks in zip(ROWS, RANKS, strict=True)]
    tokens = torch.arange(TOKENS) * 7 % 30
    y = draw(TOKENS, OUTPUTS, seed=2, dtype=dtype)
    exact, given = y.float(), y.clone()
    Reference().add_rows(exact, tokens, [(rows, single(low)) for rows, low in groups])
    Lora(library).add_rows(given, tokens, groups)

    close(given, exact, 80)


def test_adapters_add_to_logits_in_float32_whatever_their_dtype(library):
    low = adapter([16], 64, dtype=torch.bfloat16)
    x, y = draw(TOKENS, 64, dtype=torch.bfloat16), draw(TOKENS, 50, seed=2)
    exact, given = y.clone(), y.clone()
    Reference().add(exact, x.float(), [(ROWS[0], single(low))])
    Lora(library).add(given, x, [(ROWS[0], low)])

    torch.testing.assert_close(given, exact, rtol=2e-6, atol=1e-3)


@BOTH
def test_rows_may_be_strided(library, dtype):
    low = adapter([5], 24, dtype=dtype)
    wide, y = draw(TOKENS, 60, dtype=dtype), torch.zeros(TOKENS, 90, dtype=dtype)
    exact = torch.zeros(TOKENS, 90)
    Reference().add(exact[:, 20:70], wide[:, 3:27].float(), [(ROWS[0], single(low))])
    Lora(library).add(y[:, 20:70], wide[:, 3:27], [(ROWS[0], low)])

    close(y, exact, 24)


@BOTH
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_bit_identical_in_any_batch(library, dtype, threads):
    low = adapter([16, 3, 16], 1000, dtype=dtype)
    x = draw(TOKENS, 1000, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone, together = torch.zeros(TOKENS, OUTPUTS, dtype=dtype), torch.zeros(TOKENS, OUTPUTS, dtype=dtype)
        for row in range(TOKENS):
            Lora(library).add(alone, x, [(torch.tensor([row]), low)])
        Lora(library).add(together, x, [(torch.arange(TOKENS), low)])
    finally:
        torch.set_num_threads(before)

    assert alone.equal(together)


def test_a_nan_stays_in_its_row_and_module(library):
    low = adapter([4, 4, 4], 72)
    low.a[5] = torch.nan
    x, y = draw(TOKENS, 72), torch.zeros(TOKENS, OUTPUTS)
    Lora(library).add(y, x, [(torch.tensor([3]), low)])

    assert y[3, 50:100].isnan().all()
    assert y[3, :50].isfinite().all()
    assert y[3, 100:].isfinite().all()
    assert not y[[row for row in range(TOKENS) if row != 3]].any()
