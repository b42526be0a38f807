"""Steps of which every token is sampled are computed by one call, and give what other steps give, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from infd.kernels.cpu import library as libraries
from infd.kernels.cpu.library import BEST_FIRST
from infd.kernels.reference.drawing.draw import Draw
from infd.request import Generate, SamplingParams
from infd.runner.expert_loads import PERIOD
from infd.runner.pulse import Pulse, Stopped
from infd.runner.readouts.sampling import Samples
from infd.runner.sampled import SampledPositions
from infd.runner.sampler import Sampler
from infd.runner.start import loading
from infd.scheduler.plan import Draft, Span, StepPlan, StepResult
from tests.native import kernels
from tests.runner.driving import join as joined
from tests.runner.test_cuda_graphs import PAGE, PROMPTS, ROWS, Served, settings
from tests.tiny import LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.runner.fused import FusedSteps
    from infd.runner.readouts.readout import Reading
    from infd.runner.rows import Rows
    from infd.runner.runner import Runner
    from infd.runner.start.assembly import Loaded

TOLD = SamplingParams(max_tokens=16, temperature=0.8, logprobs=20)
# Models with experts, windows, sinks, biases, regimes of angles, scaled embeddings and logits, and other norms.
WHOLE = (
    "qwen3",
    "llama-tied",
    "llama-biases",
    "llama-rope-dynamic",
    "qwen3-windows",
    "phi3-long",
    "gemma2-no-caps",
    "olmo2",
    "granite",
    "granite-moe",
    "glm4-moe",
    "gpt-oss",
    "phimoe",
)


@dataclass
class Stepped:
    """A model, its sequences, and the results of its steps so far. Every second row reports its likeliest tokens."""

    loaded: Loaded
    known: list[int] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    @property
    def runner(self) -> Runner:
        return self.loaded.runner

    @property
    def rows(self) -> Rows:
        return self.runner.instance.rows

    def start(self, rows: int, sampling: SamplingParams = TOLD) -> None:
        plan = Served(self.loaded).prompts(rows)
        for join in plan.joins[1::2]:
            join.wants = (Generate(sampling, frozenset({5})),)
        self.step(plan)
        self.known = [len(PROMPTS[row]) + 1 for row in range(rows)]

    def decode(self, *rows: int, drafts: int = 0, **asked: int) -> StepResult:
        """Compute the last known token of some rows, and drafts after it in every second row."""
        spans, guesses = [], []
        for row in rows:
            more = drafts if row % 2 else 0
            spans.append(Span(row, self.known[row] - 1, 1 + more, 1 + more, **asked))
            if more:
                guesses.append(Draft(row, self.known[row], [(7 * row + i) % 190 + 3 for i in range(more)]))
        result = self.step(StepPlan(1, [], [], spans, [], guesses))
        for row, accepted in zip(rows, result.accepted, strict=True):
            self.known[row] += accepted
        return result

    def step(self, plan: StepPlan) -> StepResult:
        with self.runner.active():
            result = self.runner.read(self.runner.sample(self.runner.forward(plan)))
        assert not result.failed
        self.results.append(result)
        return result

    def serve(self) -> None:
        """Compute steps of one to all rows, with drafts and without."""
        self.start(ROWS)
        for rows in ((0,), (0,), (3, 1), range(ROWS), (5, 2, 4)):
            self.decode(*rows)
        self.decode(1, 2, 3, drafts=3)
        self.decode(*range(ROWS), drafts=1)
        self.decode(0, 1)

    def equals(self, other: Stepped) -> bool:
        same = self.rows.length.equal(other.rows.length) and self.rows.tokens.equal(other.rows.tokens)
        return same and self.results == other.results


@pytest.fixture
def stepped(built, tiny) -> Callable[..., Stepped]:
    def make(
        variant: str = "qwen3", *, fused: bool = True, dtype: str = "bfloat16", cache: str = "auto", **model: str
    ) -> Stepped:
        config = settings(str(tiny(variant)), "cpu", dtype=dtype)
        changed = replace(config, model=replace(config.model, **model), cache=replace(config.cache, dtype=cache))
        found = Stepped(loading.build(changed, Pulse()))
        if not fused:
            found.runner.fused = None
        return found

    return make


class Noted:
    """Notes how many tokens the steps have that are fused."""

    def __init__(self, fused: FusedSteps) -> None:
        self._fused = fused
        self.sizes: set[int] = set()

    def forward(self, spans: list[Span]) -> list[Reading] | None:
        found = self._fused.forward(spans)
        if found is not None:
            self.sizes.add(sum(span.count for span in spans))
        return found


def compared(stepped: Callable[..., Stepped], *args: str, **settings: str) -> bool:
    fused, other = stepped(*args, **settings), stepped(*args, fused=False, **settings)
    noted = fused.runner.fused = Noted(fused.runner.fused)  # type: ignore[assignment, arg-type]
    for each in (fused, other):
        each.serve()
    assert noted.sizes == {1, 2, 3, 6, 9}
    return fused.equals(other)


@pytest.mark.parametrize("variant", WHOLE)
def test_a_fused_step_equals_another(stepped, variant):
    assert compared(stepped, variant)


@pytest.mark.parametrize("isa", BEST_FIRST)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fused_steps_equal_others_in_every_instruction_set(stepped, monkeypatch, isa, dtype):
    kernels(isa)  # skips
    monkeypatch.setattr(libraries, "BEST_FIRST", (isa,))
    monkeypatch.setattr(libraries, "REFINED", {})
    assert compared(stepped, "granite", dtype=dtype, quantization="int8", cache="int8")


@pytest.mark.parametrize("quantization", ["int4", "fp8", "mxfp4"])
def test_with_quantized_weights(stepped, quantization):
    assert compared(stepped, "qwen3", quantization=quantization)


@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "llama4"])  # bounded logits; chunks
def test_models_that_one_call_cannot_compute_are_computed_by_several(stepped, variant):
    model = stepped(variant)
    model.serve()
    assert model.runner.fused is None


@pytest.mark.parametrize(("depth", "expected"), [(None, (1, 2)), (1, (1, 1)), (3, (3, 3))])
def test_device_depth_is_also_that_of_decoding_steps(built, tiny, depth, expected):
    config = settings(str(tiny("qwen3")), "cpu")
    loaded = loading.build(replace(config, device=replace(config.device, depth=depth)), Pulse())
    assert (loaded.depth, loaded.decoding_depth) == expected


def test_weights_in_a_form_of_torch_are_not_fused(stepped):
    assert stepped("qwen3", dtype="float32").runner.fused is None


def test_steps_with_other_outputs_are_not_fused(stepped):
    model = stepped()
    model.start(2)
    fused = model.runner.fused
    row, at = 0, model.known[0] - 1
    assert fused.forward([Span(row, at, 1, 1)]) is not None
    for span in (
        Span(row, at, 1, 0),
        Span(row, at, 3, 1),
        Span(row, at, 1, 1, scores=1),
        Span(row, at, 1, 1, routes=1),
    ):
        assert fused.forward([span]) is None
        assert fused.forward([Span(1, model.known[1] - 1, 1, 1), span]) is None
    model.rows.slots[row] = 1
    assert fused.forward([Span(row, at, 1, 1)]) is None


def test_a_step_whose_sequences_have_all_ended_is_not_computed(stepped):
    model = stepped()
    model.start(2)
    sampling, ends = model.rows.sampling, frozenset(range(199))
    sampling[0] = replace(sampling[0], ends=ends)
    sampling[1] = replace(sampling[1], ends=ends, floor=len(PROMPTS[1]) + 2)  # min_tokens
    for row, computed in ((0, 0), (1, 1), (1, 1), (1, 0)):
        result = model.decode(row)
        assert (result.accepted, len(result.tokens)) == ([computed], computed)
    assert model.decode(0, 1).accepted == [0, 0]
    sampling[1] = replace(sampling[1], ends=frozenset())
    assert model.decode(0, 1).accepted == [1, 1]


def test_steps_with_more_logits_than_are_kept_are_not_fused(stepped, monkeypatch):
    monkeypatch.setattr("infd.runner.fused.LOGITS_BYTES", 4 * 199 * 3)
    model = stepped()
    model.start(4)
    fused = model.runner.fused
    spans = [Span(row, known - 1, 1, 1) for row, known in enumerate(model.known)]
    assert fused.forward(spans[:3]) is not None
    assert fused.forward(spans) is None
    assert fused.forward([Span(0, model.known[0] - 1, 4, 4)]) is None


def test_a_step_beats_before_each_layer_and_ends_there_once_stopped(stepped):
    model = stepped()
    model.start(1)
    pulse, length = model.runner.instance.pulse, model.rows.length
    before = pulse.count
    model.decode(0)
    assert pulse.count == before + LAYERS + 2  # and after forward and sample

    known, before = length.clone(), pulse.count
    pulse.stop()
    with model.runner.active(), pytest.raises(Stopped):
        model.runner.forward(StepPlan(1, [], [], [Span(0, model.known[0] - 1, 1, 1)]))
    assert pulse.count == before
    assert length.equal(known)


def test_the_experts_of_counted_steps_are_counted(stepped):
    counted = []
    for model in (stepped("granite-moe"), stepped("granite-moe", fused=False)):
        model.start(2)
        known = [*model.known]
        for _ in range(PERIOD):
            model.known = [*known]
            model.decode(0, 1)
        counted.append([each.expert_loads for each in model.results[1:] if each.expert_loads])
    assert counted[0] == counted[1]
    assert len(counted[0]) == 1


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("masks", [True, False])
@torch.inference_mode()
def test_likeliest_tokens_kept_by_one_call_are_those_that_the_sampler_keeps(stepped, drafts: bool, masks: bool):
    model, random = stepped(), np.random.default_rng(5)
    lengths, vocab = [3, 1, 5], model.rows.vocab_size
    for _ in range(100):
        counts = random.integers(1, 5, 3) if drafts else np.ones(3, dtype=np.int64)
        of = np.repeat(np.arange(3), counts)
        ends = np.concatenate([length + np.arange(count) for length, count in zip(lengths, counts, strict=True)])
        logits = torch.from_numpy(random.integers(0, 6, (len(of), vocab)).astype(np.float32))
        logits[random.random(logits.shape) < 0.0005] = random.choice([np.nan, np.inf])
        allowed = random.integers(-(2**31), 2**31, (len(of), -(-vocab // 32))).astype(np.int32)
        allowed[random.random(len(of)) < 0.3] = random.choice([-1, 0])
        best = logits.nan_to_num().argmax(-1).tolist()
        spans = [Span(row, lengths[row] - 1, n, n) for row, n in enumerate(counts.tolist())]
        mask, found = allowed if masks else None, []
        for fused in (True, False):
            rows, result = model.rows, StepResult([0] * 3, [])
            rows.stage([joined(row, [9] * length, [[1]]) for row, length in enumerate(lengths)], [], [])
            for i, (row, end) in enumerate(zip(of, ends, strict=True)):  # most drafts are the likeliest tokens
                if end > lengths[row]:
                    rows.tokens[row, end - 1] = best[i - 1] if (i + len(best)) % 4 else 1
            sampler, at = Sampler(rows, Draw()), SampledPositions(*map(torch.from_numpy, (of, ends)), of, ends + 7)
            if fused:
                (samples,) = model.runner.fused.forward(spans)
                likeliest = sampler.likeliest(logits)
                for buffer, values in zip(
                    model.runner.fused.buffers[4:-1], (at.rows, at.ends, logits, *likeliest), strict=True
                ):
                    buffer[: len(of)] = values
                rows.length[:3] = torch.tensor(lengths)
            else:
                samples = Samples(sampler, range(3), logits.clone(), at, samples=counts if drafts else None)
            samples.sample(mask)
            samples.read(result)
            texts = [rows.tokens[row, : int(rows.length[row]) - (row in result.failed)].tolist() for row in range(3)]
            found.append((result, texts, rows.length[:3].tolist(), rows.least[:3].tolist()))
        assert found[0] == found[1]


def test_a_row_whose_logits_are_not_finite_fails_alone(stepped):
    model = stepped()
    model.start(2)
    cache = model.runner.instance.cache
    page = int(model.rows.tables[1, 0, 0])
    for pages in cache:
        with torch.inference_mode():
            pages.v[page] = torch.nan
    plan = StepPlan(1, [], [], [Span(row, model.known[row] - 1, 1, 1) for row in (0, 1)])
    with model.runner.active():
        result = model.runner.read(model.runner.sample(model.runner.forward(plan)))
    assert [*result.failed] == [1]
    assert result.accepted == [1, 0]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=1, temperature=0.9, top_k=9),
        SamplingParams(max_tokens=1, temperature=0.0, repetition_penalty=1.7, logit_bias={7: 3.0}, logprobs=2),
        SamplingParams(max_tokens=1, temperature=0.0, min_tokens=9, allowed_token_ids=tuple(range(3, 90))),
    ],
)
def test_with_any_sampling(stepped, sampling):
    fused, other = stepped(), stepped(fused=False)
    for each in (fused, other):
        each.start(3, sampling)
        for _ in range(3):
            each.decode(0, 1, 2)
        each.decode(0, 1, 2, drafts=2)
    assert fused.equals(other)


assert max(map(len, PROMPTS)) > PAGE, "sequences have several pages"
