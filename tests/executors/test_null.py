from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from infd.config import Config, DeviceConfig, SchedulerConfig
from infd.daemon.components import NullSizes
from infd.executors.null import NullExecutor
from infd.request import SamplingParams
from infd.scheduler.plan import StepPlan
from tests.runner.driving import generate, join, request, span

VOCAB = 512


def make(**device: object) -> NullExecutor:
    return NullExecutor(
        Config(device=DeviceConfig(kind="null", **device), scheduler=SchedulerConfig(max_num_seqs=3)),  # type: ignore[arg-type]
        lambda: NullSizes(vocab_size=VOCAB, max_position_embeddings=256),
        Path,
    )


def requests(count: int, **sampling: object) -> list:
    return [
        request([1, 2, 3], SamplingParams(max_tokens=20 + i, seed=i, **sampling), name=str(i))  # type: ignore[arg-type]
        for i in range(count)
    ]


async def test_every_sequence_gets_ordinary_tokens_until_its_length():
    runs = make()
    answers = await generate(runs, await runs.load(), requests(7))
    assert [len(answer) for answer in answers] == [20 + i for i in range(7)]
    tokens = {token for answer in answers for token in answer}
    assert min(tokens) >= VOCAB // 2
    assert max(tokens) < VOCAB * 3 // 4
    assert len(tokens) > 30


async def test_tokens_depend_on_seed_and_position_alone():
    answers = []
    for depth in (1, 3):
        runs = make(depth=depth)
        assert runs.depth == depth
        answers.append(await generate(runs, await runs.load(), requests(7), depth=depth))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1][:20]


async def test_a_step_may_take_time():
    runs = make(null_step_ms=0.01)
    assert [len(answer) for answer in await generate(runs, await runs.load(), requests(2), depth=2)] == [20, 21]


async def test_logprobs_come_on_request():
    runs = make()
    await runs.load()
    asked = SamplingParams(max_tokens=1, logprobs=2)
    plan = StepPlan(
        0,
        [join(0, [1], [[1]]), join(1, [1], [[2]], asked), join(2, [1, 2], [[3]])],
        [],
        [span(0, 0, 1), span(1, 0, 1), span(2, 0, 1, samples=0)],
    )
    result = await runs.forward(plan).sample()
    assert result.accepted == [1, 1, 0]
    assert list(result.logprobs) == [1]
    assert result.logprobs[1][0].top_ids[0] == result.tokens[1]

    again = await runs.forward(StepPlan(1, [join(1, [1], [[2]])], [], [span(1, 0, 1)])).sample()
    assert not again.logprobs


async def test_prompts_are_scored_on_request():
    runs = make()
    await runs.load()
    plan = StepPlan(
        0,
        [join(0, [1, 2], [[1]]), join(1, [1, 2, 3], [[2]], scored=2)],
        [],
        [span(0, 0, 2), span(1, 0, 2, samples=0, scores=2)],
    )
    result = await runs.forward(plan).sample()
    assert result.accepted == [1, 0]
    assert list(result.prompt_logprobs) == [1]
    assert [len(each.top) for each in result.prompt_logprobs[1]] == [2, 2]


async def test_the_pulse_counts_steps():
    runs = make()
    await generate(runs, await runs.load(), requests(1))
    assert runs.pulse() == 20
    await runs.close()


def test_neither_executor_brings_torch_along_when_imported():
    heavy = "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    code = f"import sys, infd.executors.null, infd.executors.local; {heavy}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
