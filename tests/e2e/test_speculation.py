"""On a CPU drafts change no bit: tokens and log-probabilities equal those of decoding token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from infd import LLM, embedded
from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.drafting.drafter import NO_DRAFTS
from infd.executors.local import LocalExecutor
from infd.request import Generate, SamplingParams, pick
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence
from infd.scheduler.speculation import Speculation
from tests.drafters import Oracle
from tests.runner.driving import request
from tests.samplings import SAMPLING, sampled
from tests.tiny import VOCAB

if TYPE_CHECKING:
    from infd.request import Request, TokenLogprobs

ADAPTERS = ("capitals", "pirate")
Answers = list[tuple[list[int], "list[TokenLogprobs]"]]


FEW = ("greedy", "seeded", "limits", "all penalties", "all masks")  # names in SAMPLING
TOKENS = 40


def prompt_of(row: int) -> list[int]:
    return [(7 * row + 3 * i) % 190 + 3 for i in range(30)]


async def answered(
    runs: LocalExecutor, requests: list[Request], drafters: list[Oracle] | None = None, most: int = 0
) -> tuple[Answers, list[Sequence]]:
    """Serve the requests, with drafts all at once, else one by one; return tokens and log-probabilities."""
    capacity = await runs.load()
    answers: Answers = []
    every: list[Sequence] = []
    together = 1 if drafters is None else len(requests)
    try:
        for first in range(0, len(requests), together):
            scheduler, logprobs, sequences = Scheduler(capacity, max_drafts=most), {}, []
            for row, asked in [*enumerate(requests)][first : first + together]:
                sequences.append(Sequence(asked, **({"drafter": drafters[row]} if drafters else {})))
                logprobs[sequences[-1]] = []
                scheduler.add(sequences[-1])
            while (step := scheduler.plan()) is not None:
                for outcome in scheduler.commit(step, await runs.forward(step.plan).sample()):
                    logprobs[outcome.seq] += outcome.logprobs
            answers += [(seq.tokens[seq.prompt_tokens :], logprobs[seq]) for seq in sequences]
            every += sequences
    finally:
        await runs.close()
    return answers, every


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
    requests = [
        sampled(name, prompt_of(row), max_tokens=TOKENS, seed=row, logprobs=3, min_tokens=0)
        for row, name in enumerate(FEW)
    ]
    plain, _ = await answered(LocalExecutor(settings), requests)
    assert all(len(tokens) == len(likely) == TOKENS for tokens, likely in plain)
    for most, wrong in ((1, 0.3), (4, 0.2), (15, 0.05)):
        drafters = [
            Oracle(prompt_of(row), tokens, wrong=wrong, seed=row, vocab=VOCAB) for row, (tokens, _) in enumerate(plain)
        ]
        assert (await answered(LocalExecutor(settings), requests, drafters, most))[0] == plain


async def test_no_bit_differs_with_any_sampling(tiny, built):
    settings = Config(
        model=ModelConfig(path=str(tiny("qwen3")), dtype="bfloat16"),
        device=DeviceConfig(kind="cpu", threads=2),
        scheduler=SchedulerConfig(max_num_seqs=32, step_tokens=256),
        cache=CacheConfig(bytes=2**22, page_tokens=4),
    )
    requests = [
        sampled(name, prompt_of(row), max_tokens=TOKENS, seed=row, **{"logprobs": 3, **SAMPLING[name]})
        for row, name in enumerate(SAMPLING)
    ]
    plain, _ = await answered(LocalExecutor(settings), requests)
    ordinary, _ = await answered(LocalExecutor(settings), [ordinarily(each) for each in requests])
    same = [name for name, one, other in zip(SAMPLING, plain, ordinary, strict=True) if one == other]
    assert same == ["greedy", "seeded", "logprobs"], "each other field changes its answer"
    for most, wrong in ((4, 0.2), (7, 0.5)):
        drafters = [
            Oracle(prompt_of(row), tokens, wrong=wrong, seed=row, vocab=VOCAB) for row, (tokens, _) in enumerate(plain)
        ]
        drafted, sequences = await answered(LocalExecutor(settings), requests, drafters, most)
        for name, one, other, seq in zip(SAMPLING, drafted, plain, sequences, strict=True):
            assert one == other, name
            if "mirostat" in name:
                assert seq.drafted == 0, "each token changes mirostat's state"
            else:
                assert seq.kept_drafts > 0, name
        assert sum(seq.kept_drafts for seq in sequences) < sum(seq.drafted for seq in sequences)


def ordinarily(asked: Request) -> Request:
    """Return the request with its temperature alone."""
    generate = pick(Generate, asked.wants)
    assert generate is not None
    params = generate.sampling
    alone = SamplingParams(max_tokens=TOKENS, temperature=params.temperature, seed=params.seed, logprobs=3)
    return msgspec.structs.replace(asked, wants=(Generate(alone, generate.end_ids),))


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
