"""Steps of whole texts of which only embeddings are asked give what other steps give, to the bit."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.kernels.cpu import library
from infd.kernels.cpu.library import BEST_FIRST
from infd.request import Pool
from infd.runner import fused_texts
from infd.runner.fused_texts import FusedTexts
from infd.runner.pulse import Pulse, Stopped
from infd.runner.runner import Forwarded
from infd.runner.start import loading
from infd.scheduler.plan import Join, Span, StepPlan, StepResult
from tests.models.encoding import VOCAB, make, text
from tests.native import kernels

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from infd.runner.runner import Runner

EMBED = Pool("embed")
LENGTHS = (7, 1, 41, 70)
MODES = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}


def pool_by(directory: Path, reduction: str, *, normalize: bool = True) -> Path:
    """Write the files of sentence-transformers that name a checkpoint's pooling."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **({"2_Normalize": "Normalize"} if normalize else {})}
    modules = [{"name": path, "path": path, "type": f"sentence_transformers.models.{kinds[path]}"} for path in kinds]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{mode}": name == reduction for name, mode in MODES.items()}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))
    return directory


@dataclass
class Embedding:
    """An encoder, and what it computes of texts."""

    runner: Runner
    pulse: Pulse

    def plan(self, texts: Sequence[Sequence[int]], pools: Sequence[Pool], **fields: Any) -> StepPlan:
        joins = [
            Join(row, tokens, len(tokens), (pool,), [], 0, **fields)
            for row, (tokens, pool) in enumerate(zip(texts, pools, strict=True))
        ]
        # The spans of a step are in another order than its rows.
        spans = [Span(row, 0, len(texts[row]), 0, pools=len(texts[row])) for row in reversed(range(len(texts)))]
        return StepPlan(0, joins, [], spans)

    def compute(self, plan: StepPlan) -> StepResult:
        return self.runner.read(self.runner.sample(self.runner.forward(plan)))

    def fused_step(self, plan: StepPlan) -> StepResult | None:
        """Compute a step without a batch; None: it is not computed so."""
        fused = self.runner.fused
        assert isinstance(fused, FusedTexts)
        self.runner._batches.stage(plan)
        readings = fused.forward(plan.spans)
        if readings is None:
            return None
        return self.runner.read(self.runner.sample(Forwarded(plan, readings)))

    def other_step(self, plan: StepPlan) -> StepResult:
        """Compute a step from a batch."""
        fused = self.runner.fused
        self.runner.__dict__["fused"] = None
        try:
            return self.compute(plan)
        finally:
            self.runner.__dict__["fused"] = fused


@pytest.fixture
def embedding(built, tmp_path):
    def load(variant: str, reduction: str = "mean", *, dtype: str = "bfloat16", normalize: bool = True) -> Embedding:
        directory = pool_by(make(variant, tmp_path / f"{variant}-{reduction}-{dtype}"), reduction, normalize=normalize)
        config = Config(
            model=ModelConfig(path=str(directory), dtype=dtype),  # type: ignore[arg-type]
            device=DeviceConfig(kind="cpu", threads=2),
            scheduler=SchedulerConfig(max_num_seqs=8),
            cache=CacheConfig(bytes=2**21),
        )
        pulse = Pulse()
        return Embedding(loading.build(config, pulse).runner, pulse)

    return load


def texts(*lengths: int) -> list[list[int]]:
    return [text(seed, length) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("reduction", MODES)
@pytest.mark.parametrize("variant", ["bert", "roberta", "mpnet", "nomic-bert"])
def test_embeddings_are_those_of_other_steps(embedding, variant, reduction, dtype):
    model = embedding(variant, reduction, dtype=dtype)
    for lengths in (LENGTHS, (41,), (1, 1, 1, 1), (70, 41, 7, 1, 1)):
        plan = model.plan(texts(*lengths), [EMBED] * len(lengths))
        found = model.fused_step(plan)
        assert found.pooled == model.other_step(plan).pooled
        assert sorted(found.pooled) == list(range(len(lengths)))
        assert not found.failed


def test_in_every_instruction_set(embedding, monkeypatch):
    for isa in BEST_FIRST:
        monkeypatch.setattr(library, "BEST_FIRST", (isa,))
        with suppress(pytest.skip.Exception):
            kernels(isa)
            model = embedding("bert")
            plan = model.plan(texts(*LENGTHS), [EMBED] * len(LENGTHS))
            assert model.fused_step(plan).pooled == model.other_step(plan).pooled


@pytest.mark.parametrize(
    "asked",
    [
        {"dimensions": 8},
        {"normalize": False},
        {"skip": 2},
        {"second": 3},
        {"task": "token_embed"},
    ],
    ids=str,
)
def test_steps_of_which_more_is_asked_are_computed_from_batches(embedding, asked):
    model = embedding("bert")
    plan = model.plan(texts(7, 41), [EMBED, Pool(**{"task": "embed", **asked})])
    assert model.fused_step(plan) is None
    assert sorted(model.compute(plan).pooled) == [0, 1]

    plan = model.plan(texts(7, 41), [EMBED, Pool("embed", normalize=True)])
    assert model.fused_step(plan) is not None


def test_without_normalization_embeddings_are_computed_from_batches_unless_it_is_asked_for(embedding):
    model = embedding("bert", normalize=False)
    assert model.fused_step(model.plan(texts(7), [EMBED])) is None
    plan = model.plan(texts(7), [Pool("embed", normalize=True)])
    assert model.fused_step(plan).pooled == model.other_step(plan).pooled


def test_texts_with_adapters_or_other_angles_are_computed_from_batches(embedding):
    model = embedding("bert")
    assert model.fused_step(model.plan(texts(7), [EMBED], slot=1)) is None
    assert model.fused_step(model.plan(texts(7), [EMBED], regime=1)) is None


def test_a_step_of_fewer_tokens_than_products_need_is_computed_from_a_batch(embedding):
    model = embedding("bert")
    rows = model.runner.instance.model.least_rows
    assert model.fused_step(model.plan(texts(rows), [EMBED])) is not None
    plan = model.plan(texts(rows - 1), [EMBED])
    assert model.fused_step(plan) is None
    assert len(model.compute(plan).pooled) == 1


def test_a_step_of_many_tokens_is_computed_from_a_batch(embedding, monkeypatch):
    monkeypatch.setattr(fused_texts, "MOST_TOKENS", 48)
    model = embedding("bert")
    assert model.fused_step(model.plan(texts(41, 7), [EMBED] * 2)) is not None
    assert model.fused_step(model.plan(texts(41, 8), [EMBED] * 2)) is None


@pytest.mark.parametrize("variant", ["modernbert", "electra"])  # with a last norm; with projected embeddings
def test_models_with_other_parts_are_computed_from_batches(embedding, variant):
    model = embedding(variant)
    assert model.runner.fused is None
    assert len(model.compute(model.plan(texts(7), [EMBED])).pooled) == 1


def test_a_text_whose_hidden_states_are_not_finite_fails_alone(embedding):
    model = embedding("bert")
    plan = model.plan(texts(7, 41), [EMBED] * 2)
    expected = model.other_step(plan).pooled
    bad = set(texts(7)[0]) - set(texts(7, 41)[1])
    words = next(each for each in model.runner.instance.model.parameters if each.tensor.shape[0] == VOCAB).tensor
    with torch.inference_mode():
        words[list(bad)] = float("inf")
    found = model.fused_step(plan)

    assert list(found.failed) == [1]  # the second span
    assert found.pooled == {0: expected[0]}


def test_a_step_beats_before_its_layers_and_ends_there_once_stopped(embedding):
    model = embedding("bert")
    plan = model.plan(texts(7), [EMBED])
    before = model.pulse.count
    model.compute(plan)
    assert model.pulse.count > before
    model.pulse.stop()
    with pytest.raises(Stopped):
        model.runner.forward(plan)


def test_results_outlive_the_next_step(embedding):
    model = embedding("bert")
    first, second = (model.plan([each], [EMBED]) for each in texts(7, 41))
    expected = model.other_step(first).pooled
    readings = model.runner.forward(first)
    model.runner.forward(second)
    assert model.runner.read(model.runner.sample(readings)).pooled == expected
