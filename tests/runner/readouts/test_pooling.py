"""The readouts that pool, on given hidden states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch

from infd.kernels.reference.pooling import Pooling
from infd.pooling import PoolingSettings
from infd.pooling.settings import Reduction
from infd.request import Pool
from infd.runner.adapters import DeviceSlots
from infd.runner.readouts.pooling import TextPooling, TokenPooling
from infd.runner.readouts.readout import Selection
from infd.runner.staging import Pinned
from infd.scheduler.plan import Join, Span, StepResult
from tests.runner.apart import APART, Device
from tests.runner.driving import make_rows

if TYPE_CHECKING:
    from torch import Tensor

    from infd.models.base import PassAdapters
    from infd.runner.readouts.pooling import PooledPrompts
    from infd.runner.staging import Staging

EMBED = Pool("embed")


def double(vectors: Tensor, _: PassAdapters | None) -> Tensor:
    return 2 * vectors


class Readouts:
    """Both readouts over a model that returns the hidden states given to `step`."""

    def __init__(self, copies: Staging | None = None, **settings: Any) -> None:
        """copies: None: those of a CPU. settings: of PoolingSettings."""
        rows = make_rows(rows=8, copies=copies)
        heads = {"classify": double}
        model = SimpleNamespace(pooling_head=heads.get)
        self.staging = rows.staging
        adapters = DeviceSlots(None, rows.staging)
        instance: Any = SimpleNamespace(
            model=model,
            rows=rows,
            pooling=PoolingSettings(**settings),
            adapters=adapters,
            ops=SimpleNamespace(pooling=Pooling()),
        )
        self.readouts = TextPooling(instance), TokenPooling(instance)

    def join(self, row: int, tokens: int, pool: Pool) -> None:
        for readout in self.readouts:
            readout.stage([Join(row, [1] * tokens, tokens, (pool,), [], 0)])

    def issue(self, spans: list[Span], hidden: Tensor) -> list[PooledPrompts]:
        offsets = [0, *np.cumsum([span.count for span in spans]).tolist()]
        found = []
        for readout in self.readouts:
            if chosen := readout.select(spans, offsets):
                selection = Selection(self.staging.up(np.array(chosen)), narrowed=False)
                found.append(readout.compute(spans, selection, hidden))
        for each in found:
            each.download(self.staging)
        return found

    def step(self, spans: list[Span], hidden: Tensor) -> StepResult:
        result = StepResult([0] * len(spans), [])
        for each in self.issue(spans, hidden):
            each.read(result)
        return result


def span(row: int, start: int, count: int) -> Span:
    return Span(row, start, count, samples=0, pools=count)


def numbers(result: StepResult, number: int) -> list[list[float]]:
    pooled = result.pooled[number]
    return np.frombuffer(pooled.values, "<f4").reshape(-1, pooled.width).tolist()


def test_a_prompt_with_numbers_that_are_not_finite_fails_alone():
    runs = Readouts(pooling="mean", activation="sigmoid")
    for row, task in enumerate(("embed", "embed", "classify", "token_embed", "token_embed")):
        runs.join(row, 2, Pool(task))  # type: ignore[arg-type]
    hidden = torch.ones(10, 3)
    hidden[3, 1], hidden[4, 0], hidden[8, 2] = torch.nan, torch.inf, -torch.inf

    result = runs.step([span(row, 0, 2) for row in range(5)], hidden)
    assert sorted(result.pooled) == [0, 3]
    assert sorted(result.failed) == [1, 2, 4]
    with pytest.raises(Exception, match="hidden states are not finite"):
        raise result.failed[2].error()


def test_tasks_of_every_kind_share_a_step_and_only_prompts_that_end_have_numbers():
    runs = Readouts(pooling="mean", normalize=True, activation="softmax")
    runs.join(0, 3, EMBED)
    runs.join(1, 2, Pool("classify"))
    runs.join(2, 2, Pool("token_embed", normalize=False, dimensions=1))
    runs.join(3, 4, EMBED)
    runs.join(4, 1, Pool("classify", activation=False))
    hidden = torch.arange(22.0).view(11, 2) ** 2
    result = runs.step([span(0, 0, 3), span(1, 0, 2), span(2, 0, 2), span(3, 0, 3), span(4, 0, 1)], hidden)

    assert sorted(result.pooled) == [0, 1, 2, 4]
    mean = hidden[:3].mean(0)
    assert numbers(result, 0) == [pytest.approx((mean / mean.norm()).tolist())]
    assert numbers(result, 1) == [pytest.approx((2 * hidden[3:5].mean(0)).softmax(-1).tolist())]
    assert numbers(result, 2) == hidden[5:7, :1].tolist()
    assert numbers(result, 4) == [(2 * hidden[10]).tolist()]


@pytest.mark.parametrize("mode", ["cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean"])
def test_chunks_reduce_to_the_numbers_of_the_whole_prompt_and_a_new_prompt_starts_from_zero(mode: str):
    runs, prompt = Readouts(pooling=mode), torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    pool = Pool("embed", skip=2)
    runs.join(0, 9, pool)
    whole = runs.step([span(0, 0, 9)], prompt)
    runs.join(0, 9, pool)
    assert not runs.step([span(0, 0, 4)], prompt[:4] + 100).pooled  # the first chunk of a prompt that is preempted
    runs.join(0, 9, pool)
    for start, count in ((0, 1), (1, 4), (5, 3)):
        assert not runs.step([span(0, start, count)], prompt[start : start + count]).pooled

    assert numbers(runs.step([span(0, 8, 1)], prompt[8:]), 0) == [pytest.approx(numbers(whole, 0)[0], rel=1e-5)]


@pytest.mark.parametrize("mode", get_args(Reduction))
def test_a_step_of_many_prompts_is_issued_without_waiting_for_the_device(mode: str):
    hidden = torch.randn(18, 4, generator=torch.Generator().manual_seed(1))
    pools = (EMBED, Pool("classify"), Pool("embed", skip=1), Pool("token_embed"))
    first = [span(row, 0, count) for row, count in enumerate((3, 1, 4, 2))]
    second = [span(2, 4, 5), span(3, 2, 3)]

    def joined(copies: Staging | None = None) -> Readouts:
        runs = Readouts(copies, pooling=mode)
        for row, (tokens, pool) in enumerate(zip((3, 1, 9, 5), pools, strict=True)):
            runs.join(row, tokens, pool)
        return runs

    here = joined()
    want = [here.step(first, hidden[:10]), here.step(second, hidden[10:])]
    with Device() as device, torch.inference_mode():
        copies = Pinned(APART, device.pin, device.event)
        apart, away = joined(copies), hidden.to(APART)
        for spans, part, expected in ((first, away[:10], want[0]), (second, away[10:], want[1])):
            with device.unsynchronised():
                issued, buffer = apart.issue(spans, part), copies.end()
            copies.wait(buffer)
            result = StepResult([0] * len(spans), [])
            for each in issued:
                each.read(result)
            copies.release(buffer)
            assert result.pooled == expected.pooled
