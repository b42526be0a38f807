"""Adapters of encoders: with a head for labels of their own, and under names with or without the family's prefix."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infd.errors import CheckpointError
from infd.request import Adapter, Pool
from tests.executors.pooling import Pooler, executor
from tests.models.encoding import make, oracle, text

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

HEAD = "AutoModelForSequenceClassification"
TEXTS = [text(seed, length) for seed, length in enumerate((9, 30, 2, 17))]


def adapted(base: PreTrainedModel, directory: Path, seed: int, **settings: Any) -> PreTrainedModel:
    """Save a random adapter of `base` into `directory`; return the model with it."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=4, target_modules=["query", "value", "intermediate.dense"], lora_alpha=8, **settings)
        model = get_peft_model(base, config)
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                tensor.normal_(0.0, 0.5 * tensor.shape[-1] ** -0.5, generator=generator)
        model.save_pretrained(directory)
    made: PreTrainedModel = model.eval()
    return made


@pytest.mark.parametrize("variant", ["bert", "roberta"])
async def test_adapters_with_heads_label_beside_each_other_as_in_peft(variant: str, tmp_path: Path):
    checkpoint = make(variant, tmp_path / "base", HEAD, num_labels=3)
    plain = oracle(checkpoint, HEAD)
    models = [adapted(oracle(checkpoint, HEAD), tmp_path / f"a{seed}", seed, task_type="SEQ_CLS") for seed in (1, 2)]
    adapters = [Adapter(f"a{seed}", 1, str(tmp_path / f"a{seed}")) for seed in (1, 2)]
    runs = executor(checkpoint, rows=8)
    try:
        capacity = await runs.load()
        for adapter in adapters:
            await runs.read_adapter(adapter, None, 2**24)
        chosen = [adapters[0], None, adapters[1], adapters[0]]
        pool = Pooler(runs, capacity, max_adapters=2, max_adapters_per_step=2)
        numbers = await pool(*((each, Pool("classify", activation=False)) for each in TEXTS), adapters=chosen)
    finally:
        await runs.close()
    references = [models[0], plain, models[1], models[0]]
    for tokens, model, found in zip(TEXTS, references, numbers, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits
        assert (torch.from_numpy(found.copy()) - expected).abs().max() < 5e-5


@pytest.mark.parametrize("headless", ["AutoModel", "AutoModelForMaskedLM"])
async def test_an_adapters_names_need_no_prefix_that_the_checkpoint_has_and_may_have_one(headless: str, tmp_path: Path):
    """An adapter trained with a head for labels, on a checkpoint without; and the other way round."""
    other = HEAD if headless == "AutoModel" else "AutoModel"

    checkpoint = make("bert", tmp_path / "base", headless)
    base = oracle(checkpoint, other)
    model = adapted(base, tmp_path / "adapter", 3)
    encoder = model.get_base_model() if other == "AutoModel" else model.get_base_model().bert
    runs = executor(checkpoint, rows=8, task="embed", mode="mean")
    adapter = Adapter("a", 1, str(tmp_path / "adapter"))
    try:
        pool = Pooler(runs, await runs.load(), max_adapters=1, max_adapters_per_step=1)
        await runs.read_adapter(adapter, None, 2**24)
        numbers = await pool(*((each, Pool("embed")) for each in TEXTS), adapters=[adapter] * len(TEXTS))
    finally:
        await runs.close()
    for tokens, found in zip(TEXTS, numbers, strict=True):
        with torch.inference_mode():
            expected = encoder(torch.tensor([tokens])).last_hidden_state[0].mean(0)
        assert (torch.from_numpy(found[0].copy()) - expected).abs().max() < 5e-5


async def test_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path):
    checkpoint = make("bert", tmp_path / "base", HEAD, num_labels=3)
    adapted(oracle(checkpoint, HEAD), tmp_path / "adapter", 1, task_type="SEQ_CLS")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    weight, bias = "base_model.model.classifier.weight", "base_model.model.classifier.bias"
    faults = {
        r"classifier\.weight: expected \[3, 48\], found \[4, 48\]": {weight: torch.ones(4, 48)},
        r"classifier\.bias: missing": {bias: None},
        "modules_to_save names classifier, score, which the file does not hold": {weight: None, bias: None},
        r"pooler\.dense\.weight: a whole tensor": {"base_model.model.bert.pooler.dense.weight": torch.ones(48, 48)},
        r"classifier\.weight: holds NaN": {weight: torch.full((3, 48), torch.nan)},
    }
    runs = executor(checkpoint)
    try:
        await runs.load()
        for reason, changed in faults.items():
            save_file({name: each for name, each in {**tensors, **changed}.items() if each is not None}, file)
            with pytest.raises(CheckpointError, match=reason):
                await runs.read_adapter(Adapter("a", 1, str(tmp_path / "adapter")), None, 2**24)
    finally:
        await runs.close()
