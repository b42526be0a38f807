"""An encoder, which keeps no cache, on the local executor: whole prompts packed, memory released and restored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from infd.memory import ALL, Memory
from infd.request import Pool
from tests.executors.pooling import Pooler, cosine, executor, reduced, states
from tests.models.encoding import make, oracle, text

if TYPE_CHECKING:
    from pathlib import Path

SAME = 0.99999
TEXTS = [text(seed, length) for seed, length in enumerate((7, 128, 1, 40, 3, 90, 64, 2))]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("bert", tmp_path_factory.mktemp("bert"))


async def test_whole_prompts_are_packed_into_steps_as_long_as_the_longest(bert: Path):
    model = oracle(bert)
    runs = executor(bert, rows=8, mode="mean")
    try:
        capacity = await runs.load()
        assert (capacity.generates, capacity.pages, capacity.layout.divisible) == (False, 0, False)
        assert (capacity.step_tokens, capacity.mixed_tokens, capacity.max_model_len) == (128, 16, 128)
        pool = Pooler(runs, capacity)
        vectors = await pool(*((each, Pool("embed")) for each in TEXTS))
        tokens = await pool(*((each, Pool("token_embed")) for each in TEXTS))
        second = await pool((TEXTS[3], Pool("embed", second=11)))
        facts = runs.describe()
    finally:
        await runs.close()

    for each, vector, rows in zip(TEXTS, vectors, tokens, strict=True):
        hidden = states(model, each)
        assert cosine(vector[0], reduced(hidden, "mean")) > SAME
        assert cosine(rows, hidden) > SAME
    types = torch.tensor([[int(at >= 11) for at in range(len(TEXTS[3]))]])
    with torch.inference_mode():
        pair = model(torch.tensor([TEXTS[3]]), token_type_ids=types).last_hidden_state[0]
    assert cosine(second[0][0], reduced(pair, "mean")) > SAME
    assert facts["cache_dtype"] == "nothing"


async def test_memory_is_released_and_restored_and_weights_are_replaced(bert: Path, tmp_path: Path):
    model = oracle(bert)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "other")
    runs = executor(bert, mode="mean")
    try:
        pool = Pooler(runs, await runs.load())

        async def embed() -> np.ndarray:
            return (await pool((TEXTS[3], Pool("embed"))))[0]

        before = await embed()
        for level in (1, 2):
            await runs.sleep(level)
            await runs.wake(ALL)
            assert runs.memory == Memory()
            assert np.array_equal(await embed(), before)
        await runs.load_weights(str(tmp_path / "other"), str(tmp_path))
        assert cosine((await embed())[0], reduced(states(model, TEXTS[3]), "mean")) > SAME
        assert not np.allclose(await embed(), before, atol=1e-2)
    finally:
        await runs.close()
