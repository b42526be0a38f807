"""Steps of whole texts of which only embeddings are asked give what other steps give, to the bit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.kernels.cpu import encoder, library
from infd.kernels.cpu.library import BEST_FIRST
from infd.request import Pool
from infd.runner import fused_texts
from infd.runner.fused_texts import FusedTexts
from infd.runner.pulse import Pulse, Stopped
from infd.runner.start import loading
from infd.scheduler.plan import Join, Span, StepPlan, StepResult
from tests.models.encoding import VOCAB, make, text
from tests.native import kernels

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from infd.runner.readouts.readout import Reading
    from infd.runner.runner import Runner

EMBED = Pool("embed")
LENGTHS = (7, 1, 41, 70)
MODES = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken", "max": "max_tokens"}
FUSED = ("mean", "cls", "lasttoken")


def pool_by(directory: Path, reduction: str, *, normalize: bool = True, dense: bool = False) -> Path:
    """Write the files of sentence-transformers that name a checkpoint's pooling."""
    kinds = ["Transformer", "Pooling", *["Dense"] * dense, *["Normalize"] * normalize]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"name": path, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in zip(paths, kinds, strict=True)
    ]
    if dense:
        (directory / "2_Dense").mkdir()
        size = {"in_features": 48, "out_features": 24, "bias": False}
        activation = {"activation_function": "torch.nn.modules.linear.Identity"}
        (directory / "2_Dense" / "config.json").write_text(json.dumps({**size, **activation}))
        save_file({"linear.weight": torch.ones(24, 48)}, directory / "2_Dense" / "model.safetensors")
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{mode}": name == reduction for name, mode in MODES.items()}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))
    return directory


@dataclass
class Noticed:
    """Fused steps; whether the last one was computed."""

    fused: FusedTexts
    computed: bool = False

    def forward(self, spans: Sequence[Span]) -> list[Reading] | None:
        readings = self.fused.forward(spans)
        self.computed = readings is not None
        return readings


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
        """Compute a step without a batch; None: it was computed from one."""
        fused = self.runner.fused
        assert isinstance(fused, FusedTexts)
        noticed = self.runner.__dict__["fused"] = Noticed(fused)
        try:
            result = self.compute(plan)
        finally:
            self.runner.__dict__["fused"] = fused
        return result if noticed.computed else None

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
    def load(
        variant: str, reduction: str = "mean", *, dtype: str = "bfloat16", head: str = "AutoModel", **settings: bool
    ) -> Embedding:
        directory = pool_by(make(variant, tmp_path / variant, head), reduction, **settings)
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
@pytest.mark.parametrize("reduction", FUSED)
@pytest.mark.parametrize("variant", ["bert", "roberta", "mpnet", "nomic-bert"])
def test_embeddings_are_those_of_other_steps(embedding, variant, reduction, dtype):
    model = embedding(variant, reduction, dtype=dtype)
    for lengths in (LENGTHS, (41,), (1,), (2,), (1, 1), (3,), (1, 1, 1, 1), (70, 41, 7, 1, 1)):
        plan = model.plan(texts(*lengths), [EMBED] * len(lengths))
        found = model.fused_step(plan)
        assert found.pooled == model.other_step(plan).pooled
        assert sorted(found.pooled) == list(range(len(lengths)))
        assert not found.failed


@pytest.mark.parametrize("reduction", FUSED)
@pytest.mark.parametrize("isa", BEST_FIRST)
def test_in_every_instruction_set(embedding, monkeypatch, isa, reduction):
    kernels(isa)
    monkeypatch.setattr(library, "BEST_FIRST", (isa,))
    monkeypatch.setattr(library, "REFINED", {})
    model = embedding("bert", reduction)
    for lengths in (LENGTHS, (2,)):
        plan = model.plan(texts(*lengths), [EMBED] * len(lengths))
        assert model.fused_step(plan).pooled == model.other_step(plan).pooled


@pytest.mark.parametrize("reduction", FUSED)
def test_layers_computed_by_several_calls_give_what_one_call_gives(embedding, monkeypatch, reduction):
    model = embedding("mpnet", reduction)
    plan = model.plan(texts(*LENGTHS), [EMBED] * len(LENGTHS))
    expected = model.fused_step(plan).pooled
    monkeypatch.setattr(encoder, "SLICE", 1)
    monkeypatch.setattr(encoder, "SLICE_ROWS", 1)
    assert model.fused_step(plan).pooled == expected
    assert model.other_step(plan).pooled == expected


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
    with pytest.raises(KeyError):  # that adapter is not loaded
        model.fused_step(model.plan(texts(7), [EMBED], slot=1))
    assert model.fused_step(model.plan(texts(7), [EMBED], regime=1)) is None


def test_a_step_of_many_tokens_is_computed_from_a_batch(embedding, monkeypatch):
    monkeypatch.setattr(fused_texts, "MOST_TOKENS", 48)
    model = embedding("bert")
    assert model.fused_step(model.plan(texts(41, 7), [EMBED] * 2)) is not None
    assert model.fused_step(model.plan(texts(41, 8), [EMBED] * 2)) is None


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("modernbert", {}),  # has a last norm
        ("electra", {}),  # projects its embeddings
        ("bert", {"reduction": "max"}),
        ("bert", {"dense": True}),
    ],
    ids=str,
)
def test_models_with_other_parts_are_computed_from_batches(embedding, variant, settings):
    model = embedding(variant, **settings)
    assert model.runner.fused is None
    assert len(model.compute(model.plan(texts(7), [EMBED])).pooled) == 1


def test_models_that_do_not_embed_are_computed_from_batches(embedding):
    model = embedding("bert", head="AutoModelForSequenceClassification")
    assert model.runner.fused is None
    assert len(model.compute(model.plan(texts(7), [Pool("classify")])).pooled) == 1


def test_a_text_that_is_not_pooled_is_computed_from_a_batch(embedding):
    model = embedding("bert")
    plan = model.plan(texts(7), [EMBED])
    plan.spans[0].pools = 0
    assert model.fused_step(plan) is None


def test_the_next_step_reads_the_weights_that_were_loaded_meanwhile(embedding):
    model = embedding("mpnet")  # its biases by distance are computed from weights
    plan = model.plan(texts(*LENGTHS), [EMBED] * len(LENGTHS))
    before = model.fused_step(plan).pooled
    with torch.inference_mode():
        for each in model.runner.instance.model.parameters:
            if each.tensor.dim() == 2 and each.tensor.shape[0] == 32:  # buckets of distances
                each.tensor.mul_(-1)
    after = model.fused_step(plan).pooled
    assert after == model.other_step(plan).pooled
    assert after != before


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


def test_a_step_beats_before_its_layers_and_ends_there_once_stopped(embedding, monkeypatch):
    monkeypatch.setattr(encoder, "SLICE", 1)
    monkeypatch.setattr(encoder, "SLICE_ROWS", 1)
    model = embedding("bert")
    plan = model.plan(texts(7), [EMBED])
    model.fused_step(plan)
    before = model.pulse.count
    assert model.runner.fused.forward(plan.spans) is not None
    assert model.pulse.count == before + 3  # layers
    model.pulse.stop()
    with pytest.raises(Stopped):
        model.runner.fused.forward(plan.spans)


def test_results_outlive_the_next_step(embedding):
    model = embedding("bert")
    first, second = (model.plan([each], [EMBED]) for each in texts(7, 41))
    expected = model.other_step(first).pooled
    readings = model.runner.forward(first)
    model.runner.forward(second)
    assert model.runner.read(model.runner.sample(readings)).pooled == expected
