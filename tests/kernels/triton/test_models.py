"""Whole models with Triton's kernel in every family that has one, against transformers."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.reference.lora import Lora
from infd.kernels.select import CANDIDATES, insisting, select
from tests.adapters import test_experts, test_parity
from tests.adapters.making import make
from tests.models.test_parity import CLOSE, Pair, off, text

TRITON = ("attention", "norm", "rope", "activation", "experts")


@pytest.fixture
def ops(device):
    """Ops with Triton's kernels, on a CPU too."""
    ops = select(device, torch.float32, insisting("triton", CANDIDATES))
    ops.request(*TRITON)
    assert {each.family for each in ops.selection if each.chosen == "triton"} >= set(TRITON)
    from infd.kernels.triton.attention import PagedAttention

    return ops.replace(attention=PagedAttention(programs=4))  # a CPU has no number of multiprocessors


@pytest.mark.parametrize(
    "variant", ["llama", "qwen3", "gemma2", "glm4", "mixtral", "qwen2-moe", "glm4-moe", "gpt-oss", "llama4"]
)
def test_a_chunked_prompt_batched_with_another_gives_transformers_logits(tiny, device, ops, variant):
    pair = Pair(tiny(variant), ops=ops, device=device)
    driver = pair.driver()
    prompt, other = text(1, 30), text(2, 12)
    ours, stranger = driver.start(prompt), driver.start(other)
    got, theirs = [], []
    for count, beside in ((13, 0), (1, 11), (16, 1)):
        logits = driver.step((ours, count), *([(stranger, beside)] if beside else []))
        got.append(logits[0])
        theirs += logits[1:]
    assert off(torch.cat(got), pair.expect(prompt)) < CLOSE
    assert off(torch.cat(theirs), pair.expect(other)) < CLOSE


@pytest.mark.parametrize("case", ["beside attention and the gate of shared experts", "weights on inputs"])
def test_adapters_of_experts_give_pefts_logits(tiny, tmp_path, device, ops, case):
    variant, settings = test_experts.CASES[case]
    theirs = make(tiny(variant), tmp_path, **settings)
    if device.type == "cpu":  # Triton's LoRA reads copies whose rows are aligned, which slots of a CPU do not make
        ops = ops.replace(lora=Lora())
    test_parity.check_logits(test_parity.Bench(tiny(variant), device, ops), tmp_path, theirs)
