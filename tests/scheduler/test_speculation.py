"""Drafts are planned where they pay, within what a step has to spare."""

from __future__ import annotations

import sys
from math import exp

import pytest
from msgspec.structs import replace

from infd.drafting.drafter import NO_DRAFTS
from infd.request import FinishReason
from infd.scheduler import speculation as module
from infd.scheduler.cache import Cache
from infd.scheduler.layout import CacheLayout, PageGroup, Regimes
from infd.scheduler.plan import Draft, Span, StepPlan
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.speculation import CLASSES, Speculation
from infd.scheduler.step_costs import CLIP, LEAST_LATE_S, StepCosts
from tests.drafters import Oracle
from tests.fakes import VOCAB, capacity, continuation
from tests.scheduler.driver import Driver, sequence

FLAT = ((1, 1.0), (64, 1.0))
STEEP = ((1, 1.0), (64, 64.0))
FREE_TO_6 = ((1, 1.0), (6, 1.0), (12, 2.0), (64, 11.0))


def add(driver: Driver, prompt: list[int], *, wrong: float = 0.0, max_tokens: int = 20, **fields):
    drafter = Oracle.of(prompt, 40, wrong=wrong, layout=driver.capacity.layout)
    return driver.add(sequence(prompt, max_tokens=max_tokens, drafter=drafter, **fields))


def drafted(driver: Driver) -> list[int]:
    """Return the number of drafts of each step's first span."""
    return [plan.spans[0].drafts for plan in driver.plans]


def control(costs, most: int = 7) -> Speculation:
    return Speculation(Cache(capacity(), prefix_caching=True), most, costs)


def chosen(speculation: Speculation, agreements: list[float]) -> list[int]:
    """Return the number of drafts of decoding sequences that are given by their agreement; 0: nothing is guessed."""
    sequences = []
    for row, agreement in enumerate(agreements):
        seq = sequence([1, 2, 3], max_tokens=40, drafter=Oracle.of([1, 2, 3], 40 if agreement else 0))
        seq.row, seq.covered, seq.agreement = row, 100, [agreement] * CLASSES
        sequences.append(seq)
    speculation.choose(sequences, 1000)
    plan = StepPlan(0, [], [], [])
    return [speculation.draft(plan, seq, 3, 1000) for seq in sequences]


def test_a_planned_sequence_is_not_held_until_the_next_plan():
    speculation = control(FLAT)
    seq = sequence([1, 2, 3], max_tokens=40, drafter=Oracle.of([1, 2, 3], 40))
    seq.row, seq.covered = 0, 100
    held = sys.getrefcount(seq)
    speculation.choose([seq], 1000)
    assert speculation.draft(StepPlan(0, [], [], []), seq, 3, 1000) > 0
    assert sys.getrefcount(seq) == held


def test_a_steps_cost_is_interpolated_and_extrapolated():
    costs = StepCosts(FREE_TO_6)
    assert [costs.of(rows) for rows in (1, 3, 6, 9, 12, 64, 128)] == pytest.approx(
        [1, 1, 1, 1.5, 2, 11, 22.077], abs=1e-3
    )
    assert StepCosts(()).of(5) == StepCosts(((4, 2.0),)).of(5) / 2 == 1


@pytest.mark.parametrize(
    ("costs", "decoding", "agreement", "expected"),
    [
        (FLAT, 1, 0.9, 7),
        (FLAT, 1, 0.0, 0),
        (STEEP, 1, 0.9, 0),
        (STEEP, 1, 1.0, 0),
        (FREE_TO_6, 1, 0.3, 5),
        (FREE_TO_6, 2, 0.5, 2),
        (FREE_TO_6, 6, 0.5, 0),
        (FREE_TO_6, 8, 1.0, 0),
    ],
)
def test_drafts_maximise_the_expected_tokens_per_second(costs, decoding, agreement, expected):
    assert chosen(control(costs), [agreement] * decoding) == [expected] * decoding


def test_drafts_of_one_sequence_are_weighed_by_the_step_that_all_wait_for():
    costs = ((1, 1.0), (8, 1.0), (9, 1.9), (64, 2.0))  # eight rows with drafts for all would be cheap
    assert chosen(control(costs), [1.0] * 8) == [7] * 8
    assert chosen(control(costs), [1.0, *[0.0] * 7]) == [0] * 8
    assert chosen(control(FREE_TO_6), [0.9, 0.2, 0.0]) == [3, 0, 0]
    assert chosen(control(FREE_TO_6), [0.5, 0.2, 0.6]) == [1, 0, 2]


def test_drafts_of_one_sequence_pay_where_the_others_wait_little_for_them():
    free, none = control(FREE_TO_6), control(FREE_TO_6, 0)
    assert [free.pays_alone(count) for count in (1, 5, 6, 20)] == [True, True, False, False]
    assert not none.pays_alone(1)
    dear = control(((1, 1.0), (8, 1.0), (9, 1.05), (64, 9.0)))
    assert chosen(dear, [1.0, *[0.0] * 7]) == [0] * 8
    assert not dear.pays_alone(8), "right drafts would gain something, but less than it costs to seek them"


def test_a_small_gain_starts_no_drafts_and_a_small_loss_ends_them():
    speculation = control(((1, 1.0), (2, 1.48)), 1)
    assert chosen(speculation, [0.5]) == [0]
    assert chosen(speculation, [0.65]) == [1]
    assert chosen(speculation, [0.5]) == [1]
    assert chosen(speculation, [0.45]) == [0]


def run(costs: StepCosts, seconds: float, drafts: float, steps: int = 100) -> None:
    """Learn the durations of steps of 8 rows without drafts, and of 10 rows with drafts."""
    for _ in range(steps):
        costs.learn(8, (False, False), seconds)
        costs.learn(10, (True, False), drafts)


def test_the_cost_of_steps_with_drafts_is_learnt_from_their_durations():
    costs = StepCosts(FREE_TO_6)
    assert costs.of(10, (True, False)) / costs.of(8) == pytest.approx(1.25)
    run(costs, 1.0, 2.0)
    assert costs.of(10, (True, False)) / costs.of(8) == pytest.approx(2.0, rel=0.05)
    assert costs.of(24, (True, False)) / costs.of(16) > StepCosts(FREE_TO_6).of(24) / StepCosts(FREE_TO_6).of(16)
    before = costs.of(10, (True, False)) / costs.of(8)
    run(costs, 5.0, 10.0)
    assert costs.of(10, (True, False)) / costs.of(8) == pytest.approx(before, rel=0.05), "the machine became slower"


def test_steps_with_drafts_cost_as_much_more_as_steps_without_until_one_is_seen():
    costs = StepCosts(FREE_TO_6)
    before = costs.of(10, (True, True)) / costs.of(8, (False, True))
    for _ in range(100):
        costs.learn(8, (False, False), 1.0)
        costs.learn(8, (False, True), 2.0)
    assert costs.of(8, (False, True)) > 1.5 * costs.of(8)
    assert costs.of(10, (True, True)) / costs.of(8, (False, True)) == pytest.approx(before, rel=0.2)


def test_a_long_pause_says_little_of_a_steps_cost():
    costs = StepCosts(FREE_TO_6)
    run(costs, 1.0, 2.0)
    before = costs.of(10, (True, False))
    assert costs.learn(10, (True, False), 500.0) == CLIP
    assert costs.of(10, (True, False)) < 1.06 * before


def test_by_how_much_a_step_begins_late_is_learned_beside_steps_issued_ahead():
    costs = StepCosts(FREE_TO_6)
    before = costs.late_s
    for _ in range(50):
        costs.learn(1, (False, False), 1.2, late=True)
    assert costs.late_s == before, "a slow machine is not told from a late step"
    for _ in range(200):
        costs.learn(1, (False, False), 3.0)
        costs.learn(1, (False, False), 3.6, late=True)
        costs.learn(4, (True, False), 4.5, late=True)
    assert costs.late_s == pytest.approx(0.6, rel=0.1), "of steps that take three times as long as at start"
    assert exp(costs.log(1, late=True) - costs.log(1)) == pytest.approx(1.2, rel=0.03)
    assert exp(costs.log(4, (True, False), late=True) - costs.log(1)) == pytest.approx(1.5, rel=0.1)
    costs.learn(1, (False, False), 500.0, late=True)
    assert costs.late_s < 0.66


def test_no_noise_makes_late_steps_free():
    costs = StepCosts(FLAT)
    for _ in range(200):
        costs.learn(8, (False, False), 1.0)
        costs.learn(8, (False, False), 0.9, late=True)
    assert costs.late_s == LEAST_LATE_S


def test_steps_that_begin_much_later_than_those_issued_ahead_are_not_awaited_for_a_small_gain():
    def awaits(late: float) -> bool:
        speculation = control(((1, 1.0), (8, 1.0)))
        plain = StepPlan(0, [], [], [Span(0, 3, 1, 1)])
        for _ in range(200):
            speculation.took(plain, 1.0, masked=False)
            speculation.took(plain, 1.0 + late, masked=False, late=True)
        seq = sequence([1, 2, 3], max_tokens=40, drafter=Oracle.of([1, 2, 3], 40))
        seq.row, seq.covered, seq.agreement = 0, 100, [0.15] * CLASSES
        return speculation.awaits([seq])

    assert awaits(0.05)
    assert not awaits(0.3)


class Places:
    """Knows answers of which each token is its place in the sequence; or nothing."""

    sure, run = False, 0
    knows, asked = False, 0

    def draft(self, tokens, most):
        self.asked += 1
        return [*range(len(tokens), len(tokens) + most)] if self.knows else []

    def finish(self, tokens):
        """No-op: nothing is remembered."""


class Decoding:
    """Sequences that decode together, in steps of 8 ms, or more with drafts."""

    costs = ((1, 8e-3), (8, 8e-3), (16, 12e-3), (64, 48e-3))

    def __init__(self, sequences: int) -> None:
        self.speculation = control(self.costs)
        self.sequences = []
        self.ahead = False
        self.steps = 0
        for row in range(sequences):
            seq = sequence([0, 1, 2], max_tokens=10_000, drafter=Places())
            seq.row, seq.covered = row, 20_000
            self.sequences.append(seq)

    @property
    def asked(self) -> int:
        return sum(seq.drafter.asked for seq in self.sequences)

    def tell(self, *, knows: bool) -> None:
        for seq in self.sequences:
            seq.drafter.knows = knows

    def step(self) -> int:
        """Compute a step; return the number of drafts that it verified."""
        self.steps += 1
        speculation, plan, late = self.speculation, StepPlan(self.steps, [], [], []), not self.ahead
        speculation.choose([] if self.ahead else self.sequences, 1000)
        for seq in self.sequences:
            drafts = speculation.draft(plan, seq, len(seq.tokens), 7)
            plan.spans.append(Span(seq.row, len(seq.tokens) - 1, 1 + drafts, 1 + drafts))
        self.ahead = not speculation.awaits(self.sequences)  # decided while the step is computed
        for seq, span in zip(self.sequences, plan.spans, strict=True):
            seq.tokens += range(len(seq.tokens), len(seq.tokens) + span.drafts + 1)
            if span.drafts:
                speculation.count(seq, span.drafts, span.drafts)
        speculation.committed()
        speculation.took(plan, StepCosts(self.costs).of(plan.tokens), masked=False, late=late)
        return plan.tokens - len(plan.spans)


def test_drafts_that_gain_nothing_are_sought_for_many_sequences_in_a_small_share_of_the_time():
    many = Decoding(8)
    for _ in range(400):
        many.step()
    before = many.asked
    assert before * module.SEEKING_S > 0.9 * module.CREDIT * 8e-3
    assert not any(many.step() for _ in range(1000))
    assert many.asked - before == pytest.approx(1000 * 8e-3 * module.SPARE / module.SEEKING_S, rel=0.1)
    plain = StepPlan(0, [], [], [Span(row, 3, 1, 1) for row in range(8)])
    many.speculation.took(plain, 8e-3, masked=False)
    for _ in range(60):
        many.speculation.took(plain, 16e-3, masked=False, late=True)
    for seq in many.sequences[:4]:
        seq.drafter.knows = True
    before = many.asked
    assert not any(many.step() for _ in range(1000)), "drafts would gain less than steps issued ahead"
    assert many.asked - before == pytest.approx(1000 * 8e-3 * module.SPARE / module.SEEKING_S, rel=0.1)
    few = Decoding(3)
    for _ in range(1000):
        few.step()
    assert few.asked >= 3000, "a step that few sequences wait for has the time"


def test_durations_are_learned_from_few_steps_while_no_drafts_are_sought(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_SKIPPED", 0)  # so each search is one for all sequences, and searches are rare
    many, learned = Decoding(8), []
    for _ in range(400):
        many.step()
    monkeypatch.setattr(StepCosts, "learn", lambda *_, **__: learned.append(1) or 0.0)
    for _ in range(160):
        many.step()
    assert 160 / module.LEARNED <= len(learned) <= 160 / 2


def test_drafts_that_gain_are_found_soon_although_none_gained_before_and_are_sought_in_every_step_from_then_on():
    many = Decoding(8)
    for _ in range(500):
        many.step()
    many.tell(knows=True)
    drafts = [many.step() for _ in range(200)]
    first = next(at for at, each in enumerate(drafts) if each)
    assert first <= 100
    assert all(drafts[first:])
    before = many.asked
    many.tell(knows=False)
    for _ in range(100):
        many.step()
    assert many.asked - before >= 200, "what drafts gained is spent on seeking others"


def test_steps_do_not_wait_for_drafts_that_are_never_there_when_they_begin():
    few = Decoding(3)
    speculation, waited = few.speculation, []
    for _ in range(300):
        for seq in few.sequences:
            seq.agreement = [0.3] * CLASSES
        few.tell(knows=True)
        waited.append(speculation.awaits(few.sequences))
        speculation.committed()
        few.tell(knows=False)
        speculation.choose(few.sequences if waited[-1] else [], 1000)
        assert not speculation.chosen
        speculation.committed()
    assert all(waited[:5])
    assert sum(waited[100:]) < 30


def test_drafts_that_became_too_expensive_are_tried_again():
    speculation = control(((1, 1.0), (8, 1.0), (64, 1.3)), 1)
    assert chosen(speculation, [0.9]) == [1]
    plan = StepPlan(0, [], [], [Span(0, 3, 2, 2)], [], [Draft(0, 3, [1])])
    plain = StepPlan(0, [], [], [Span(0, 3, 1, 1)])
    for _ in range(100):
        speculation.took(plain, 1.0, masked=False)
        speculation.took(plan, 3.0, masked=False)
    assert chosen(speculation, [0.9]) == [0]
    steps = 0
    while not any(chosen(speculation, [0.9])):
        speculation.took(plain, 1.0, masked=False)
        steps += 1
    assert 64 <= steps <= 1000


def test_a_step_with_a_prompt_does_not_change_the_cost_of_decoding_steps():
    speculation, other = control(FREE_TO_6), control(FREE_TO_6)
    plan = StepPlan(0, [], [], [Span(0, 3, 2, 2), Span(1, 0, 100, 1)], [], [Draft(0, 3, [1])])
    for _ in range(100):
        speculation.took(plan, 50.0, masked=False)
    assert chosen(speculation, [0.9]) == chosen(other, [0.9]) == [5]


def test_right_guesses_begin_drafts_and_wrong_guesses_end_them():
    driver = Driver(replace(capacity(rows=1), row_costs=FREE_TO_6), drafts=7)
    add(driver, [1, 2, 3], wrong=1.0, max_tokens=30)
    driver.finish()
    assert drafted(driver)[1] == 5
    assert drafted(driver)[-3:] == [0, 0, 0]
    driver = Driver(replace(capacity(rows=1), row_costs=((1, 1.0), (4, 2.6), (64, 60.0))), drafts=7)
    add(driver, [1, 2, 3], max_tokens=30)
    driver.finish()
    assert drafted(driver)[1] == 0, "at first half of the guesses are assumed to be right"
    assert max(drafted(driver)) == 3, "guesses are compared with tokens although no step verifies them"
    driver.check_answers()


class Sometimes(Oracle):
    """Is right behind long runs, which every third guess has, and wrong behind short ones."""

    def draft(self, tokens, most):
        self.run = 1 if len(tokens) % 3 else 8
        right = super().draft(tokens, most)
        return right if self.run == 8 else [(token + 1) % VOCAB for token in right]


def test_guesses_behind_short_runs_say_nothing_of_guesses_behind_long_runs():
    driver = Driver(replace(capacity(rows=1), row_costs=((1, 1.0), (2, 1.5), (64, 90.0))), drafts=1)
    driver.add(sequence([1, 2, 3], max_tokens=39, drafter=Sometimes.of([1, 2, 3], 40)))
    driver.finish()
    late = [span for plan in driver.plans[-10:] for span in plan.spans]
    assert [span.drafts for span in late[:-1]] == [0 if (span.start + 1) % 3 else 1 for span in late[:-1]]
    assert {span.drafts for span in late[:-1]} == {0, 1}
    driver.check_answers()


class Asked(Oracle):
    """Counts guesses."""

    asked = 0

    def draft(self, tokens, most):
        self.asked += 1
        return super().draft(tokens, most)


def asked(sequences: int, wrong: float) -> tuple[int, int]:
    """Return how many guesses are asked for, and in how many steps, while sequences generate 40 tokens each."""
    driver = Driver(capacity(rows=8, pages=400), drafts=4)
    drafters = [Asked.of([n, 2, 3], 41, wrong=wrong) for n in range(sequences)]
    for n, drafter in enumerate(drafters):
        driver.add(sequence([n, 2, 3], max_tokens=40, drafter=drafter))
    driver.finish()
    driver.check_answers()
    return sum(each.asked for each in drafters), len(driver.plans)


@pytest.mark.parametrize(("sequences", "wrong", "share"), [(8, 1.0, 0.5), (8, 0.0, 1.0), (8, 0.3, 1.0), (2, 1.0, 1.0)])
def test_of_many_sequences_those_are_skipped_whose_guesses_fail(
    sequences: int, wrong: float, share: float, monkeypatch: pytest.MonkeyPatch
):
    skipping = asked(sequences, wrong)
    monkeypatch.setattr(module, "MANY", 100)
    every = asked(sequences, wrong)
    assert skipping[0] <= share * every[0]
    assert share < 1 or skipping == every, "guesses that are right now and then are never skipped"


class Certain(Oracle):
    sure = True


def test_a_sure_draft_is_verified_although_other_guesses_were_wrong():
    driver = Driver(replace(capacity(rows=1), row_costs=FREE_TO_6), drafts=7)
    seq = add(driver, [1, 2, 3], wrong=1.0, max_tokens=39)
    for _ in range(30):
        driver.step()
    assert drafted(driver)[-3:] == [0, 0, 0]
    seq.drafter = Certain.of([1, 2, 3], 60)
    driver.step()
    assert drafted(driver)[-1] == 5
    agreement = seq.agreement
    driver.finish()
    assert seq.agreement == agreement, "sure drafts say nothing of other guesses"
    driver.check_answers()


@pytest.mark.parametrize(("pages", "tokens"), [(20, 16), (9, 10)])
def test_a_draft_takes_no_page_that_a_running_sequence_needs_next(pages: int, tokens: int):
    layout = CacheLayout((PageGroup(layers=(0,), page_tokens=2),))
    driver = Driver(capacity(layout, pages=pages, rows=2, step_tokens=16), drafts=4)
    add(driver, [1, 2, 3], max_tokens=tokens)
    add(driver, [4, 5, 6], max_tokens=16)
    driver.finish()
    assert not driver.scheduler.preemptions
    assert max(span.drafts for plan in driver.plans for span in plan.spans) == 4
    driver.check_answers()


@pytest.mark.parametrize("outgrown", range(4, 12))
def test_no_draft_is_computed_with_angles_of_shorter_texts(outgrown: int):
    layout = CacheLayout((PageGroup(layers=(0,), page_tokens=2),), regimes=Regimes(outgrown=outgrown))
    driver = Driver(replace(capacity(layout), row_costs=FLAT), drafts=4)
    add(driver, [1, 2, 3], max_tokens=16)
    driver.finish()
    assert max(drafted(driver)) == 4
    driver.check_answers()


@pytest.mark.parametrize("wrong", [0.3, 0.7, 1.0])
def test_pages_in_which_a_span_may_begin_anew_are_kept_behind_the_window(wrong: float):
    layout = CacheLayout((PageGroup(layers=(0,), page_tokens=2, window=3),))
    driver = Driver(replace(capacity(layout), row_costs=FLAT), depth=2, drafts=4)
    seq = add(driver, [1, 2, 3], wrong=wrong, max_tokens=36)
    driver.finish()
    assert seq.drafted > seq.kept_drafts
    driver.check_answers()


def test_where_attention_is_confined_to_chunks_nothing_is_drafted():
    layout = CacheLayout((PageGroup(layers=(0,), page_tokens=2, chunk=4),))
    scheduler = Scheduler(replace(capacity(layout), row_costs=FLAT), max_drafts=4)
    assert scheduler.speculation.most == 0


class Failing(Oracle):
    """Fails behind the tokens of a first step with drafts."""

    def draft(self, tokens, most):
        if len(tokens) > 8:
            raise RecursionError("too deep")
        return super().draft(tokens, most)


def test_a_drafter_that_fails_costs_its_answer_the_drafts_and_nothing_else(caplog: pytest.LogCaptureFixture):
    driver = Driver(replace(capacity(), row_costs=FLAT), drafts=3)
    add(driver, [1, 2], max_tokens=30)
    failing = driver.add(sequence([3, 4, 5], max_tokens=30, drafter=Failing.of([3, 4, 5], 40)))
    driver.finish()
    driver.check_answers()
    assert failing.drafter is NO_DRAFTS
    assert failing.kept_drafts > 0
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RecursionError]


def test_the_last_token_of_an_answer_is_not_drafted_behind():
    driver = Driver(drafts=7)
    seq = add(driver, [1, 2, 3], max_tokens=6)
    driver.finish()
    assert drafted(driver) == [0, 4]
    assert len(driver.plans) == 2
    assert seq.finish is FinishReason.LENGTH


def test_tokens_behind_a_stop_are_dropped():
    answer = continuation([1, 2, 3], 12)
    driver = Driver(drafts=7)
    seq = add(driver, [1, 2, 3], max_tokens=12, end_ids=frozenset(answer[4:5]))
    driver.finish()
    assert seq.tokens[3:] == answer[:5]
    assert seq.finish is FinishReason.STOP


def test_accepted_tokens_are_found_in_the_cache_and_no_others():
    driver = Driver(drafts=4)
    add(driver, [1, 2, 3], wrong=0.3, max_tokens=14)
    driver.finish()
    known = [1, 2, 3, *continuation([1, 2, 3], 14)]
    again = driver.add(sequence(known, max_tokens=3))
    driver.finish()
    assert again.prompt_cached == 16
    driver.check_answers()


class Between(Oracle):
    """Is right from token `first` to token `last` of the choice, and guesses nothing else."""

    first, last = 0, 0

    def draft(self, tokens, most):
        known = len(tokens)
        return super().draft(tokens, min(most, self.last - known)) if self.first <= known < self.last else []


def ahead_of(first: int, last: int, *, costs=((1, 5e-3), (8, 5e-3), (64, 0.1)), rows: int = 1) -> Driver:
    """Generate 120 tokens with right guesses between two tokens, with a step issued ahead where that is permitted."""
    driver = Driver(replace(capacity(rows=rows, pages=400, max_model_len=256), row_costs=costs), ahead=1, drafts=7)
    for row in range(rows):
        drafter = Between.of([row, 1, 2], 130)
        drafter.first, drafter.last = first, last
        driver.add(sequence([row, 1, 2], max_tokens=120, drafter=drafter))
        driver.step()
    driver.finish()
    driver.check_answers()
    return driver


def starts(steps, *, drafts: bool = False) -> list[int]:
    return [step.plan.spans[0].start for step in steps if step.plan.drafts or not drafts]


def test_without_guesses_every_decoding_step_is_issued_ahead():
    driver = ahead_of(0, 0)
    assert starts(driver.issued_ahead) == list(range(3, 122))
    assert ahead_of(0, 0, rows=3).issued_ahead[10:]


def test_no_step_is_issued_ahead_of_tokens_behind_which_drafts_pay():
    driver = ahead_of(0, 123)
    assert not driver.issued_ahead
    assert len(driver.steps) < 1 + 120 / 7
    assert len(ahead_of(0, 123, costs=((1, 5e-3), (64, 0.32))).issued_ahead) == 119, "right drafts cost what they gain"


def test_drafts_begin_one_token_late_behind_steps_that_were_issued_ahead_and_steps_are_issued_ahead_again():
    driver = ahead_of(40, 60)
    drafted, ahead = starts(driver.steps, drafts=True), starts(driver.issued_ahead)
    assert ahead[:37] == list(range(3, 40))
    assert drafted == [40, 48, 56]
    assert ahead[37] > 60, "drafts were common"
    assert ahead[37:] == list(range(ahead[37], 122))
    assert len(ahead) > 70


def test_drafts_that_are_rare_and_gain_little_are_not_waited_for():
    speculation = control(((1, 5e-3), (8, 5e-3)))
    seq = sequence([1, 2, 3], max_tokens=40, drafter=Oracle.of([1, 2, 3], 0))
    seq.row, seq.covered = 0, 100
    speculation.choose([seq], 1000)
    assert not speculation.awaits([seq])
    seq.drafter = Oracle.of([1, 2, 3], 40)
    assert not speculation.awaits([seq]), "nothing is guessed anew before a token more is known"
    speculation.committed()
    assert speculation.awaits([seq])
    seq.agreement = [0.03] * CLASSES
    speculation.committed()
    assert not speculation.awaits([seq])


def test_a_sequence_that_was_waited_for_is_guessed_for_as_if_its_last_token_were_known():
    speculation = control(((1, 5e-3), (8, 5e-3)))
    seq = sequence([1, 2, 3], max_tokens=40, drafter=Oracle.of([1, 2, 3], 40))
    seq.row, seq.covered, seq.in_flight = 0, 100, 1
    assert speculation.awaits([seq])
    assert speculation.draft(StepPlan(0, [], [], []), seq, 4, 1000) == 0, "a step issued ahead has no drafts"
    assert seq.guess == (3, continuation([1, 2, 3], 7), 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_and_kept_drafts_are_counted(depth: int):
    driver = Driver(drafts=3, depth=depth)
    add(driver, [1, 2, 3], max_tokens=17)
    driver.finish()
    counted = driver.scheduler.speculation
    verified = [span.drafts for plan in driver.plans for span in plan.spans if span.drafts]
    assert (counted.drafts, counted.drafted) == (len(verified), sum(verified))
    assert sum(counted.accepted) + len(driver.plans) >= 17
    assert counted.accepted[0] >= counted.accepted[1] >= counted.accepted[2]
