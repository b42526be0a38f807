"""Beam search over HTTP finds the beams of transformers' `generate`."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.executors.local import LocalExecutor
from infd.scheduler import prefix
from tests import tiny
from tests.fakes import VOCAB
from tests.http.endpoint import serving
from tests.http.model import tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from tests.http.endpoint import Endpoint

COMPLETIONS = "/v1/completions"
END = sorted(tokenizer().end_ids)
PROMPT = [7, 300, 41, 5, 99, 260]
SPREAD = 1.5  # standard deviation of the logits: several continuations are likely


def likely(variant: str, directory: Path, offset: float = 0.0) -> Path:
    """Make a checkpoint with several likely continuations.

    offset  what the model adds to the weight of its last norm
    """
    from safetensors.torch import load_file, save_file

    tiny.make(variant, directory, vocab_size=VOCAB)
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    norm = tensors["model.norm.weight"]
    norm.copy_((norm + offset) * (SPREAD / tiny.SPREAD) - offset)
    save_file(tensors, weights, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return likely("llama", tmp_path_factory.mktemp("beams"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> PreTrainedModel:
    return tiny.oracle(checkpoint)


@asynccontextmanager
async def searching(directory: Path, **cache: Any) -> AsyncIterator[Endpoint]:
    config = Config(
        model=ModelConfig(path=str(directory), dtype="float32", max_model_len=128),
        device=DeviceConfig(kind="cpu", threads=1),
        scheduler=SchedulerConfig(step_tokens=256, max_num_seqs=16),
        cache=CacheConfig(**{"bytes": 2**20, "page_tokens": 4, **cache}),
    )
    async with serving(config, executor=LocalExecutor(config)) as endpoint:
        yield endpoint


def expected(model: PreTrainedModel, prompt: list[int], beams: int, count: int, **options: Any) -> list[list[int]]:
    """Return the tokens of transformers' beams, the best first."""
    ends = options.pop("eos_token_id", END)
    found = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=beams,
        num_return_sequences=options.pop("returned", beams),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=VOCAB - 1,
        eos_token_id=ends,
        **options,
    )
    answers = [answer[len(prompt) :].tolist() for answer in found]
    return [
        answer[: next((at for at, token in enumerate(answer, 1) if token in (ends or ())), count)] for answer in answers
    ]


async def beams_of(endpoint: Endpoint, **fields: Any) -> list[list[int]]:
    body = {"prompt": PROMPT, "use_beam_search": True, "return_token_ids": True, **fields}
    status, answer = await endpoint.post(COMPLETIONS, body)
    assert status == 200, answer
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    "ends", [pytest.param([], marks=pytest.mark.exhaustive), list(range(40, 120)), [5, 260, 31]], ids=len
)
async def test_beams_are_those_of_transformers(checkpoint: Path, oracle: PreTrainedModel, ends: list[int]):
    async with searching(checkpoint) as endpoint:
        for width, count, settings in (
            (2, 12, {}),
            (4, 14, {"length_penalty": 0.0}),
            (4, 14, {"length_penalty": 2.0, "early_stopping": "never"}),
            (6, 12, {"length_penalty": -0.5, "early_stopping": True}),
            (5, 16, {"early_stopping": True}),
            (1, 8, {}),
        ):
            theirs = expected(oracle, PROMPT, width, count, **settings, eos_token_id=[*END, *ends])
            ours = await beams_of(endpoint, n=width, max_tokens=count, stop_token_ids=ends, **settings)
            assert ours == theirs, (width, settings)
        assert endpoint.engine.status().pages_referenced == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "offset"), [("qwen3", 0.0), ("gemma3", 1.0)])
async def test_beams_of_other_families(tmp_path: Path, family: str, offset: float):
    """Gemma 3 has windows, which the longer prompt exceeds, and caps its logits."""
    directory = likely(family, tmp_path, offset)
    model, ends, long = tiny.oracle(directory), list(range(40, 120)), [5 + number % 90 for number in range(40)]
    async with searching(directory) as endpoint:
        for prompt, width, settings in (
            (PROMPT, 4, {"length_penalty": 2.0, "early_stopping": "never"}),
            (long, 5, {"early_stopping": True}),
            (long, 3, {"length_penalty": 0.0}),
        ):
            theirs = expected(model, prompt, width, 14, **settings, eos_token_id=[*END, *ends])
            ours = await beams_of(endpoint, prompt=prompt, n=width, max_tokens=14, stop_token_ids=ends, **settings)
            assert ours == theirs, (prompt, width, settings)
        assert endpoint.engine.status().pages_referenced == 0


async def test_the_best_of_more_beams_and_several_prompts(checkpoint: Path, oracle: PreTrainedModel):
    async with searching(checkpoint) as endpoint:
        prompts = [PROMPT, [11, 12], list(range(3, 90))]
        ours = await beams_of(endpoint, prompt=prompts, n=2, best_of=5, max_tokens=12)
        assert ours == [beam for each in prompts for beam in expected(oracle, each, 5, 12, returned=2)]
        without_ends = await beams_of(endpoint, n=3, max_tokens=12, ignore_eos=True)
        assert without_ends == expected(oracle, PROMPT, 3, 12, eos_token_id=None)


async def test_min_tokens_and_allowed_tokens(checkpoint: Path, oracle: PreTrainedModel):
    ends = list(range(40, 200))
    async with searching(checkpoint) as endpoint:
        ours = await beams_of(endpoint, n=4, max_tokens=12, min_tokens=6, stop_token_ids=ends)
        assert ours == expected(oracle, PROMPT, 4, 12, eos_token_id=[*END, *ends], min_new_tokens=6)
        (allowed,) = await beams_of(endpoint, best_of=4, max_tokens=8, allowed_token_ids=[5, 6, 7])
        assert set(allowed) <= {5, 6, 7}


async def test_a_conversations_beams(checkpoint: Path, oracle: PreTrainedModel):
    async with searching(checkpoint) as endpoint:
        fields = {"use_beam_search": True, "n": 3, "max_tokens": 10, "return_token_ids": True}
        answer = await endpoint.chat(**fields, logprobs=True, top_logprobs=2)
        theirs = expected(oracle, answer["prompt_token_ids"], 3, 10)
        assert [choice["token_ids"] for choice in answer["choices"]] == theirs
        assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
        assert answer["usage"]["completion_tokens"] == sum(map(len, theirs))
        for choice in answer["choices"]:
            for token in choice["logprobs"]["content"]:
                assert len(token["top_logprobs"]) == 2

        messages = [{"role": "user", "content": "hi"}]
        events = await endpoint.events("/v1/chat/completions", {"messages": messages, **fields})
        streamed: dict[int, list[int]] = {}
        for event in events:
            for choice in event["choices"]:
                streamed.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        assert [streamed[index] for index in range(3)] == theirs


async def test_log_probabilities_are_those_of_the_model(checkpoint: Path, oracle: PreTrainedModel):
    async with searching(checkpoint) as endpoint:
        body = {"prompt": PROMPT, "use_beam_search": True, "n": 3, "max_tokens": 6, "logprobs": 1}
        _, answer = await endpoint.post(COMPLETIONS, {**body, "return_token_ids": True})
        for choice in answer["choices"]:
            ids = [*PROMPT, *choice["token_ids"]]
            with torch.inference_mode():
                scores = torch.log_softmax(oracle(torch.tensor([ids])).logits[0], -1)
            theirs = [float(scores[len(PROMPT) - 1 + at, token]) for at, token in enumerate(choice["token_ids"])]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(theirs, abs=1e-4)


async def test_a_stop_string_ends_a_beam(checkpoint: Path):
    async with searching(checkpoint) as endpoint:
        body = {"prompt": PROMPT, "use_beam_search": True, "n": 4, "max_tokens": 24}
        _, free = await endpoint.post(COMPLETIONS, body)
        text = free["choices"][0]["text"]
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        _, answer = await endpoint.post(COMPLETIONS, {**body, "stop": stop})
        stopped = [choice for choice in answer["choices"] if choice["stop_reason"] == stop]
        assert stopped
        assert all(stop not in choice["text"] for choice in answer["choices"])
        assert {choice["finish_reason"] for choice in stopped} == {"stop"}


async def test_beams_share_pages_and_leave_none_behind(checkpoint: Path):
    async with searching(checkpoint) as endpoint:
        prompt = list(range(3, 83))  # 20 pages
        body = {"prompt": prompt, "use_beam_search": True, "n": 8, "max_tokens": 16}
        _, answer = await endpoint.post(COMPLETIONS, body)
        status = endpoint.engine.status()
        computed = status.prefix_queries - status.prefix_hits
        # Beyond the prompt, each beam's step computes its last page's tokens at most.
        assert computed <= len(prompt) + 15 * 8 * (4 + 1)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert status.pages_referenced == 0


async def test_a_prompt_is_hashed_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    hashed = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal hashed
        hashed += 1
        return blake2b(*args, **kwargs)

    monkeypatch.setattr(prefix, "blake2b", counted)
    async with searching(checkpoint) as endpoint:
        prompts = [list(range(first, first + 80)) for first in (3, 100)]  # 20 pages each
        await beams_of(endpoint, prompt=prompts, n=4, max_tokens=16)
    # 15 steps of 8 beams; in four of a beam's steps a page of its own is complete.
    assert hashed <= 2 * 20 + 15 * 8


async def test_a_client_that_leaves_ends_its_search(checkpoint: Path):
    async with searching(checkpoint) as endpoint:
        body = {"prompt": PROMPT, "use_beam_search": True, "n": 8, "max_tokens": 100}
        client = asyncio.create_task(endpoint.post(COMPLETIONS, body))
        while endpoint.engine.status().accepted < 20:
            await asyncio.sleep(0)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        await endpoint.engine.admission.emptied()
        while endpoint.engine.status().pages_referenced:
            await asyncio.sleep(0)
        status = endpoint.engine.status()
        assert (status.running, status.waiting, status.tickets) == (0, 0, 0)
        assert sum(status.terminal.values()) == status.accepted
        endpoint.engine.core.scheduler.verify()


async def test_an_operator_ends_a_search_with_the_beams_found(checkpoint: Path):
    async with searching(checkpoint) as endpoint:
        searching_ = asyncio.create_task(beams_of(endpoint, n=4, max_tokens=100))
        while endpoint.engine.status().accepted < 20:
            await asyncio.sleep(0)
        (row,) = endpoint.engine.requests()
        assert endpoint.engine.abort(row.id)
        found = await searching_
        assert len(found) == 4
        assert all(3 <= len(beam) < 100 for beam in found)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "use_beam_search"),
        ({"mirostat": 2}, "mirostat"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"early_stopping": "always"}, "early_stopping"),
    ],
)
async def test_what_a_search_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str):
    async with serving() as endpoint:
        status, answer = await endpoint.post(COMPLETIONS, {"prompt": "a", "use_beam_search": True, **fields})
        assert (status, answer["error"]["param"]) == (400, param)
