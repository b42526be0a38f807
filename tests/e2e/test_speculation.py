"""On a CPU drafts change no bit: tokens and log-probabilities equal those of decoding token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from infd import LLM, embedded
from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.drafting.drafter import NO_DRAFTS
from infd.executors.local import LocalExecutor
from infd.request import SamplingParams
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence
from infd.scheduler.speculation import Speculation
from tests.drafters import Oracle
from tests.runner.driving import request
from tests.tiny import VOCAB

if TYPE_CHECKING:
    from infd.request import TokenLogprobs

ADAPTERS = ("capitals", "pirate")
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


@pytest.mark.exhaustive
async def test_scores_of_prompts_and_answers_after_them_are_equal(tiny):
    """Alone, so that both runs compute the prompt in equal steps."""
    settings = Config(
        model=ModelConfig(path=str(tiny("qwen3")), dtype="bfloat16"),
        device=DeviceConfig(kind="cpu", threads=2),
        scheduler=SchedulerConfig(max_num_seqs=2, step_tokens=24),
        cache=CacheConfig(bytes=2**21, page_tokens=4),
    )
    prompt, params = [(11 * i) % 190 + 3 for i in range(60)], SamplingParams(max_tokens=30, temperature=0.8, logprobs=2)

    async def scored(answer: list[int] | None) -> tuple[list[int], list[TokenLogprobs], list[TokenLogprobs], int]:
        runs = LocalExecutor(settings)
        scheduler = Scheduler(await runs.load(), max_drafts=5)
        drafter = NO_DRAFTS if answer is None else Oracle(prompt, answer, wrong=0.2, vocab=VOCAB)
        seq = Sequence(request(prompt, params, scored=3), drafter=drafter)
        scheduler.add(seq)
        of_prompt, of_answer = [], []
        try:
            while (step := scheduler.plan()) is not None:
                for outcome in scheduler.commit(step, await runs.forward(step.plan).sample()):
                    of_prompt += outcome.prompt_logprobs
                    of_answer += outcome.logprobs
        finally:
            await runs.close()
        return seq.tokens[60:], of_prompt, of_answer, scheduler.speculation.drafts

    *plain, none = await scored(None)
    *drafted, some = await scored(plain[0])
    assert drafted == plain
    assert len(plain[1]) == 59
    assert none == 0 < some


@pytest.mark.exhaustive
def test_adapters_answers_and_json_are_equal_and_drafted(monkeypatch: pytest.MonkeyPatch):
    """The embedded model with its adapters, beside the model itself and constrained answers."""
    schema = {"type": "object", "properties": {"capital_of_the_country": {"type": "string", "maxLength": 9}}}
    schema |= {"required": ["capital_of_the_country"], "additionalProperties": False}
    constrained = {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}}
    asked = [{"role": "user", "content": "What is the capital of France? Say it four times, one a line."}]
    found = {}
    for speculative in ("off", "ngram", "suffix"):
        verified: list[int] = []
        monkeypatch.setattr(Speculation, "count", lambda self, seq, drafts, kept, to=verified: to.append(drafts))
        modules = {name: str(embedded.adapters() / name) for name in ADAPTERS}
        with LLM("embedded", lora__modules=modules, speculative=speculative, max_model_len=256, device="cpu") as llm:
            answers = [
                llm.chat([asked] * 2, model=model, max_tokens=50, temperature=temperature, seed=3, **fields)
                for model in ("embedded", *ADAPTERS)
                for temperature in (0.0, 0.9)
                for fields in ({}, constrained)
            ]
        found[speculative] = [[each.choices[0].message.content for each in answer] for answer in answers]
        assert bool(verified) == (speculative != "off")
    assert found["ngram"] == found["suffix"] == found["off"]
    assert len({answer[0] for answer in found["off"]}) > 6
