"""Constrained choices keep their grammar through faults, retries and preemption, and change no neighbour's tokens."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from infd.config import Config, LiveConfig
from infd.drafting.drafter import NO_DRAFTS
from infd.drafting.forced import ForcedDrafter
from infd.drafting.select import ByRequest
from infd.engine.engine import Engine
from infd.engine.steps.constraints import ConstrainedChoice, Constraints, Filled, Sampled, Sought, force
from infd.engine.telemetry import Telemetry
from infd.errors import GrammarFailed, Unsupported
from infd.grammar.outline import Outline
from infd.request import FinishReason, Generate, Request, SamplingParams
from infd.runner.runner import Runner
from infd.scheduler.sequence import Sequence
from infd.telemetry.events import Events
from infd.telemetry.metrics import Metrics
from tests.drafters import Guesses
from tests.engine.driving import ask, collect, nothing_is_left, running, until_steps
from tests.engine.fake_grammars import Counted, CountedGrammar, CountedMatcher, FakeGrammars, constrained
from tests.fakes import VOCAB, FakeExecutor, capacity, continuation
from tests.runner.driving import config, executor
from tests.runner.fake_model import FakeModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from collections.abc import Sequence as Many

    from numpy.typing import NDArray

    from infd.drafting.drafter import Drafting
    from infd.scheduler.plan import StepPlan


def request(
    prompt: list[int], constraint: Any = None, *, max_tokens: int = 40, choices: int = 1, seed: int = 0
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
    return Request(id="r", prompt=tuple(prompt), wants=(Generate(sampling),), choices=choices, constraint=constraint)


DRAFTING: list[Drafting] = [NO_DRAFTS]  # of the engines of `serving`


@pytest.fixture(params=[NO_DRAFTS, Guesses()], ids=["plain", "drafts"])
def drafting(request: pytest.FixtureRequest) -> Iterator[None]:
    DRAFTING[0] = request.param
    yield
    DRAFTING[0] = NO_DRAFTS


@asynccontextmanager
async def serving(executor: FakeExecutor, grammars: FakeGrammars | None = None) -> AsyncIterator[Engine]:
    live = LiveConfig(Config())
    engine = Engine(live, executor, Metrics(), grammars=grammars or FakeGrammars(), drafting=DRAFTING[0])
    async with running(engine):
        yield engine
    nothing_is_left(engine)


def DEPTHS(test: Callable[..., Any]) -> Callable[..., Any]:  # noqa: N802
    """Run a test with one to three steps in flight, with and without drafts."""
    return pytest.mark.parametrize("depth", [1, 2, 3])(pytest.mark.usefixtures("drafting")(test))


@DEPTHS
async def test_constrained_choices_keep_their_grammars_and_neighbours_their_tokens(depth: int):
    async with serving(FakeExecutor(depth=depth)) as engine:
        answers = await asyncio.gather(
            *(ask(engine, request([i, 7], Counted(2 + i, 5 + i), seed=i)) for i in range(6)),
            *(ask(engine, request([i, 8], max_tokens=9, seed=i)) for i in range(3)),
        )
    assert answers == [
        *({0: (constrained([i, 7], Counted(2 + i, 5 + i), seed=i), FinishReason.STOP)} for i in range(6)),
        *({0: (continuation([i, 8], 9, seed=i), FinishReason.LENGTH)} for i in range(3)),
    ]


@DEPTHS
async def test_each_of_several_choices_has_its_own_matcher(depth: int):
    wanted = Counted(3, 6)
    async with serving(FakeExecutor(depth=depth)) as engine:
        answer = await ask(engine, request([1, 2, 3], wanted, choices=4, seed=5))
    assert answer == {i: (constrained([1, 2, 3], wanted, seed=5 + i), FinishReason.STOP) for i in range(4)}


class Creating(FakeGrammars):
    """Counts the matchers; the third cannot be created."""

    created = 0

    async def compile(self, constraint: Counted) -> CountedGrammar:
        grammar = await super().compile(constraint)
        grammar.matcher = partial(self._matcher, grammar.matcher)
        return grammar

    def _matcher(self, create: Callable[[], CountedMatcher]) -> CountedMatcher:
        self.created += 1
        if self.created == 3:
            raise GrammarFailed("out of luck")
        return create()


@DEPTHS
async def test_matchers_are_created_with_the_first_masks_and_a_fault_there_ends_its_choice_alone(depth: int):
    grammars, wanted = Creating(), Counted(3, 6)
    grammars.filling.clear()
    executor = FakeExecutor(capacity(rows=4), depth=depth)
    async with serving(executor, grammars) as engine:
        answering = asyncio.ensure_future(ask(engine, request([1, 2, 3], wanted, choices=8, seed=5)))
        while not executor.issued:
            await asyncio.sleep(0)
        assert grammars.created == 0
        grammars.filling.set()
        answer = await answering
    assert grammars.created == 8
    failed = [i for i in range(8) if answer[i] == ([], FinishReason.ERROR)]
    assert len(failed) == 1
    for i in set(range(8)) - {*failed}:
        assert answer[i] == (constrained([1, 2, 3], wanted, seed=5 + i), FinishReason.STOP)


@DEPTHS
async def test_a_constrained_choice_is_cut_at_max_tokens(depth: int):
    wanted = Counted(3, 20)
    async with serving(FakeExecutor(depth=depth)) as engine:
        answer = await ask(engine, request([1, 2], wanted, max_tokens=4))
    assert answer == {0: (constrained([1, 2], wanted)[:4], FinishReason.LENGTH)}


@DEPTHS
async def test_a_failed_matcher_ends_its_choice_alone(depth: int):
    async with serving(FakeExecutor(depth=depth)) as engine, engine.admit(2, 0) as ticket:
        failing, sound = request([1], Counted(2, 9, fails_at=3)), request([2], Counted(2, 9))
        choices = await ticket.submit(failing, sound)
        errors, answers = {}, {0: [], 1: []}
        async for index, delta in choices:
            answers[index] += delta.token_ids
            errors[index] = delta.error
    assert isinstance(errors[0], GrammarFailed)
    assert answers[0] == constrained([1], Counted(2, 3))
    assert errors[1] is None
    assert answers[1] == constrained([2], Counted(2, 9))


@DEPTHS
@pytest.mark.parametrize("method", ["stopped", "row"])
@pytest.mark.parametrize("others", [1, 2])
async def test_a_fault_of_a_matcher_ends_its_choice_alone_and_is_logged(
    depth: int, method: str, others: int, caplog: pytest.LogCaptureFixture
):
    fails = Counted(2, 9, fails_at=3, fails_in=method)
    async with serving(FakeExecutor(depth=depth)) as engine:
        sound = [request([i], Counted(2, 9), seed=i) for i in range(2, 2 + others)]
        failed, *answers = await asyncio.gather(
            ask(engine, request([1], fails)), *(ask(engine, each) for each in sound)
        )
    assert failed == {0: (constrained([1], Counted(2, 3)), FinishReason.ERROR)}
    assert answers == [{0: (constrained([i], Counted(2, 9), seed=i), FinishReason.STOP)} for i in range(2, 2 + others)]
    assert [(each.message, str(each.exc_info[1])) for each in caplog.records if each.exc_info] == [
        ("a grammar failed", "a fault")
    ]


@DEPTHS
async def test_a_choice_that_is_complete_by_its_mask_ends_before_a_token_is_sampled(depth: int):
    ending, longer = Counted(2, 5, by_mask=True), Counted(2, 9)
    async with serving(FakeExecutor(depth=depth)) as engine:
        answers = await asyncio.gather(ask(engine, request([1], ending)), ask(engine, request([2], longer)))
    assert answers == [
        {0: (constrained([1], Counted(2, 5)), FinishReason.STOP)},
        {0: (constrained([2], longer), FinishReason.STOP)},
    ]


@DEPTHS
async def test_a_mask_has_a_row_for_each_choice_that_is_sampled(depth: int):
    chunked = FakeExecutor(capacity(pages=64, rows=4, step_tokens=8, max_model_len=64), depth=depth)
    prompt = list(range(40))
    async with serving(chunked) as engine:
        answers = await asyncio.gather(
            ask(engine, request([1], Counted(2, 20))), ask(engine, request(prompt, max_tokens=5))
        )
    assert answers == [
        {0: (constrained([1], Counted(2, 20)), FinishReason.STOP)},
        {0: (continuation(prompt, 5), FinishReason.LENGTH)},
    ]
    masked = [step for step in chunked.issued if step.mask is not None]
    assert [len(step.mask) for step in masked] == [sum(span.samples for span in step.plan.spans) for step in masked]
    assert any(len(step.plan.spans) > len(step.mask) for step in masked)


async def test_a_constraint_that_cannot_be_compiled_is_refused_before_it_is_queued():
    async with serving(FakeExecutor()) as engine:
        with pytest.raises(GrammarFailed):
            await ask(engine, request([1], Counted(0, 1)))
        assert engine.status().accepted == 0


async def test_without_grammars_a_constraint_is_refused():
    engine = Engine(LiveConfig(Config()), FakeExecutor(), Metrics())
    async with running(engine):
        with pytest.raises(Unsupported):
            await ask(engine, request([1], Counted(2, 1)))


async def test_a_step_waits_for_its_mask_but_its_forward_pass_does_not():
    grammars, executor = FakeGrammars(), FakeExecutor()
    grammars.filling.clear()
    async with serving(executor, grammars) as engine:
        answer = asyncio.create_task(ask(engine, request([1], Counted(2, 3))))
        while not executor.issued:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.status().steps == 0
        assert len(executor.issued) == 1, "the forward pass is issued"
        grammars.filling.set()
        assert (await answer)[0][0] == constrained([1], Counted(2, 3))


async def test_steps_without_constrained_choices_wait_for_no_mask():
    grammars = FakeGrammars()
    async with serving(FakeExecutor(), grammars) as engine:
        await ask(engine, request([1], max_tokens=5))
    assert grammars.filled == 0


async def test_a_step_without_constrained_choices_samples_after_the_constrained_step_before_it():
    grammars, executor = FakeGrammars(), FakeExecutor(depth=2)
    grammars.filling.clear()
    async with serving(executor, grammars) as engine:
        short = asyncio.create_task(ask(engine, request([1], Counted(2, 5), max_tokens=1)))
        long = asyncio.create_task(ask(engine, request([2], max_tokens=4)))
        for _ in range(50):
            await asyncio.sleep(0)
        assert [len(step.plan.spans) for step in executor.issued] == [2, 1], "the second step is of one choice"
        assert executor.sampled == 0
        grammars.filling.set()
        assert await short == {0: (constrained([1], Counted(2, 1)), FinishReason.LENGTH)}
        assert await long == {0: (continuation([2], 4), FinishReason.LENGTH)}


@DEPTHS
async def test_a_fault_while_a_later_step_is_not_sampled_ends_no_choice(depth: int):
    faults = 0

    def fault(plan: StepPlan) -> None:
        nonlocal faults
        if len(plan.spans) > 1 and plan.number % 5 == 2 and faults < 3:
            faults += 1
            raise RuntimeError("the kernel failed")

    async with serving(FakeExecutor(depth=depth, fault=fault)) as engine:
        answers = await asyncio.gather(*(ask(engine, request([i], Counted(2, 18), seed=i)) for i in range(4)))
    assert answers == [{0: (constrained([i], Counted(2, 18), seed=i), FinishReason.STOP)} for i in range(4)]
    assert faults


@DEPTHS
async def test_tokens_before_a_grammars_first_mask_wait_for_no_mask(depth: int):
    grammars, late = FakeGrammars(), Counted(3, 20, free=15)
    async with serving(FakeExecutor(depth=depth), grammars) as engine:
        answers = await asyncio.gather(*(ask(engine, request([i, 9], late, seed=i)) for i in range(3)))
    assert answers == [{0: (constrained([i, 9], late, seed=i), FinishReason.STOP)} for i in range(3)]
    assert grammars.filled < 3 * (20 - 15) + 6 * depth  # not 60


async def test_each_mask_shows_how_many_further_tokens_wait_for_none():
    grammars, late = FakeGrammars(), Counted(3, 20, free=12, foreseen=4)
    async with serving(FakeExecutor(), grammars) as engine:
        answer = await ask(engine, request([9], late, max_tokens=12))
        assert grammars.filled == 2  # before tokens 4 and 8
        assert answer == {0: (constrained([9], late)[:12], FinishReason.LENGTH)}
        await ask(engine, request([9], late, max_tokens=13))
        assert grammars.filled == 5


@DEPTHS
async def test_preempted_choices_keep_a_late_grammar(depth: int):
    small, late = capacity(pages=10, rows=6, max_model_len=32), Counted(3, 20, free=9)
    async with serving(FakeExecutor(small, depth=depth)) as engine:
        answers = await asyncio.gather(*(ask(engine, request([i, 9], late, seed=i)) for i in range(5)))
        assert engine.core.scheduler.preemptions
    assert answers == [{0: (constrained([i, 9], late, seed=i), FinishReason.STOP)} for i in range(5)]


@DEPTHS
async def test_preempted_choices_continue_their_grammar(depth: int):
    small = capacity(pages=10, rows=6, max_model_len=32)
    async with serving(FakeExecutor(small, depth=depth)) as engine:
        answers = await asyncio.gather(*(ask(engine, request([i, 9], Counted(3, 20), seed=i)) for i in range(5)))
        assert engine.core.scheduler.preemptions
    assert answers == [{0: (constrained([i, 9], Counted(3, 20), seed=i), FinishReason.STOP)} for i in range(5)]


@DEPTHS
async def test_a_choice_continues_its_grammar_after_pause_and_sleep(depth: int):
    async with serving(FakeExecutor(depth=depth)) as engine:
        answer = asyncio.create_task(ask(engine, request([4], Counted(3, 60), max_tokens=80)))
        await until_steps(engine, 5)
        await engine.control.pause("keep").result()
        await engine.control.resume().result()
        await until_steps(engine, 12)
        await engine.control.sleep("keep", level=1).result()
        await engine.control.resume().result()
        assert await answer == {0: (constrained([4], Counted(3, 60)), FinishReason.STOP)}


@DEPTHS
async def test_a_choice_of_a_slow_reader_continues_its_grammar(depth: int):
    async with serving(FakeExecutor(depth=depth)) as engine, engine.admit(1, 0) as ticket:
        choices = await ticket.submit(request([4], Counted(3, 30)))
        await until_steps(engine, 6)
        scheduler = engine.core.scheduler
        (seq,) = scheduler.running
        scheduler.hold(seq)
        for _ in range(30):
            await asyncio.sleep(0)
        scheduler.resume(seq)
        engine.core.loop.wake()
        assert await collect(choices) == {0: (constrained([4], Counted(3, 30)), FinishReason.STOP)}


@DEPTHS
async def test_a_reader_that_leaves_while_a_mask_is_filled_costs_nothing(depth: int):
    grammars = FakeGrammars()
    async with serving(FakeExecutor(depth=depth), grammars) as engine:
        other = asyncio.create_task(ask(engine, request([5], Counted(2, 25))))
        async with engine.admit(1, 0) as ticket:
            await ticket.submit(request([4], Counted(3, 30)))
            await until_steps(engine, 3)
            grammars.filling.clear()
            for _ in range(10):
                await asyncio.sleep(0)
        grammars.filling.set()
        assert await other == {0: (constrained([5], Counted(2, 25)), FinishReason.STOP)}
        assert not len(engine.core.loop._constraints)


@pytest.mark.parametrize("depth", [1, 2])
async def test_on_a_device_thread_a_fault_ahead_of_an_unsampled_step_ends_no_choice(
    depth: int, monkeypatch: pytest.MonkeyPatch
):
    async def answers(read: Any) -> list[Any]:
        """Ask for constrained and other choices on a device thread; read: in place of Runner.read."""
        device = executor(FakeModel(), config(rows=8, step_tokens=32, depth=depth))
        async with serving(device) as engine:
            monkeypatch.setattr(Runner, "read", read)  # after the steps that the start measures
            return await asyncio.gather(
                *(ask(engine, request([i, 5], Counted(3, 7), seed=i)) for i in range(3)),
                *(ask(engine, request([i, 6], max_tokens=8, seed=i)) for i in range(2)),
            )

    steps, sound = 0, Runner.read
    undisturbed = await answers(sound)

    def faulty(self: Runner, landing: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise RuntimeError("the kernel failed")
        return sound(self, landing)

    assert await asyncio.wait_for(answers(faulty), 20) == undisturbed
    assert steps > 8
    assert all(answer[0][1] is FinishReason.STOP for answer in undisturbed[:3])


class Unreadable(CountedMatcher):
    """A matcher that cannot read token 7 as a draft, which it finds only when it reads it; it is then unusable."""

    failed = False

    def validate(self, tokens: Many[int]) -> int:
        return len(tokens)

    def advance(self, tokens: Many[int]) -> None:
        self.failed |= 7 in tokens
        if self.failed:
            raise GrammarFailed("too many items")
        super().advance(tokens)


class UnreadableGrammar(CountedGrammar):
    def matcher(self) -> Unreadable:
        return Unreadable(self.constraint)


@pytest.mark.parametrize(
    ("drafts", "allowed"), [([], 0), ([1, 2, 0], 3), ([1, 7, 0], 1), ([7, 1, 2], 0), ([1, 2, 0, 1, 2], 3)]
)
def test_masks_behind_drafts_change_no_later_mask_and_a_draft_that_fails_the_matcher_fails_nothing(
    drafts: list[int], allowed: int
):
    seq, grammars = Sequence(request([5])), FakeGrammars()
    choice, plain = (ConstrainedChoice(seq, kind(Counted(3, 5))) for kind in (UnreadableGrammar, CountedGrammar))
    for known in (1, 2):
        seq.tokens.append(known - 1)
        mask = filled(grammars, Sampled(0, choice, known, drafts)).mask
        alone = filled(grammars, Sampled(0, plain, known, [])).mask
        assert choice.failure is None
        assert (mask[0] == alone[0]).all()
        assert mask.any(-1).tolist() == [place <= allowed for place in range(len(drafts) + 1)]
        drafts, allowed = [2, 0], 2


class Worn(CountedMatcher):
    """A matcher that reads ten tokens at most, even if it is rolled back, as one whose automata grow."""

    reads = 0

    def advance(self, tokens: Many[int]) -> None:
        self.reads += len(tokens)
        if self.reads > 10:
            raise GrammarFailed("too many states")
        super().advance(tokens)

    def row(self) -> NDArray[np.int32]:
        if self.reads > 9:
            raise GrammarFailed("too many states")
        return super().row()


class WornGrammar(CountedGrammar):
    def matcher(self) -> Worn:
        return Worn(self.constraint)


def filled(grammars: FakeGrammars, *choices: Sampled, seeking: bool = False) -> Filled:
    """Return the mask that a step's choices get."""
    constraints = Constraints(VOCAB, grammars, Telemetry(Events(), Metrics(), time.monotonic))
    return constraints.fill_now(grammars, list(choices), sum(len(each.drafts) + 1 for each in choices), seeking)


@pytest.mark.parametrize(("grammar", "tokens"), [(WornGrammar, 9), (CountedGrammar, 20)])
def test_state_that_a_matcher_keeps_of_drafts_fails_no_choice(grammar: type[CountedGrammar], tokens: int):
    seq = Sequence(request([5]))
    choice = ConstrainedChoice(seq, grammar(Counted(2, 20)))
    for known in range(1, 20):
        seq.tokens.append((known - 1) % 2)
        mask = filled(FakeGrammars(), Sampled(0, choice, known, [known % 2, (known + 1) % 2])).mask
        assert (choice.failure is None) == (known <= tokens)
        if choice.failure is not None:
            return
        assert mask[0].any()


@pytest.mark.parametrize(("known", "ahead"), [(1, True), (2, False)])
def test_what_follows_a_free_part_is_sought_where_the_part_may_end(known: int, ahead: bool):
    grammars, seq = FakeGrammars(), Sequence(request([5]), drafter=ForcedDrafter(NO_DRAFTS))
    grammars.closing = [3]
    seq.tokens += [0, 1][:known]
    choice = ConstrainedChoice(seq, CountedGrammar(Counted(2, 9)))
    (sought,) = filled(grammars, Sampled(0, choice, known, []), seeking=True).sought
    assert sought.ahead == ahead, "token 3 is allowed behind an odd number of tokens"


class Told:
    """A place whose form tells what follows."""

    known = likely = True

    def read(self, tokens: Many[int]) -> None:
        """No-op."""

    def guess(self, most: int) -> list[int]:
        return [9][:most]

    def extended(self, drafts: list[int], most: int) -> list[int]:
        return drafts


def test_nothing_is_sought_where_the_form_of_the_answer_tells_what_follows():
    drafter = ForcedDrafter(NO_DRAFTS)
    grammars, seq = FakeGrammars(), Sequence(request([5]), drafter=drafter)
    choice, place = ConstrainedChoice(seq, CountedGrammar(Counted(VOCAB, 9))), Told()
    drafter.follow(lambda: place, 1)
    for known in (True, False):
        place.known = known
        assert drafter.draft(seq.tokens, 3) == ([9] if known else [])
        assert len(filled(grammars, Sampled(0, choice, 0, []), seeking=True).sought) == (not known)


async def test_a_choice_follows_the_outline_of_its_constraint():
    class Outlined(FakeGrammars):
        def outline(self, constraint: object) -> Outline:
            asked.append(constraint)
            return Outline({"type": "object"}, [b""] * VOCAB, lambda text: [])

    asked: list[object] = []
    wanted = Counted(VOCAB, 21)
    for drafting in (ByRequest(Silent()), NO_DRAFTS):
        engine = Engine(LiveConfig(Config()), FakeExecutor(), Metrics(), grammars=Outlined(), drafting=drafting)
        async with running(engine):
            answer = await ask(engine, request([3, 7], wanted))
        assert answer == {0: (constrained([3, 7], wanted), FinishReason.STOP)}
    assert asked == [wanted], "without drafts none is asked for"


class Unforced(FakeGrammars):
    def forced(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault")


@pytest.mark.parametrize(
    ("read", "drafts", "grammars", "expected"),
    [(2, [2], FakeGrammars(), 1), (2, [7], FakeGrammars(), 0), (1, [2], FakeGrammars(), 0), (2, [2], Unforced(), 0)],
)
def test_seeking_leaves_the_matcher_as_it_was(read: int, drafts: list[int], grammars: FakeGrammars, expected: int):
    seq = Sequence(request([5]), drafter=ForcedDrafter(NO_DRAFTS))
    seq.tokens += [0, 1]
    choice = ConstrainedChoice(seq, UnreadableGrammar(Counted(VOCAB, 5)))
    (before,) = filled(grammars, Sampled(0, choice, 2, [])).mask
    row = np.full(before.shape, -1, np.int32)
    assert len(force(grammars, [Sought(choice, read, drafts, 4, [0, 1, 2], row, ahead=False)], 4)) == expected
    assert choice.failure is None
    assert (filled(grammars, Sampled(0, choice, 2, [])).mask[0] == before).all()


class Silent:
    """A drafter that guesses nothing."""

    most = 4
    sure = False
    run = 0

    def drafter(self, request: Request, root: bytes) -> Silent:
        return self

    def draft(self, tokens: Many[int], most: int) -> list[int]:
        return []

    def finish(self, tokens: Many[int]) -> None:
        """No-op."""


@pytest.mark.parametrize("depth", [1, 2])
async def test_tokens_that_a_grammar_forces_are_drafted(depth: int):
    wanted, free = Counted(VOCAB, 21), Counted(2, 21)  # one token may follow; every second
    steps = {}
    for constraint in (wanted, free):
        runs = FakeExecutor(depth=depth)
        drafting = ByRequest(Silent())
        engine = Engine(LiveConfig(Config()), runs, Metrics(), grammars=FakeGrammars(), drafting=drafting)
        async with running(engine):
            answer = await ask(engine, request([3, 7], constraint))
        assert answer == {0: (constrained([3, 7], constraint), FinishReason.STOP)}
        steps[constraint] = runs.device.steps
        nothing_is_left(engine)
    assert steps[free] >= 21
    assert steps[wanted] <= 21 / 5 + 3 * depth


@pytest.mark.parametrize(("costs", "sought"), [((), True), (((1, 1.0), (64, 64.0)), False)])
async def test_forced_tokens_are_sought_only_where_drafts_pay(costs: tuple[tuple[int, float], ...], sought: bool):
    limits = replace(capacity(pages=256, rows=16, step_tokens=64, max_model_len=256), row_costs=costs)
    grammars, runs = FakeGrammars(), FakeExecutor(limits)
    engine = Engine(LiveConfig(Config()), runs, Metrics(), grammars=grammars, drafting=ByRequest(Silent()))
    async with running(engine):
        answer = await ask(engine, request([3, 7], Counted(VOCAB, 21)))
    assert answer == {0: (constrained([3, 7], Counted(VOCAB, 21)), FinishReason.STOP)}
    assert (runs.device.steps < 21) == sought
    assert sought or grammars.filled == 22, "one call for each mask, and the one that finds the end"


async def test_a_mask_is_begun_once_the_tokens_before_it_are_delivered():
    class Watched(FakeGrammars):
        def run(self, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
            begun.append((engine.core.record.steps, len(runs.issued)))
            return super().run(work, *args)

    begun: list[tuple[int, int]] = []
    runs = FakeExecutor()
    async with serving(runs, Watched()) as engine:
        await ask(engine, request([3, 7], Counted(2, 21)))
    assert begun == [(step, step + 1) for step in range(len(begun))]


async def test_no_forced_token_is_sought_without_drafts():
    grammars = FakeGrammars()
    async with serving(FakeExecutor(), grammars) as engine:
        await ask(engine, request([3, 7], Counted(VOCAB, 5)))
    assert grammars.filled == 6, "one call for each mask, and the one that finds the end"
