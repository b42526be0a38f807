"""Shares between tenants: of the work, of rows, and of the tokens of a step."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.request import FinishReason
from infd.scheduler.fair_queue import FairQueue
from infd.scheduler.policy import Policy
from tests.scheduler.driver import Driver, capacity, sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.scheduler.sequence import Sequence

few = settings(max_examples=4, deadline=None)


class Floods:
    """A queue whose sequences run one at a time; each tenant of a flood always has `depth` sequences waiting."""

    def __init__(self, shares: Mapping[str, float], *, depth: int = 4, seed: int = 0) -> None:
        self.queue = FairQueue(4, patience=4)
        self.worked = dict.fromkeys(shares, 0)
        self._policy = Policy(4)
        self._shares = shares
        self._depth = depth
        self._random = random.Random(seed)

    def arrive(self, tenant: str, prompt: int, answer: int, *, limit: int = 500, priority: int = 0) -> Sequence:
        """Queue a sequence that may generate `limit` tokens, and will end after `answer`."""
        share = self._shares.get(tenant, 1.0)
        seq = sequence(prompt, max_tokens=limit, tenant=tenant, share=share, priority=priority)
        seq.place = self._policy.place(seq)
        seq.tokens += [0] * answer  # counted as generated once the sequence ends
        self.queue.add(seq)
        return seq

    def serve(self) -> Sequence:
        """Run the next sequence to its end."""
        seq = next(self.queue.candidates())
        self.queue.start(seq)
        self.queue.settle(seq)
        self.queue.stop(seq)
        tenant = seq.request.tenant
        self.worked[tenant] = self.worked.get(tenant, 0) + len(seq.tokens)
        return seq

    def refill(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        for tenant, (prompt, answer) in sizes.items():
            while self.queue.of(tenant) < self._depth:
                self.arrive(tenant, self._random.randint(1, 2 * prompt), self._random.randint(0, 2 * answer))


sizes = st.tuples(st.integers(4, 12), st.integers(0, 12))  # average tokens of prompts and answers


@few
@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.sampled_from([0.5, 1.0, 2.0]), sizes), min_size=2),
    st.integers(0, 99),
)
def test_floods_get_their_shares_of_the_work(tenants, seed):
    shares = {tenant: share for tenant, (share, _) in tenants.items()}
    floods = Floods(shares, seed=seed)
    while sum(floods.worked.values()) < 600 * max(sum(size) for _, size in tenants.values()):
        floods.refill({tenant: size for tenant, (_, size) in tenants.items()})
        floods.serve()
    floods.queue.verify([])

    total, whole = sum(floods.worked.values()), sum(shares.values())
    for tenant, worked in floods.worked.items():
        assert worked / total == pytest.approx(shares[tenant] / whole, rel=0.1)


@few
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(-3, 3)), max_size=30))
def test_one_tenant_is_served_in_the_order_of_places(arrivals):
    floods = Floods({})
    queued = [floods.arrive("a", *size, priority=priority) for *size, priority in arrivals]

    expected = sorted(queued, key=lambda seq: seq.place)
    assert list(floods.queue) == expected
    assert [floods.serve() for _ in arrivals] == expected
    assert not floods.queue


@few
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(-9, 9)), min_size=1, max_size=30))
def test_whoever_waits_is_served_though_others_flood_with_earlier_priorities(arrivals):
    floods = Floods({})
    waiting = {floods.arrive(tenant, prompt, 5, priority=priority) for tenant, prompt, priority in arrivals}
    for _ in range(3000):
        if not waiting:
            return
        floods.arrive("flood", 10, 5, priority=-9)
        waiting.discard(floods.serve())
    raise AssertionError("a sequence starves")


@few
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(-2, 2)), max_size=20), st.data())
def test_the_order_of_turns_is_the_order_in_which_sequences_start(arrivals, data):
    """Iteration foresees the turns; without answers, whose lengths are not known, it is exact."""
    floods = Floods({"a": 1.0, "b": 2.0, "c": 0.5})
    queued = [floods.arrive(tenant, prompt, 0, limit=0) for tenant, prompt, _ in arrivals]
    for seq in data.draw(st.lists(st.sampled_from(queued), unique=True)) if queued else []:
        floods.queue.remove(seq)

    foreseen = list(floods.queue)
    assert [floods.serve() for _ in foreseen] == foreseen


def test_an_idle_tenant_saves_up_no_share():
    floods = Floods({"a": 1.0, "b": 1.0})
    for _ in range(50):
        floods.refill({"a": (10, 10)})
        floods.serve()
    floods.worked = {"a": 0, "b": 0}
    for _ in range(100):
        floods.refill({"a": (10, 10), "b": (10, 10)})
        floods.serve()

    assert floods.worked["b"] / floods.worked["a"] == pytest.approx(1, rel=0.2)


def test_a_tenant_pays_for_the_cost_of_an_answer_beyond_its_estimate():
    floods = Floods({"a": 1.0, "b": 1.0})
    floods.refill({"b": (5, 0)})
    floods.arrive("a", 10, 400)
    while not floods.worked["a"]:
        floods.serve()
        floods.refill({"a": (5, 0), "b": (5, 0)})

    for _ in range(30):
        assert floods.serve().request.tenant == "b"
        floods.refill({"b": (5, 0)})


def test_a_preempted_sequence_is_charged_once():
    floods = Floods({})
    preempted = floods.arrive("a", 50, 0, limit=1)
    for _ in range(20):
        floods.arrive("b", 10, 0, limit=1)
    floods.arrive("a", 1, 0, limit=1)
    floods.queue.start(preempted)
    floods.queue.stop(preempted)
    floods.queue.add(preempted)

    assert "".join(floods.serve().request.tenant for _ in range(8)) == "bbbbbbaa"


def test_between_tenants_a_level_of_priority_is_worth_patience_average_sequences():
    floods = Floods({"a": 1.0, "b": 1.0})
    for _ in range(40):  # an average sequence has 20 tokens then
        floods.arrive("a", 20, 0, limit=1)
        floods.arrive("b", 20, 0, limit=1)
        floods.serve()
        floods.serve()
    for _ in range(12):
        floods.arrive("a", 20, 0, limit=1, priority=-1)
        floods.arrive("b", 20, 0, limit=1)
    served = "".join(floods.serve().request.tenant for _ in range(12))

    assert 4 <= len(served) - len(served.lstrip("a")) <= 7
    assert served.lstrip("a").startswith("baba"), "afterwards they take turns"


def test_late_priorities_of_a_tenant_delay_no_tenant_that_arrives_next():
    """Starting a sequence of a late priority would otherwise move the virtual time by patience * 100 sequences."""
    floods = Floods({})
    for _ in range(20):  # an average sequence has 20 tokens then
        floods.arrive("before", 20, 0, limit=1)
        floods.serve()
    for _ in range(20):
        floods.arrive("late", 20, 0, limit=1, priority=100)
    for _ in range(5):
        floods.serve()
    for _ in range(60):
        floods.arrive("new", 20, 0, limit=1)
    assert [floods.serve().request.tenant for _ in range(20)] == ["new"] * 20
    for _ in range(60):
        floods.arrive("late", 20, 0, limit=1)
    floods.worked.clear()
    for _ in range(60):
        floods.serve()

    assert floods.worked["new"] > 20 * 15, "the other tenant catches up, and then they take turns"


@pytest.mark.parametrize(
    ("running", "shares", "waiting", "gives"),
    [
        ("aabb", {}, "c", "b"),
        ("aab", {}, "c", "a"),
        ("aabb", {}, "a", None),
        ("abcc", {}, "d", "c"),
        ("abc", {}, "d", None),
        ("aaaa", {"b": 3.0}, "bbb", "a"),
        ("aabb", {"b": 3.0}, "b", "a"),
        ("abbb", {"b": 3.0}, "a", None),
        ("aaaa", {}, "bbb", None),
    ],
)
def test_the_tenant_that_gives_way_keeps_no_less_than_the_one_that_takes(running, shares, waiting, gives):
    floods = Floods(shares)
    sequences = [floods.arrive(tenant, 5, 0) for tenant in running]
    for seq in sequences:
        floods.queue.start(seq)
    for tenant in waiting:
        floods.arrive(tenant, 5, 0)

    found = floods.queue.displaced(sequences)
    assert gives == (None if found is None else found.request.tenant)
    assert found is None or found is [seq for seq in sequences if seq.request.tenant == gives][-1]


# In the scheduler


def flood(driver: Driver, tenant: str, count: int, *, prompt: int = 3, answer: int = 6, share: float = 1.0):
    return [
        driver.add(sequence(prompt, max_tokens=answer, seed=number, root=tenant.encode(), tenant=tenant, share=share))
        for number in range(count)
    ]


def test_a_tenant_within_its_share_takes_a_row_of_a_tenant_beyond_its_own():
    driver = Driver(capacity(rows=4, pages=200))
    flooding = flood(driver, "b", 12, answer=20)
    driver.step()
    modest = flood(driver, "a", 2)
    driver.step()
    driver.step()

    assert all(seq.row is not None for seq in modest)
    assert sum(seq.row is not None for seq in flooding) == 2
    more = flood(driver, "a", 1)[0]
    driver.step()
    assert more.row is None, "beyond its own share a tenant waits"
    driver.finish()
    driver.check_answers()


def test_tenants_that_both_flood_displace_no_sequence():
    driver = Driver(capacity(rows=4, pages=200))
    for _ in range(3):
        for tenant in "ab":
            flood(driver, tenant, 8)
            for _ in range(5):
                driver.step()
    driver.finish()
    driver.check_answers()

    assert driver.scheduler.preemptions == 0
    assert not any(seq.charged for seq in driver.everybody), "every charge was settled"


def test_when_pages_run_out_a_tenant_beyond_its_share_gives_way():
    driver = Driver(capacity(rows=4, pages=18, max_model_len=40))
    flooding = flood(driver, "b", 3, prompt=5, answer=30)
    modest = flood(driver, "a", 1, prompt=5, answer=25)[0]
    while modest.finish is None:
        driver.step()
        assert modest.preemptions == 0

    assert modest.finish is FinishReason.LENGTH
    assert sum(seq.preemptions for seq in flooding) > 0
    driver.finish()
    driver.check_answers()


def test_a_short_prompt_does_not_wait_for_the_long_one_of_another_tenant():
    driver = Driver(capacity(rows=8, pages=200, step_tokens=8, max_model_len=200))
    long = flood(driver, "b", 9, prompt=100)[0]
    driver.step()
    short = flood(driver, "a", 1, prompt=8)[0]
    driver.step()
    driver.step()

    assert short.generated
    assert 16 <= long.computed < 100, "the long prompt continues beside it"


def test_a_tenants_own_long_prompt_is_planned_to_its_end_first():
    driver = Driver(capacity(rows=8, pages=200, step_tokens=8, max_model_len=200))
    flood(driver, "b", 1)
    long = flood(driver, "a", 1, prompt=100)[0]
    for _ in range(4):
        driver.step()
    short = flood(driver, "a", 1, prompt=8)[0]
    driver.step()

    assert long.computed < 100
    assert short.row is None
