"""The sum of embeddings in native code, against torch; bitwise before the norm."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.encoder import EncoderStack
from infd.kernels.cpu.span_attention import SpanAttention
from infd.kernels.families.encoder import EncoderInputs
from infd.kernels.families.span_attention import SpanBatch
from infd.kernels.recipe import EmbeddingsRecipe, EncoderTable, LayerNormRecipe

TOKENS, POSITIONS = torch.tensor([4, 0, 9, 4, 7]), torch.arange(5)


def table(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)


def embedder(library, tables, norm=None):
    """Return a function from tokens and types to embeddings: a stacked encoder without layers."""
    recipe = EmbeddingsRecipe(tuple(EncoderTable(*each) for each in tables), norm)
    stacked, attention = EncoderStack(library).build([], recipe), SpanAttention(library)

    def embed(tokens, types=None):
        plan = attention.prepare(SpanBatch(tokens=len(tokens), offsets=[0, len(tokens)], device=tokens.device))
        return stacked(EncoderInputs(tokens, torch.arange(len(tokens)), types), None, plan, lambda: None)

    return embed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 48, 100])
def test_each_token_has_the_rounded_sum_of_its_rows_normed(library, width, dtype):
    words, types, positions = table(10, width, dtype), table(2, width, dtype), table(12, width, dtype)
    norm = LayerNormRecipe(table(1, width, dtype)[0], table(3, width, dtype)[0], 1e-5)
    kinds = torch.tensor([0, 0, 1, 1, 0])
    embed = embedder(library, [(words, "tokens"), (types, "types"), (positions[2:], "positions")])

    assert embed(TOKENS, kinds).equal(words[TOKENS] + types[kinds] + positions[POSITIONS + 2])
    assert embed(TOKENS).equal(words[TOKENS] + types[0] + positions[POSITIONS + 2])
    found = embedder(library, [(words, "tokens"), (types[1:], "none")], norm)(TOKENS, kinds)
    expected = torch.nn.functional.layer_norm(words[TOKENS] + types[1], (width,), *norm)
    torch.testing.assert_close(found, expected)


def test_many_tokens_share_the_threads_and_have_the_sums_of_few(library):
    words, positions = table(10, 100, torch.bfloat16), table(500, 100, torch.bfloat16)
    norm = LayerNormRecipe(table(1, 100, torch.bfloat16)[0], None, 1e-5)
    embed = embedder(library, [(words, "tokens"), (positions, "positions")], norm)

    many = torch.arange(500) % 10
    assert embed(many)[:5].equal(embed(many[:5]))


def test_a_row_out_of_range_is_no_number(library):
    words, positions = table(10, 20, torch.bfloat16), table(3, 20, torch.bfloat16)

    found = embedder(library, [(words, "tokens"), (positions, "positions")])(TOKENS)
    assert found.isnan().all(1).tolist() == [False, False, False, True, True]
    assert found[:3].equal(words[TOKENS[:3]] + positions[:3])
    found = embedder(library, [(words, "tokens")])(TOKENS - 5)
    assert found.isnan().all(1).tolist() == [True, True, False, True, False]
