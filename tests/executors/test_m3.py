"""bge-m3's numbers for tokens: FlagEmbedding's formulas, over the hidden states of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from infd.errors import CheckpointError
from infd.request import Pool
from tests.executors.pooling import Pooler, executor, states
from tests.models.encoding import make_m3, oracle, text

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [[0, *text(seed, length), 2] for seed, length in enumerate((7, 30, 1, 64))]


@pytest.fixture
def m3(tmp_path: Path) -> Path:
    return make_m3(tmp_path)


async def test_sparse_and_colbert_numbers_are_flagembeddings(m3: Path):
    model = oracle(m3)
    colbert, sparse = (torch.load(m3 / f"{name}_linear.pt") for name in ("colbert", "sparse"))
    runs = executor(m3, rows=8)
    try:
        capacity = await runs.load()
        assert capacity.pools == ("embed", "token_embed", "token_classify")
        pool = Pooler(runs, capacity)
        dense, vectors, weights, raw = [
            await pool(*((each, want) for each in TEXTS))
            for want in (
                Pool("embed"),
                Pool("token_embed", skip=1),
                Pool("token_classify"),
                Pool("token_classify", activation=False),
            )
        ]
    finally:
        await runs.close()

    signs = np.sign(np.concatenate(raw))
    assert {*signs.flat} == {-1, 1}, "some logits are negative"
    for number, each in enumerate(TEXTS):
        hidden = states(model, each)
        by_token = torch.nn.functional.normalize(hidden[1:] @ colbert["weight"].T + colbert["bias"], dim=-1)
        logits = hidden @ sparse["weight"].float().T + sparse["bias"].float()
        assert np.abs(dense[number][0] - (hidden[0] / hidden[0].norm()).numpy()).max() < 2e-5
        assert np.abs(vectors[number] - by_token.numpy()).max() < 2e-5
        assert np.abs(weights[number] - logits.relu().numpy()).max() < 2e-5
        assert np.abs(raw[number] - logits.numpy()).max() < 2e-5


async def test_a_layer_that_does_not_fit_is_refused_with_its_file(m3: Path):
    torch.save(torch.nn.Linear(48, 2).state_dict(), m3 / "sparse_linear.pt")
    runs = executor(m3)
    try:
        with pytest.raises(CheckpointError, match=r"sparse_linear\.weight: expected \[1, 48\], found \[2, 48\]"):
            await runs.load()
    finally:
        await runs.close()
