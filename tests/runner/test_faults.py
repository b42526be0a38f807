"""Classification of a step's errors, and steps too large for memory."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch

from infd.errors import DeviceLost, OutOfMemory, StepTooLarge
from infd.request import FinishReason
from infd.runner.faults import diagnose, lacks_memory
from tests.engine.driving import ask, serving
from tests.runner.driving import config, executor, request
from tests.runner.fake_model import FakeModel, continuation

CPU = torch.device("cpu")
FITS = 9  # tokens


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        MemoryError(),
        OutOfMemory("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_every_allocators_out_of_memory_error_is_recognised(error):
    assert lacks_memory(error)
    assert isinstance(diagnose(error, CPU), StepTooLarge)


def test_other_errors_are_returned_unchanged():
    for error in (ValueError("out of memory"), RuntimeError("shapes differ")):
        assert diagnose(error, CPU) is error


def test_a_device_that_cannot_be_waited_for_is_lost(monkeypatch):
    def dead(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    lost = diagnose(RuntimeError("unspecified launch failure"), torch.device("cuda", 0))
    assert isinstance(lost, DeviceLost)
    assert "cuda:0 is unusable after an error" in str(lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    error = RuntimeError("shapes differ")
    assert diagnose(error, torch.device("cuda", 0)) is error


def test_a_failed_steps_memory_is_free_before_the_next_step(monkeypatch):
    held, freed = [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(held[0]() is None))

    def forward() -> None:
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    try:
        forward()
    except torch.OutOfMemoryError as error:
        kept = error  # as a log's record would keep it
        diagnose(error, CPU)
    gc.collect()
    assert freed == [True], "torch can give back only what nobody holds"
    assert kept.__traceback__ is not None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("words", ["CUDA out of memory", "can't allocate memory"])
async def test_a_step_too_large_for_memory_is_computed_in_smaller_ones_and_changes_no_answer(depth, words):
    large = []

    def full(batch) -> None:
        if len(batch.tokens) > FITS:
            large.append(len(batch.tokens))
            raise torch.OutOfMemoryError(words) if "CUDA" in words else RuntimeError(words)

    model = FakeModel()
    runs = executor(model, config(rows=4, step_tokens=32, depth=depth))
    async with serving(runs) as engine:
        model.fault = full
        prompts = [[3 + i] * (5 + 7 * i) for i in range(5)]
        answers = await asyncio.gather(*(ask(engine, request(prompt, name=str(prompt[0]))) for prompt in prompts))
    assert answers == [{0: (continuation(prompt, 1), FinishReason.LENGTH)} for prompt in prompts]
    assert large


async def test_a_sequence_whose_single_token_does_not_fit_fails_alone():
    def full(batch) -> None:
        if 77 in batch.tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = FakeModel()
    async with serving(executor(model, config(rows=4, step_tokens=32))) as engine:
        model.fault = full
        prompts = [[3, 4, 5], [77], [6] * 20]
        answers = await asyncio.gather(*(ask(engine, request(prompt, name=str(prompt[0]))) for prompt in prompts))
    expected = [{0: (continuation(prompt, 1), FinishReason.LENGTH)} for prompt in prompts]
    assert answers == [expected[0], {0: ([], FinishReason.ERROR)}, expected[2]]
