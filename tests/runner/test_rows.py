import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.request import SamplingParams
from infd.runner.row_sampling import Float, Integer, Stage
from infd.scheduler.plan import Grant
from tests.runner.driving import GREEDY, join, make_rows


def test_a_join_writes_everything_and_a_grant_adds_to_it():
    rows = make_rows()
    sampling = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.5)
    rows.stage(
        [join(2, [5, 6, 7, 8, 9], [[4, 7]], sampling, prompt=3, seed=2**40 + 5)],
        [Grant(row=2, group=0, index=2, page=9)],
    )

    assert rows.tokens[2, :5].tolist() == [5, 6, 7, 8, 9]
    assert rows.length[2] == 5
    assert rows.tables[2, 0].tolist() == [4, 7, 9, 0, 0, 0, 0, 0]
    assert torch.allclose(rows.floats[2, : Float.COOLING], torch.tensor([0.5, 0.9, 0.1, 1.5, 0.0, 0.0]))
    assert rows.integers[2, : Integer.DRY_ALLOWED].tolist() == [5, 2**8, 3, 3, 3]
    assert not rows.floats[2, Float.COOLING :].any()
    assert (rows.floats[2, Float.TOP_P], rows.integers[2, Integer.TOP_K]) == (torch.tensor(0.9), 3)


def test_a_row_of_a_new_sequence_keeps_no_state_of_the_old_one():
    rows = make_rows()
    asking = SamplingParams(max_tokens=9, logprobs=3, logit_bias={4: 1.0}, presence_penalty=1.0)
    rows.stage([join(1, list(range(20)), [[1, 2, 3, 4, 5]], asking)], [])
    rows.stage([join(1, [3], [[6]])], [])

    assert rows.length[1] == 1
    assert rows.tables[1, 0].tolist() == [6] + [0] * 7
    assert rows.stages[1] == 0
    assert rows.sampling[1].bias_ids.size == 0


def test_rows_are_written_independently_of_each_other():
    together, apart = make_rows(), make_rows()
    joins = [join(0, [1, 2, 3], [[1]]), join(3, list(range(30)), [[2, 3, 4, 5, 6, 7, 8, 9]]), join(1, [9], [[10]])]
    together.stage(joins, [])
    for each in joins:
        apart.stage([each], [])

    for row in (0, 1, 3):
        known = int(apart.length[row])
        assert torch.equal(together.tokens[row, :known], apart.tokens[row, :known])
        assert torch.equal(together.tables[row], apart.tables[row])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(-(2**70), 2**70))
def test_any_seed_has_a_place(seed: int):
    rows = make_rows()
    rows.stage([join(0, [1], [[1]], seed=seed)], [])
    low, high = (int(rows.integers[0, column]) & 0xFFFFFFFF for column in (Integer.SEED_LOW, Integer.SEED_HIGH))
    assert high << 32 | low == seed % 2**64


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (join(0, [1, 101], [[1]]), "0..100"),
        (join(0, [-1], [[1]]), "0..100"),
        (join(0, list(range(33)), [[1]]), "33 tokens"),
        (join(0, [1], [[1]], SamplingParams(max_tokens=1, logit_bias={101: 1.0})), "logit_bias"),
        (join(0, [1], [[1]], SamplingParams(max_tokens=1, allowed_token_ids=(101,))), "allowed_token_ids"),
        (join(0, [1], [[1]], SamplingParams(max_tokens=1, bad_words=((3, 101),))), "bad_words"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(bad, reason):
    with pytest.raises(ValueError, match=reason):
        make_rows().stage([bad], [])


def test_a_row_asks_only_for_the_stages_it_needs():
    rows = make_rows()
    rows.stage(
        [
            join(0, [1], [[1]]),
            join(1, [1], [[2]], SamplingParams(max_tokens=1)),
            join(2, [1], [[3]], SamplingParams(max_tokens=1, temperature=0.0, top_k=5, min_tokens=3)),
            join(3, [1], [[4]], SamplingParams(max_tokens=1, top_p=0.5, logprobs=0, frequency_penalty=-1.0)),
        ],
        [],
    )
    assert rows.stages[:4].tolist() == [
        0,
        Stage.RANDOM,
        0,  # greedy, and without end ids there is nothing to put off
        Stage.RANDOM | Stage.TRUNCATE | Stage.LOGPROBS | Stage.FREQUENCY,
    ]


def test_sampled_tokens_are_appended():
    rows = make_rows()
    rows.stage([join(0, [1, 2], [[1]]), join(2, [3], [[2]], GREEDY)], [])
    rows.append(torch.tensor([0, 2]), torch.tensor([2, 1]), torch.tensor([50, 60]))
    assert rows.tokens[0, :3].tolist() == [1, 2, 50]
    assert rows.tokens[2, :2].tolist() == [3, 60]
    assert rows.length[:3].tolist() == [3, 1, 2]
