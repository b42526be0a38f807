"""llama.cpp's samplers in a step: rows do not disturb one another, and states survive a preemption."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infd.kernels.cpu.draw import Draw as Native
from infd.kernels.reference.drawing.draw import Draw as Reference
from infd.request import Breakers, Chain, Dry, Mirostat, SamplingParams
from infd.runner.pulse import Pulse
from infd.runner.row_sampling import Float
from infd.runner.sampled import SampledPositions
from infd.runner.sampler import Sampler
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence
from tests.runner.driving import config, join, load, make_rows, request
from tests.runner.fake_model import FakeModel

VOCAB, PROMPT = 600, [5, 9, 5, 7, 5, 9, 5]


def params(**settings) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "temperature": 1.0, **settings})


def dry(*strings: int, **settings) -> Dry:
    heads = b"".join(token.to_bytes(4, "little") for token in strings)
    return Dry(
        **{"multiplier": 9.0, "base": 1.75, "allowed_length": 2, "window": None, **settings},
        breakers=Breakers((heads,)),
    )


ASKED = [
    params(chain=Chain(typical_p=0.5)),
    params(temperature=0.0),
    params(chain=Chain(xtc_probability=0.5, xtc_threshold=0.001), top_p=0.9),
    params(),
    params(dry=dry(3), temperature=0.0),
    params(dry=dry(), logprobs=2),
    params(mirostat=Mirostat(1, 3.0, 0.2)),
    params(mirostat=Mirostat(2, 3.0, 0.2), temperature=1.4),
    params(chain=Chain(dynatemp_range=0.7), top_k=50, min_p=0.01, temperature=1.5),
    params(top_k=5),
    params(chain=Chain(), dry=dry(), repetition_penalty=1.2, allowed_token_ids=(3, 5, 9, 100)),
    params(chain=Chain(xtc_probability=1.0, xtc_threshold=0.005), temperature=0.0),
]


def sample(draw, logits: torch.Tensor, which: list[int]) -> tuple[list[int], dict[int, float]]:
    """Return the tokens of some rows of ASKED, and the new states by row."""
    rows = make_rows(rows=len(which), vocab_size=VOCAB)
    rows.stage([join(row, PROMPT, [[1, 2]], ASKED[i], seed=100 + i) for row, i in enumerate(which)], [])
    ids, ends = np.arange(len(which)), np.full(len(which), len(PROMPT))
    at = SampledPositions(torch.from_numpy(ids), torch.from_numpy(ends), ids, ends)
    found = Sampler(rows, draw)(logits[which].clone(), at, None)
    states = {} if found.adapted is None else dict(zip(found.adapted.at, found.adapted.mu.tolist(), strict=True))
    assert all(float(rows.floats[row, Float.MU]) == mu for row, mu in states.items())
    return found.tokens.tolist(), {which[row]: mu for row, mu in states.items()}


@pytest.fixture(params=[Reference, Native])
def draw(request, built):
    return request.param()


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn((len(ASKED), VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("order", [range(len(ASKED)), [11, 6, 1, 4], [7, 3]])
def test_a_row_gets_the_same_token_and_state_alone_and_in_a_batch(draw, order):
    logits, order = logits_of(1), list(order)
    tokens, states = sample(draw, logits, order)
    for i, token in zip(order, tokens, strict=True):
        alone, state = sample(draw, logits, [i])
        assert alone == [token]
        assert state == {row: mu for row, mu in states.items() if row == i}
    assert sorted(states) == sorted({6, 7} & set(order))


def test_native_tokens_are_the_references():
    for seed in range(8):
        ours, mine = sample(Native(), logits_of(seed), list(range(len(ASKED))))
        theirs, expected = sample(Reference(), logits_of(seed), list(range(len(ASKED))))
        assert ours == theirs
        assert mine == pytest.approx(expected, rel=1e-4)


def test_the_dry_penalty_keeps_a_repetition_from_going_on(draw):
    logits = torch.zeros(len(ASKED), VOCAB)
    logits[:, 7], logits[:, 8] = 3.0, 2.0  # 7 would continue "5 9 5"
    assert sample(draw, logits, [1, 4])[0] == [7, 8]


def test_xtc_drops_the_likeliest_token_of_a_greedy_row_too(draw):
    logits = torch.zeros(len(ASKED), VOCAB)
    logits[:, 7], logits[:, 8] = 3.0, 2.0
    assert sample(draw, logits, [11])[0] == [8]


@pytest.mark.parametrize("version", [1, 2])
def test_a_preempted_sequence_goes_on_with_its_state(version):
    def answer(preempted_after: int | None) -> list[int]:
        loaded = load(FakeModel(), config(), Pulse())
        runner, scheduler = loaded.runner, Scheduler(loaded.capacity)
        sampling = params(mirostat=Mirostat(version, 2.0, 0.9), temperature=2.0)
        seq = Sequence(request([1, 2, 3], sampling))
        scheduler.add(seq)
        count = 0
        with runner.active():
            while (step := scheduler.plan()) is not None:
                scheduler.commit(step, runner.read(runner.sample(runner.forward(step.plan))))
                if (count := count + 1) == preempted_after:
                    scheduler.preempt(seq)
        return seq.tokens

    expected = answer(None)
    assert len(set(expected)) > 5
    assert answer(9) == answer(17) == expected
