"""An encoder, which keeps no cache, on the local executor: whole prompts packed, memory released and restored."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infd.memory import ALL, Memory
from infd.request import Pool
from tests import tiny as decoders
from tests.executors.pooling import Pooler, cosine, executor, reduced, states
from tests.kernels.values import draw
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


async def test_embeddings_in_bfloat16_are_near_those_of_float32(built: None, bert: Path):
    model = oracle(bert)
    runs = executor(bert, rows=8, mode="mean", dtype="bfloat16")
    try:
        vectors = await Pooler(runs, await runs.load())(*((each, Pool("embed")) for each in TEXTS))
    finally:
        await runs.close()
    for each, vector in zip(TEXTS, vectors, strict=True):
        assert cosine(vector[0], reduced(states(model, each), "mean")) > 0.999


@pytest.mark.parametrize(("form", "least"), [("int8", 0.999), ("int4", 0.9)])
async def test_quantized_weights_give_a_text_the_same_numbers_among_strangers(bert: Path, form: str, least: float):
    model = oracle(bert)
    runs = executor(bert, rows=8, mode="mean", quantization=form)
    try:
        pool = Pooler(runs, await runs.load())
        together = await pool(*((each, Pool("embed")) for each in TEXTS))
        alone = [(await pool((each, Pool("embed"))))[0] for each in TEXTS]
    finally:
        await runs.close()
    for each, one, other in zip(TEXTS, alone, together, strict=True):
        assert np.allclose(one, other, atol=1e-5 * np.abs(one).max())
        assert least < cosine(one[0], reduced(states(model, each), "mean")) < 0.99999


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


async def test_embedding_gemma_is_gemma_3_without_causality_two_dense_layers_and_a_norm(tmp_path: Path):
    from transformers import AutoConfig, AutoModel

    whole = decoders.make("gemma3", tmp_path / "whole")
    stored = json.loads((whole / "config.json").read_text())
    config = AutoConfig.for_model(**{**stored, "use_bidirectional_attention": True})
    model = AutoModel.from_pretrained(whole, config=config, attn_implementation="eager", dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Dense": "Dense", "4": "Normalize"}
    modules = [{"name": path, "path": path, "type": f"sentence_transformers.models.{kinds[path]}"} for path in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    weights = {"2_Dense": draw(96, 48, seed=1), "3_Dense": draw(48, 96, seed=2)}
    for folder, weight in weights.items():
        (tmp_path / folder).mkdir()
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
        kept = {**sizes, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
        (tmp_path / folder / "config.json").write_text(json.dumps(kept))
        save_file({"linear.weight": weight}, tmp_path / folder / "model.safetensors")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(
        '{"word_embedding_dimension": 48, "pooling_mode_mean_tokens": true}'
    )

    runs = executor(tmp_path, rows=8)
    try:
        capacity = await runs.load()
        assert (capacity.generates, capacity.pages, capacity.layout.divisible) == (False, 0, False)
        vectors = await Pooler(runs, capacity)(*((each, Pool("embed")) for each in TEXTS))
    finally:
        await runs.close()
    for each, vector in zip(TEXTS, vectors, strict=True):
        expected = reduced(states(model, each), "mean") @ weights["2_Dense"].T @ weights["3_Dense"].T
        expected = expected / expected.norm()
        assert np.abs(vector[0] - expected.numpy()).max() < 2e-5
