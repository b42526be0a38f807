"""The sum of embeddings in native code, against torch; bitwise before the norm."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.encoder import EncoderStack
from infd.kernels.families.encoder import TableRows
from infd.kernels.recipe import LayerNormRecipe

TOKENS = torch.tensor([4, 0, 9, 4, 7])


def table(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 48, 100])
def test_each_token_has_the_rounded_sum_of_its_rows_normed(library, width, dtype):
    words, types, positions = table(10, width, dtype), table(2, width, dtype), table(12, width, dtype)
    norm = LayerNormRecipe(table(1, width, dtype)[0], table(3, width, dtype)[0], 1e-5)
    at, kinds = torch.arange(5), torch.tensor([0, 0, 1, 1, 0])
    stack = EncoderStack(library)

    found = stack.embed([TableRows(words, TOKENS), TableRows(types, kinds), TableRows(positions[2:], at)], None)
    expected = words[TOKENS] + types[kinds] + positions[at + 2]
    assert found.equal(expected)
    found = stack.embed([TableRows(words, TOKENS), TableRows(types, None)], norm)
    expected = torch.nn.functional.layer_norm(words[TOKENS] + types[0], (width,), *norm)
    torch.testing.assert_close(found, expected)


def test_a_row_out_of_range_is_no_number(library):
    words, positions = table(10, 20, torch.bfloat16), table(3, 20, torch.bfloat16)
    at, stack = torch.tensor([0, 1, 2, 3, -1]), EncoderStack(library)

    found = stack.embed([TableRows(words, TOKENS), TableRows(positions, at)], None)
    assert found.isnan().all(1).tolist() == [False, False, False, True, True]
    assert found[:3].equal(words[TOKENS[:3]] + positions[:3])
    assert stack.embed([TableRows(words, TOKENS - 5)], None).isnan().all(1).tolist() == [True, True, False, True, False]
