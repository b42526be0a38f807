"""Decoders as embedders, classifiers and rerankers: their numbers are those of transformers, however divided."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infd.errors import CheckpointError
from infd.request import Adapter, Pool
from tests.executors.pooling import Pooler, cosine, executor, reduced, states
from tests.tiny import make, oracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAME = 0.99999
EMBED = Pool("embed")
PREFIX = [(i * 53) % 190 + 3 for i in range(21)]
PROMPTS = [
    [5, 17, 30, 99],
    list(range(20, 63)),
    [7],
    [(i * 37) % 190 + 3 for i in range(25)],
    [*PREFIX, 8, 9],
    [*PREFIX, 80, 90, 100],
]
MODES = ["cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a variant of tests/tiny.py without a head, or with one for labels."""

    @cache
    def save(variant: str, labels: int = 0, *, by_token: bool = False) -> Path:
        import transformers

        whole = make(variant, tmp_path_factory.mktemp(variant))
        target = tmp_path_factory.mktemp(variant)
        kind = "AutoModel"
        if labels:
            kind = "AutoModelForTokenClassification" if by_token else "AutoModelForSequenceClassification"
        options: dict[str, Any] = {"num_labels": labels, "pad_token_id": 0} if labels else {}
        model = getattr(transformers, kind).from_pretrained(whole, dtype=torch.float32, **options)
        if labels:
            generator = torch.Generator().manual_seed(1)
            for parameter in model.score.parameters():
                parameter.data.normal_(0.0, 0.1, generator=generator)
        model.save_pretrained(target)
        return target

    return save


def headless(directory: Path, kind: str = "AutoModel"):
    import transformers

    made = getattr(transformers, kind).from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    return made.eval()


@pytest.mark.parametrize("mode", MODES)
async def test_a_decoder_gives_the_embeddings_of_transformers_packed_and_in_chunks(saved, mode: str):
    directory = saved("qwen3")
    model = headless(directory)
    runs = executor(directory, mode=mode)
    try:
        pool = Pooler(runs, await runs.load())
        wants = [(prompt, Pool("embed", skip=min(3, len(prompt) - 1) * odd)) for prompt in PROMPTS for odd in (0, 1)]
        vectors = await pool(*wants)
        tokens = await pool(*((prompt, Pool("token_embed", skip=want.skip)) for prompt, want in wants), depth=2)
    finally:
        await runs.close()

    for (prompt, want), vector, rows in zip(wants, vectors, tokens, strict=True):
        hidden = states(model, prompt)
        expected = reduced(hidden, mode, want.skip)
        assert np.allclose(vector[0], expected, atol=1e-4 * expected.abs().max())
        assert cosine(vector[0], expected) > SAME
        assert cosine(rows, hidden[want.skip :]) > SAME


@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
async def test_a_cached_prefix_or_a_preemption_changes_no_embedding(saved, mode: str):
    directory = saved("qwen3")
    model = headless(directory)
    runs = executor(directory, mode=mode, rows=4, step_tokens=24, cache=2**16)
    try:
        capacity = await runs.load()
        pool = Pooler(runs, capacity)
        prompts = [[*PREFIX, *range(n, n + 30)] for n in range(3, 9)]
        vectors = [*await pool((prompts[0], EMBED)), *await pool(*((each, EMBED) for each in prompts[1:]), depth=2)]
        hits, computed = pool.scheduler.prefix_hits, pool.computed
        again = await pool.preempting(prompts[3], after=24)
    finally:
        await runs.close()

    for prompt, vector in zip((*prompts, prompts[3]), (*vectors, again), strict=True):
        assert cosine(vector[0], reduced(states(model, prompt), mode)) > SAME
    assert (hits, computed < sum(map(len, prompts))) == ((5 * 20, True) if mode == "lasttoken" else (0, False))


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("labels", [1, 3])
async def test_labels_are_those_of_transformers(saved, labels: int, by_token: bool):
    directory = saved("qwen3", labels, by_token=by_token)
    kind = "AutoModelForTokenClassification" if by_token else "AutoModelForSequenceClassification"
    model, task = headless(directory, kind), "token_classify" if by_token else "classify"
    runs = executor(directory)
    try:
        capacity = await runs.load()
        assert (capacity.generates, capacity.pools) == (False, (task,))
        pool = Pooler(runs, capacity)
        logits = await pool(*((prompt, Pool(task, activation=False)) for prompt in PROMPTS))
        scores = await pool(*((prompt, Pool(task)) for prompt in PROMPTS))
    finally:
        await runs.close()

    for prompt, raw, scored in zip(PROMPTS, logits, scores, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits.reshape(-1, labels)
        assert np.allclose(raw, expected, atol=1e-4)
        activated = expected.sigmoid() if labels == 1 and not by_token else expected.softmax(-1)
        assert np.allclose(scored, activated, atol=1e-4)


@pytest.mark.parametrize(("architecture", "labels"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
async def test_reward_models_have_a_head_of_two_layers(saved, architecture: str, labels: int, tmp_path: Path):
    torch.manual_seed(3)
    head = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Linear(48, labels))
    model = headless(saved("qwen2"))
    stored = {f"model.{name}": each for name, each in model.state_dict().items()}
    stored |= {f"score.{name}": each for name, each in head.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**model.config.to_dict(), "architectures": [architecture]}))
    task: Any = "classify" if labels == 1 else "token_classify"
    runs = executor(tmp_path)
    try:
        capacity = await runs.load()
        assert (capacity.generates, capacity.pools) == (False, (task,))
        found = await Pooler(runs, capacity)(*((prompt, Pool(task)) for prompt in PROMPTS))
    finally:
        await runs.close()

    for prompt, numbers in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            rewards = head(states(model, prompt))
        assert np.allclose(numbers, rewards[-1:] if labels == 1 else rewards.softmax(-1), atol=1e-4)


@pytest.mark.parametrize("variant", ["qwen3", "qwen3-tied"])
@pytest.mark.parametrize("tokens", [("no", "yes"), ("yes",), ("no", "yes", "other")])
async def test_a_reranker_compares_logits_of_tokens(variant: str, tokens: tuple[str, ...], tmp_path: Path):
    directory = make(variant, tmp_path)
    ids = {"no": 12, "yes": 150, "other": 77}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": ids}}))
    model = oracle(directory)
    runs = executor(directory, label_tokens=tokens)
    try:
        pool = Pooler(runs, await runs.load())
        scores = await pool(*((prompt, Pool("classify")) for prompt in PROMPTS))
        hits = pool.scheduler.prefix_hits
    finally:
        await runs.close()

    assert hits == 20
    for prompt, score in zip(PROMPTS, scores, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1, [ids[token] for token in tokens]]
        expected = logits.softmax(-1)[1:] if len(tokens) == 2 else logits.softmax(-1)
        expected = logits.sigmoid() if len(tokens) == 1 else expected
        assert np.allclose(score[0], expected, atol=1e-5)


async def test_an_embedding_is_cut_before_it_is_normalized(saved):
    directory = saved("qwen3")
    model = headless(directory)
    runs = executor(directory, normalize="yes")
    try:
        pool = Pooler(runs, await runs.load())
        wants = Pool("embed", dimensions=10), Pool("embed", normalize=False), EMBED
        cut, raw, whole = await pool(*((PROMPTS[1], want) for want in wants))
    finally:
        await runs.close()

    expected = reduced(states(model, PROMPTS[1]), "mean")
    for vector, length in ((cut, 10), (whole, 48)):
        assert np.allclose(vector[0], torch.nn.functional.normalize(expected[:length], dim=-1), atol=1e-5)
    assert np.allclose(raw[0], expected, atol=1e-4)


async def test_a_head_for_labels_that_is_missing_is_named(tmp_path: Path):
    runs = executor(make("qwen3", tmp_path), task="classify")
    with pytest.raises(CheckpointError, match=r"score.weight: missing"):
        await runs.load()
    await runs.close()


@pytest.mark.parametrize("form", ["int8", "int4"])
async def test_quantized_weights_give_a_prompt_the_same_numbers_among_strangers(saved, form: str):
    directory = saved("qwen3")
    model = headless(directory)
    runs = executor(directory, quantization=form, mode="mean", step_tokens=200)
    try:
        pool = Pooler(runs, await runs.load(), prefix_caching=False)
        together = await pool(*((prompt, EMBED) for prompt in PROMPTS))
        alone = [(await pool((prompt, EMBED)))[0] for prompt in PROMPTS]
    finally:
        await runs.close()

    for prompt, one, other in zip(PROMPTS, alone, together, strict=True):
        assert np.allclose(one, other, atol=1e-4 * np.abs(one).max())
        assert cosine(one[0], reduced(states(model, prompt), "mean")) > (0.99 if form == "int8" else 0.9)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads what transformers deprecates
async def test_adapters_change_the_embeddings_of_their_own_requests(saved, tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    directory = saved("qwen3")
    plain = headless(directory)
    torch.manual_seed(3)
    settings = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    adapted = get_peft_model(headless(directory), settings).eval()
    adapted.save_pretrained(tmp_path)
    adapter = Adapter("tuned", 1, str(tmp_path))
    runs = executor(directory, mode="mean")
    try:
        pool = Pooler(runs, await runs.load(), max_adapters=2, max_adapters_per_step=2)
        await runs.read_adapter(adapter, None, 2**20)
        vectors = await pool(*((prompt, EMBED) for prompt in PROMPTS), adapters=[None, adapter] * 3)
    finally:
        await runs.close()

    for number, (prompt, vector) in enumerate(zip(PROMPTS, vectors, strict=True)):
        assert cosine(vector[0], reduced(states(adapted if number % 2 else plain, prompt), "mean")) > SAME
    assert cosine(vectors[1][0], reduced(states(plain, PROMPTS[1]), "mean")) < 0.99
