"""Whole models with FlashInfer's kernel in every family that has one, against transformers."""

from __future__ import annotations

import sys

import pytest
import torch

from infd.kernels.select import CANDIDATES, insisting, select
from tests.kernels.flashinfer.documented import Package
from tests.models.test_parity import CLOSE, Pair, off, text
from tests.tiny import make

CPU = torch.device("cpu")


@pytest.mark.parametrize(("variant", "page_tokens"), [("qwen3", 16), ("gemma2", 16), ("glm4", 4)])
def test_a_chunked_prompt_batched_with_another_gives_transformers_logits(tmp_path, monkeypatch, variant, page_tokens):
    pytest.importorskip("triton")
    package = Package()
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    ops = select(CPU, torch.float32, insisting("flashinfer", CANDIDATES))
    ops.request(*CANDIDATES)
    monkeypatch.undo()
    pair = Pair(make(variant, tmp_path, head_dim=64), ops=ops, device=CPU)
    driver = pair.driver(page_tokens)
    prompt, other = text(1, 30), text(2, 12)
    ours, stranger = driver.start(prompt), driver.start(other)
    got, theirs = [], []
    for count, beside in ((13, 0), (1, 11), (16, 0), (0, 1)):
        spans = [(sequence, n) for sequence, n in ((ours, count), (stranger, beside)) if n]
        for (sequence, _), logits in zip(spans, driver.step(*spans), strict=True):
            (got if sequence is ours else theirs).append(logits)
    assert off(torch.cat(got), pair.expect(prompt)) < CLOSE
    assert off(torch.cat(theirs), pair.expect(other)) < CLOSE
    # Prompts whose last layer computes the sampled tokens alone: two plans in a step.
    both = (text(3, 19), text(4, 7))
    spans = [(driver.start(tokens), len(tokens)) for tokens in both]
    for tokens, logits in zip(both, driver.step(*spans, last=True), strict=True):
        assert off(logits, pair.expect(tokens)[-1:]) < CLOSE
    used = {"BatchPrefillWithPagedKVCacheWrapper.run", "append_paged_kv_cache", "apply_rope_with_cos_sin_cache"}
    used |= {"xqa" if variant == "qwen3" else "BatchDecodeWithPagedKVCacheWrapper.run"}  # softcap; small pages
    if variant == "gemma2":
        used |= {"gemma_rmsnorm", "gemma_fused_add_rmsnorm", "gelu_tanh_and_mul"}
    else:
        used |= {"rmsnorm", "fused_add_rmsnorm", "silu_and_mul"}
    assert used <= set(package.calls)
