"""Plans and results are plain values: msgpack decodes an equal value."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from infd.errors import Fault
from infd.request import Adapter, Generate, SamplingParams, Score, TokenLogprobs
from infd.scheduler.plan import Draft, Grant, Join, Load, Span, StepPlan, StepResult

IDS = st.integers(0, 2**31 - 1)
SEEDS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
FEW = 4
GENERATE = st.builds(
    Generate,
    sampling=st.builds(
        SamplingParams,
        max_tokens=IDS,
        temperature=FLOATS,
        logit_bias=st.dictionaries(IDS, FLOATS, max_size=FEW),
        allowed_token_ids=st.lists(IDS, max_size=FEW).map(tuple),
        bad_words=st.lists(st.lists(IDS, max_size=FEW).map(tuple), max_size=FEW).map(tuple),
        seed=SEEDS,
        logprobs=st.none() | IDS,
    ),
    end_ids=st.frozensets(IDS, max_size=FEW),
)
SCORE = st.builds(Score, top=IDS)
PLANS = st.builds(
    StepPlan,
    number=IDS,
    joins=st.lists(
        st.builds(
            Join,
            row=IDS,
            tokens=st.lists(IDS, max_size=FEW),
            prompt_tokens=IDS,
            wants=st.lists(st.one_of(GENERATE, SCORE), max_size=2).map(tuple),
            tables=st.lists(st.lists(IDS, max_size=FEW), max_size=FEW),
            seed=SEEDS,
            slot=IDS,
        ),
        max_size=FEW,
    ),
    grants=st.lists(st.builds(Grant, row=IDS, group=IDS, index=IDS, page=IDS), max_size=FEW),
    spans=st.lists(
        st.builds(Span, row=IDS, start=IDS, count=IDS, samples=IDS, scores=IDS),
        max_size=FEW,
    ),
    loads=st.lists(
        st.builds(Load, slot=IDS, adapter=st.builds(Adapter, name=st.text(), generation=IDS, path=st.text())),
        max_size=FEW,
    ),
    drafts=st.lists(st.builds(Draft, row=IDS, start=IDS, tokens=st.lists(IDS, max_size=FEW)), max_size=FEW),
)
LOGPROBS = st.dictionaries(
    IDS,
    st.lists(
        st.builds(
            TokenLogprobs,
            chosen=FLOATS,
            top_ids=st.lists(IDS, max_size=FEW).map(tuple),
            top=st.lists(FLOATS, max_size=FEW).map(tuple),
            rank=st.none() | IDS,
        ),
        max_size=FEW,
    ),
    max_size=FEW,
)
RESULTS = st.builds(
    StepResult,
    accepted=st.lists(IDS, max_size=FEW),
    tokens=st.lists(IDS, max_size=FEW),
    logprobs=LOGPROBS,
    prompt_logprobs=LOGPROBS,
    failed=st.dictionaries(IDS, st.builds(Fault, code=st.text(), message=st.text()), max_size=FEW),
)


@given(PLANS)
def test_a_plan_is_the_same_behind_its_encoding(plan: StepPlan):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


@given(RESULTS)
def test_a_result_is_the_same_behind_its_encoding(result: StepResult):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
