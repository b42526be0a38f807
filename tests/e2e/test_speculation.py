"""On a CPU drafts change no bit: tokens and log-probabilities equal those of decoding token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.executors.local import LocalExecutor
from infd.request import SamplingParams
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence
from tests.drafters import Oracle
from tests.runner.driving import request
from tests.tiny import VOCAB

if TYPE_CHECKING:
    from infd.request import TokenLogprobs

SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {3: 4.0}},
    {"temperature": 0.5, "min_tokens": 5, "bad_words": ((5, 9), (8,)), "allowed_token_ids": tuple(range(50))},
]
Answers = list[tuple[list[int], "list[TokenLogprobs]"]]


async def answered(runs: LocalExecutor, drafters: list[Oracle] | None, most: int, together: int) -> Answers:
    """Serve a request for each of SAMPLING, `together` at a time; return tokens and log-probabilities."""
    capacity = await runs.load()
    answers: Answers = []
    try:
        for first in range(0, len(SAMPLING), together):
            scheduler, logprobs, sequences = Scheduler(capacity, max_drafts=most), {}, []
            for row, asked in [*enumerate(SAMPLING)][first : first + together]:
                params = SamplingParams(max_tokens=40, logprobs=3, seed=row, **asked)
                prompt = [(7 * row + 3 * i) % 190 + 3 for i in range(30)]
                sequences.append(Sequence(request(prompt, params), **({"drafter": drafters[row]} if drafters else {})))
                logprobs[sequences[-1]] = []
                scheduler.add(sequences[-1])
            while (step := scheduler.plan()) is not None:
                for outcome in scheduler.commit(step, await runs.forward(step.plan).sample()):
                    logprobs[outcome.seq] += outcome.logprobs
            answers += [(seq.tokens[seq.prompt_tokens :], logprobs[seq]) for seq in sequences]
    finally:
        await runs.close()
    return answers


@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("variant", ["qwen3", pytest.param("gemma3", marks=pytest.mark.exhaustive)])
async def test_no_bit_differs(tiny, built, variant: str, quantization: str, cache: str):
    settings = Config(
        model=ModelConfig(path=str(tiny(variant)), dtype="bfloat16", quantization=quantization),
        device=DeviceConfig(kind="cpu", threads=2),
        scheduler=SchedulerConfig(max_num_seqs=8, step_tokens=128),
        cache=CacheConfig(bytes=2**21, page_tokens=4, dtype=cache),
    )
    plain = await answered(LocalExecutor(settings), None, 0, together=1)
    assert all(len(tokens) == len(likely) == 40 for tokens, likely in plain)
    for most, wrong in ((1, 0.3), (4, 0.2), (15, 0.05)):
        drafters = [
            Oracle([(7 * row + 3 * i) % 190 + 3 for i in range(30)], tokens, wrong=wrong, seed=row, vocab=VOCAB)
            for row, (tokens, _) in enumerate(plain)
        ]
        assert await answered(LocalExecutor(settings), drafters, most, together=len(SAMPLING)) == plain
