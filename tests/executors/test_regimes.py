"""Rotary angles that depend on lengths: the local executor answers as transformers does, in any mix of steps."""

from __future__ import annotations

import json
import shutil
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.errors import ConfigError
from infd.executors.local import LocalExecutor
from infd.request import SamplingParams
from tests.runner.driving import generate, request
from tests.tiny import make, margins, oracle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from infd.scheduler.layout import Capacity

NEW = 14
CLEAR = 1e-3  # a top-2 margin that these short sums in float32 cannot blur
PAGE_BYTES = 4 * 3 * 2 * 2 * 16 * 4  # of 4 tokens, 3 layers, keys and values, 2 heads of at most 16 float32
AT = 24  # tokens: where the models below begin to turn otherwise
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.2, 1.4],
    "long_factor": [1.7, 4.0, 9.0],
    "partial_rotary_factor": 0.5,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
# Name: a variant of tiny.py, and its changed settings.
MODELS = MappingProxyType(
    {
        "phi3": ("phi3-short", {"rope_parameters": LONGROPE, "original_max_position_embeddings": AT}),
        "phi3-window": (
            "phi3-short",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": AT, "sliding_window": 9},
        ),
        "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": AT}),
    }
)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Below the boundary, at it and above it; grown beyond it, and not; with the beginnings of others.
PROMPTS = (
    text(AT - 4),
    text(5, 1),
    text(AT),
    text(AT + 1),
    text(AT - 4),
    text(2 * AT),
    text(AT - 1, 2),
    text(AT + 7),
    text(2 * AT),
    [*text(AT + 3), *text(12, 3)],
)


@pytest.fixture(scope="module", params=sorted(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant, changed = MODELS[request.param]
    return make(variant, tmp_path_factory.mktemp(request.param), **changed)


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    return [theirs(directory, prompt) for prompt in PROMPTS]


def theirs(directory: Path, prompt: list[int]) -> list[int]:
    """Return transformers' tokens, from a new model: a dynamic model keeps state of earlier prompts."""
    made = oracle(directory).generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert (margins(torch.cat(made.logits)) > CLEAR).all(), "these answers are in doubt: choose other prompts"
    return made.sequences[0, len(prompt) :].tolist()


async def answers(
    directory: Path,
    prompts: Sequence[list[int]] = PROMPTS,
    *,
    depth: int = 1,
    rows: int = 3,
    step_tokens: int = 16,
    pages: int = 200,
    **model: object,
) -> list[list[int]]:
    """Return infd's tokens with `model` settings and pages of 4 tokens."""
    runs = LocalExecutor(
        Config(
            model=ModelConfig(path=str(directory), **{"dtype": "float32", **model}),  # type: ignore[arg-type]
            device=DeviceConfig(kind="cpu", threads=1, depth=depth),
            scheduler=SchedulerConfig(max_num_seqs=rows, step_tokens=step_tokens),
            cache=CacheConfig(bytes=pages * PAGE_BYTES, page_tokens=4),
        )
    )
    try:
        capacity: Capacity = await runs.load()
        sampling = SamplingParams(max_tokens=NEW, temperature=0.0)
        requests = [request(prompt, sampling, name=str(i)) for i, prompt in enumerate(prompts)]
        return await generate(runs, capacity, requests, depth=depth)
    finally:
        await runs.close()


@pytest.mark.parametrize(("depth", "rows", "step_tokens"), [(1, 1, 64), (1, 3, 16), (2, 3, 16), (2, 8, 40)])
async def test_answers_are_those_of_transformers_on_both_sides_of_a_boundary(
    directory, expected, depth, rows, step_tokens
):
    assert await answers(directory, depth=depth, rows=rows, step_tokens=step_tokens) == expected


async def test_a_preempted_sequence_is_recomputed_with_the_same_angles(directory, expected):
    assert await answers(directory, depth=2, rows=8, pages=18) == expected  # windows need so few that all fit


async def test_only_dynamic_rope_can_be_set_to_serve_any_length(tmp_path):
    variant, settings = MODELS["dynamic"]
    directory = make(variant, tmp_path / "dynamic", **settings)
    prompt = text(5 * AT, 4)  # 4 is the factor
    assert await answers(directory, [prompt], max_model_len=6 * AT, depth=2) == [theirs(directory, prompt)]
    variant, settings = MODELS["phi3"]
    directory = make(variant, tmp_path / "phi3", **settings)
    with pytest.raises(ConfigError, match="max_model_len is 513; the model's context length is 512 tokens"):
        await answers(directory, max_model_len=513)


def changed(directory: Path, to: Path, **settings: object) -> Path:
    """Return a checkpoint with equal weights and a changed config.json."""
    shutil.copytree(directory, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **settings}))
    return to


@pytest.mark.parametrize("model", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str)
async def test_in_fewer_bits_a_sequence_answers_as_models_of_one_regime_do(tmp_path, model):
    variant, settings = MODELS["phi3"]
    both = make(variant, tmp_path / "both", **settings)
    short, long = (
        changed(both, tmp_path / each, rope_parameters={**LONGROPE, "short_factor": factors, "long_factor": factors})
        for each in ("short_factor", "long_factor")
        for factors in [LONGROPE[each]]
    )
    expected = []
    for prompt, answer in zip(PROMPTS, await answers(short, **model), strict=True):
        due = max(0, min(NEW, AT + 1 - len(prompt)))  # under the short factors
        (rest,) = await answers(long, [prompt + answer[:due]], **model)
        expected.append((answer[:due] + rest)[:NEW])
    assert await answers(both, depth=2, **model) == expected


@pytest.mark.parametrize("model", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str)
async def test_in_fewer_bits_a_long_prompt_is_that_of_a_model_with_another_base(tmp_path, model):
    variant, settings = MODELS["dynamic"]
    directory = make(variant, tmp_path / "dynamic", **settings)
    got = await answers(directory, depth=2, **model)
    for prompt, answer in zip(PROMPTS, got, strict=True):
        ratio = DYNAMIC["factor"] * max(len(prompt), AT) / AT - (DYNAMIC["factor"] - 1)
        theta = DYNAMIC["rope_theta"] * ratio ** (16 / 14)
        other = tmp_path / str(len(prompt))
        if not other.exists():
            plain = {"rope_type": "default", "rope_theta": theta}
            changed(directory, other, rope_parameters=plain, max_position_embeddings=4 * AT)
        (first,) = await answers(other, [prompt], **model)
        assert answer[0] == first[0]
