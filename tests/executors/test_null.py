from __future__ import annotations

import math
import subprocess
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infd.config import Config, DeviceConfig, PoolingConfig, SchedulerConfig
from infd.daemon.components import NullSizes
from infd.executors.null import NullExecutor
from infd.request import Pool, SamplingParams
from infd.scheduler.plan import Join, Span, StepPlan
from tests.runner.driving import generate, join, request, span

if TYPE_CHECKING:
    from infd.scheduler.plan import StepResult

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


async def test_it_may_be_an_encoder_that_keeps_no_cache():
    runs = NullExecutor(
        Config(device=DeviceConfig(kind="null"), pooling=PoolingConfig(task="classify")),
        lambda: NullSizes(vocab_size=VOCAB, max_position_embeddings=8192),
        Path,
    )
    capacity = await runs.load()
    assert (capacity.generates, capacity.pools) == (False, ("classify", "token_classify"))
    assert (capacity.layout.groups, capacity.layout.divisible, capacity.pages) == ((), False, 0)
    assert capacity.step_tokens == 8192


def rows_of(result: StepResult) -> list[list[float]]:
    """Return the only prompt's rows."""
    assert result.accepted == [0]
    numbers = array("f", result.pooled[0].values).tolist()
    width = result.pooled[0].width
    return [numbers[at : at + width] for at in range(0, len(numbers), width)]


async def pool(want: Pool, prompt: list[int]) -> list[list[float]]:
    runs = make()
    assert want.task in (await runs.load()).pools
    plan = StepPlan(
        0,
        [Join(0, prompt, len(prompt), (want,), [[1]], 0)],
        [],
        [Span(0, 0, len(prompt), 0, pools=len(prompt))],
    )
    return rows_of(await runs.forward(plan).sample())


async def test_a_prompt_is_pooled_to_a_unit_vector_of_its_own():
    [vector], [again], [other] = [await pool(Pool("embed"), prompt) for prompt in ([1, 2], [1, 2], [1, 3])]
    assert vector == again != other
    assert math.hypot(*vector) == pytest.approx(1)
    assert await pool(Pool("embed", skip=1), [5, 1, 2]) == [vector]

    [short] = await pool(Pool("embed", dimensions=8), [1, 2])
    assert (len(short), math.hypot(*short)) == (8, pytest.approx(1))
    [raw] = await pool(Pool("embed", normalize=False), [1, 2])
    assert raw == pytest.approx([each * math.hypot(*raw) for each in vector], abs=1e-6)


async def test_a_prompt_is_classified_with_probabilities():
    [scores] = await pool(Pool("classify"), [1, 2])
    assert sum(scores) == pytest.approx(1)
    assert sum((await pool(Pool("classify", activation=False), [1, 2]))[0]) != pytest.approx(1)


async def test_each_token_that_is_not_skipped_has_a_row():
    rows = await pool(Pool("token_embed", skip=1), [1, 2, 3, 3])
    assert len(rows) == 3
    assert [math.hypot(*row) for row in rows] == pytest.approx([1, 1, 1])
    assert len({tuple(row) for row in rows}) == 3
