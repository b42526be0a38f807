"""Logits with rotary angles that depend on lengths, against transformers, for several ways of cutting into steps."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
import torch

from tests.models.driving import Driver, load_model
from tests.models.test_parity import CLOSE, off, text
from tests.tiny import make, oracle

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

AT, LENGTH = 24, 41
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1 + i / 10 for i in range(8)],
    "long_factor": [1 + i for i in range(8)],
    "original_max_position_embeddings": AT,
}
# By name: a variant of tiny.py, and its changed settings.
MODELS = MappingProxyType(
    {
        "llama longrope": ("llama", {"rope_parameters": LONGROPE}),
        "gemma3 longrope": (
            "gemma3",
            {"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": PLAIN}},
        ),
        "llama dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": AT}),
        "gemma3 dynamic": (
            "gemma3",
            {
                "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": PLAIN},
                "max_position_embeddings": AT,
            },
        ),
        "glm4 dynamic": (
            "glm4",
            {"rope_parameters": {**DYNAMIC, "partial_rotary_factor": 0.5}, "max_position_embeddings": AT},
        ),
    }
)


@pytest.fixture(scope="module", params=sorted(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant, changed = MODELS[request.param]
    return make(variant, tmp_path_factory.mktemp("model"), **changed)


def expected(directory: Path, tokens: list[int], prompt: int) -> Tensor:
    """Return transformers' logits of `tokens`, whose first `prompt` tokens are the prompt.

    Longrope depends on the final length alone. Dynamic rope also depends on how tokens were computed: the prompt at
    once, then single tokens, by a new module.
    """
    theirs = oracle(directory)
    with torch.inference_mode():
        if "longrope" in str(theirs.config.rope_parameters):
            return theirs(torch.tensor([tokens])).logits[0]
        out = theirs(torch.tensor([tokens[:prompt]]), use_cache=True)
        logits = [out.logits[0]]
        for token in tokens[prompt:]:
            out = theirs(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("prompt", [9, AT, AT + 1, LENGTH - 4])
def test_a_sequence_over_the_boundary_cut_into_steps_in_several_ways(directory, prompt):
    want = expected(directory, text(1), prompt)
    model = load_model(directory)
    for counts in ((LENGTH,), (7, 1, 16, 2, 15), (prompt, *[1] * (LENGTH - prompt)), (LENGTH - 2, 1, 1)):
        driver = Driver(model)
        sequence = driver.start(text(1), prompt=prompt)
        got = torch.cat([driver.step((sequence, count))[0] for count in counts])
        assert off(got, want) < CLOSE


def test_sequences_of_several_regimes_in_one_step(directory):
    driver = Driver(load_model(directory))
    texts = [(text(1), 30), (text(2, 20), 20), (text(3, 28), 28), (text(4), LENGTH)]
    sequences = [driver.start(tokens, prompt=prompt) for tokens, prompt in texts]
    assert len({each.regime for each in sequences}) > 1
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for counts in ((11, 1, 9, 20), (20, 19, 1, 20), (10, 0, 18, 1)):
        step = [(each, count) for each, count in zip(sequences, counts, strict=True) if count]
        for (each, _), logits in zip(step, driver.step(*step), strict=True):
            parts[sequences.index(each)].append(logits)
    for (tokens, prompt), got in zip(texts, parts, strict=True):
        assert off(torch.cat(got), expected(directory, tokens, prompt)) < CLOSE
