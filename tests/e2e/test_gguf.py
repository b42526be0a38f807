"""A daemon with a GGUF file and an adapter: its answers are those of the same file in this process, and PEFT's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

import infd
from tests.adapters.making import make as make_adapter
from tests.e2e.test_lora import PROMPT, client, ctl, expected, likelihoods
from tests.gguf.test_text import byte_level, byte_level_keys
from tests.gguf.writing import TYPES, write
from tests.tiny import make
from tests.weights.encodings.fixtures import unpacked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 424}
SETTINGS = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": "4M", "device__threads": 1}
FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-bytes", "4M", "--set", "device.threads=1")


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "int8"])
async def test_an_adapter_of_a_gguf_model_is_loaded_and_answers_as_in_process(
    start_daemon: Start, tmp_path: Path, exact: bool
) -> None:
    keys = byte_level_keys(byte_level("llama-bpe"), "llama-bpe")
    made = make("llama", tmp_path / "made", **WIDE)
    others = {"v_proj": TYPES.Q6_K, "lm_head": TYPES.Q6_K}
    path = write(made, tmp_path / "model.gguf", TYPES.Q4_K, vocabulary=keys, others=others)
    theirs = make_adapter(unpacked(path, tmp_path / "plain"), tmp_path / "adapter", seed=1)
    settings = {**SETTINGS, "exact_activations": exact, "lora__modules": [f"tuned={tmp_path / 'adapter'}"]}
    with infd.LLM(str(path), **settings) as llm:
        alone = {name: in_process(llm, name) for name in ("model", "tuned")}
    assert max(abs(a - b) for a, b in zip(alone["model"], alone["tuned"], strict=True)) > 0.1
    if exact:
        assert alone["tuned"] == pytest.approx(expected(theirs), abs=1e-3)
        assert alone["model"] == pytest.approx(expected(theirs, alone=True), abs=1e-3)

    flags = ("--model", str(path), "--lora-root", str(tmp_path), "--exact-activations", str(exact).lower(), *FLAGS)
    daemon = start_daemon(*flags).ready()
    async with client(daemon) as api:
        assert await likelihoods(api, "model") == alone["model"]
        with pytest.raises(openai.NotFoundError):
            await likelihoods(api, "tuned")
        code, said, err = ctl(daemon, "load-lora", "tuned", "adapter", "--wait")
        assert (code, said["changed"]) == (0, True), err
        for name in ("tuned", "model", "tuned"):
            assert await likelihoods(api, name) == alone[name]
        code, said, err = ctl(daemon, "unload-lora", "tuned", "--wait")
        assert (code, said["done"]) == (0, True), err
        assert await likelihoods(api, "model") == alone["model"]


def in_process(llm: infd.LLM, model: str) -> list[float]:
    """Return the log-probability of each token of PROMPT but the first."""
    (answer,) = llm.generate([PROMPT], model=model, max_tokens=1, temperature=0, prompt_logprobs=0)
    told: Any = answer.choices[0].prompt_logprobs
    return [next(iter(each.values())).logprob for each in told[1:]]
