"""Prompt scores: exact with the fake model, equal to transformers' with real checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from msgspec import structs

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.executors.local import LocalExecutor
from infd.request import SamplingParams, TokenLogprobs
from infd.runner.pulse import Pulse
from infd.runner.readouts import scoring
from infd.scheduler.plan import StepPlan
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence
from tests.engine.driving import serving
from tests.runner.driving import config, join, load, request, span
from tests.runner.fake_model import VOCAB, FakeModel, peak
from tests.tiny import oracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Many
    from pathlib import Path

    from infd.scheduler.plan import StepResult

PROMPT = [7, 1, 4, 4, 9, 30, 2]


def run(plan: StepPlan, model: FakeModel | None = None) -> StepResult:
    runner = load(model or FakeModel(), config(step_tokens=64), Pulse()).runner
    with runner.active():
        return runner.read(runner.sample(runner.forward(plan)))


def logits(prompt: list[int]) -> torch.Tensor:
    """Return the fake model's logits after each token of a prompt."""
    totals = [
        p + sum((token + layer) * (q + 1) for layer in range(2) for q, token in enumerate(prompt[: p + 1]))
        for p in range(len(prompt))
    ]
    return peak(torch.tensor(totals, dtype=torch.float32))


def check(
    told: list[TokenLogprobs], reference: torch.Tensor, targets: list[int], most: int, *, tolerance: float = 1e-5
) -> None:
    """Compare with the log-softmax of logits [M, vocab] that the targets [M] follow."""
    expected = reference.double().log_softmax(-1)
    assert len(told) == len(targets)
    for one, target, row in zip(told, targets, expected, strict=True):
        assert abs(one.chosen - row[target].item()) < tolerance
        assert one.rank == 1 + int((row > row[target]).sum())
        assert len(one.top_ids) == len(one.top) == most
        torch.testing.assert_close(
            torch.tensor(one.top).double(), row.topk(most).values, atol=tolerance, rtol=tolerance, check_dtype=False
        )
        torch.testing.assert_close(row[list(one.top_ids)], row.topk(most).values, atol=tolerance, rtol=tolerance)


def test_every_token_of_a_prompt_but_the_first_is_scored_beside_other_sequences():
    plan = StepPlan(
        0,
        [
            join(0, [5, 5], [[1]]),
            join(1, PROMPT, [[2, 3]], scored=2),
            join(2, [8, 3, 1], [[4]], scored=0),
        ],
        [],
        [span(0, 0, 2), span(1, 0, 7, scores=6), span(2, 0, 2, samples=0, scores=2)],
    )
    result = run(plan)

    assert result.accepted == [1, 1, 0]
    assert list(result.prompt_logprobs) == [1, 2]
    check(result.prompt_logprobs[1], logits(PROMPT)[:-1], PROMPT[1:], 2)
    check(result.prompt_logprobs[2], logits([8, 3, 1])[:-1], [3, 1], 0)


def test_a_chunk_is_scored_up_to_the_token_after_it():
    result = run(StepPlan(0, [join(0, PROMPT, [[1, 2]], scored=1)], [], [span(0, 0, 3, samples=0, scores=3)]))
    check(result.prompt_logprobs[0], logits(PROMPT)[:3], PROMPT[1:4], 1)


class Watched(FakeModel):
    """Remembers of how many rows logits were made."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def logits(self, hidden: torch.Tensor, adapters: object = None) -> torch.Tensor:
        self.rows.append(len(hidden))
        return super().logits(hidden)


def test_logits_are_made_a_block_at_a_time_and_never_of_fewer_than_four_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scoring, "BLOCK", 5)
    model = Watched()
    runner = load(model, config(step_tokens=64), Pulse()).runner
    model.rows.clear()
    plan = StepPlan(0, [join(0, PROMPT, [[1, 2]], scored=1)], [], [span(0, 0, 6, samples=0, scores=6)])
    with runner.active():
        result = runner.read(runner.sample(runner.forward(plan)))

    assert model.rows == [5, 4]
    check(result.prompt_logprobs[0], logits(PROMPT)[:6], PROMPT[1:], 1)


class Poisoned(FakeModel):
    """Its logits are not a number after the token 13 in the first place."""

    def logits(self, hidden: torch.Tensor, adapters: object = None) -> torch.Tensor:
        logits = super().logits(hidden)
        logits[hidden[:, 0] == 13 + 14] = torch.nan
        return logits


def test_a_prompt_whose_logits_are_not_finite_fails_alone():
    plan = StepPlan(
        0,
        [join(0, [13, 4], [[1]], scored=1), join(1, [12, 4], [[2]], scored=1)],
        [],
        [span(0, 0, 2, scores=1), span(1, 0, 2, scores=1)],
    )
    result = run(plan, Poisoned())

    assert result.failed[0].code == "RequestFailed"
    assert result.accepted == [0, 1]
    assert list(result.prompt_logprobs) == [1]


def test_more_alternatives_than_there_are_tokens_are_all_of_them():
    plan = StepPlan(0, [join(0, [1, 2], [[1]], scored=500)], [], [span(0, 0, 2, scores=1)])
    check(run(plan).prompt_logprobs[0], logits([1, 2])[:1], [2], VOCAB)


LONG = [(i * 37) % 190 + 3 for i in range(45)]
SHORT = [5, 17, 30, 99, 150]


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("depth", [1, 2])
async def test_scores_are_transformers_log_softmax_in_chunks_after_preemption_and_in_batches(
    tiny: Callable[[str], Path], kind: str, depth: int
):
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    directory = tiny("qwen3")
    settings = Config(
        model=ModelConfig(path=str(directory), dtype="float32"),
        device=DeviceConfig(kind=kind, threads=1, depth=depth),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_seqs=4, step_tokens=16),
        cache=CacheConfig(bytes=2**19, page_tokens=4),
    )
    runs = LocalExecutor(settings)
    try:
        capacity = await runs.load()
        scheduler = Scheduler(capacity)
        told = [(LONG, 3, 4), (SHORT, 0, 0), (LONG, None, 2), (LONG[:20], 5, 3)]
        sequences = [
            Sequence(
                request(
                    prompt, SamplingParams(max_tokens=new, temperature=0.0) if new else None, scored=most, name=str(i)
                )
            )
            for i, (prompt, most, new) in enumerate(told)
        ]
        for seq in sequences:
            scheduler.add(seq)
        scored: dict[Sequence, list[TokenLogprobs]] = {}
        while scheduler.running or scheduler.waiting:
            steps = [step for _ in range(depth) if (step := scheduler.plan()) is not None]
            results = [runs.forward(step.plan).sample() for step in steps]
            if not scheduler.preemptions and 16 < sequences[0].computed < len(LONG):
                scheduler.preempt(sequences[0])  # in the middle of its prompt, with a step in flight
            for step, result in zip(steps, results, strict=True):
                for outcome in scheduler.commit(step, await result):
                    if outcome.prompt_logprobs:
                        scored[outcome.seq] = outcome.prompt_logprobs
    finally:
        await runs.close()

    assert scheduler.preemptions == 1
    assert [seq in scored for seq in sequences] == [True, True, False, True]
    assert [seq.generated for seq in sequences] == [4, 0, 2, 3]
    model = oracle(directory)
    for seq, (prompt, most, _) in zip(sequences, told, strict=True):
        if most is not None:
            with torch.inference_mode():
                reference = model(torch.tensor([prompt])).logits[0, :-1]
            check(scored[seq], reference, prompt[1:], most, tolerance=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_first_token_after_cached_pages_is_as_likely_as_transformers_says(
    tiny: Callable[[str], Path], depth: int
):
    directory = tiny("qwen3")
    settings = Config(
        model=ModelConfig(path=str(directory), dtype="float32"),
        device=DeviceConfig(kind="cpu", threads=1, depth=depth),
        scheduler=SchedulerConfig(max_num_seqs=4, step_tokens=16),
        cache=CacheConfig(bytes=2**19, page_tokens=4),
    )
    firsts: list[TokenLogprobs] = []
    scores: list[Many[TokenLogprobs]] = []
    async with serving(LocalExecutor(settings)) as engine:
        for choices, most in ((1, None), (1, None), (3, 2), (2, 0)):
            sampling = SamplingParams(max_tokens=2, temperature=0.0, logprobs=4)
            asked = structs.replace(request(LONG, sampling, scored=most), choices=choices)
            async with engine.admit(choices, 0) as ticket:
                begun = set[int]()
                async for index, delta in await ticket.submit(asked):
                    if index not in begun:
                        firsts.append(delta.logprobs[0])
                        scores += [delta.prompt_logprobs] if delta.prompt_logprobs else []
                    begun.add(index)
        assert engine.status().prefix_hits >= 44 * 4, "all but the first, and those that score, found the prompt"

    with torch.inference_mode():
        reference = oracle(directory)(torch.tensor([LONG])).logits[0]
    expected = reference[-1].double().log_softmax(-1).topk(4)
    assert len(firsts) == 7
    for first in firsts:
        assert first.top_ids == tuple(expected.indices.tolist())
        torch.testing.assert_close(torch.tensor(first.top).double(), expected.values, atol=1e-4, rtol=1e-4)
        assert first.chosen == first.top[0]
    for told, most in zip(scores, (2, 0), strict=True):
        check(list(told), reference[:-1], LONG[1:], most, tolerance=1e-4)
