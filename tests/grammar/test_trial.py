"""The worker processes that write constraints: when they start, and what their tasks get when a worker ends."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infd.constraint import JsonObject, JsonSchema, Lark, Regex
from infd.errors import GrammarFailed, GrammarInterrupted, InfdError, ServerStopped, TooSlow
from infd.grammar.forks import MEMORY, NICE
from infd.grammar.llguidance import FUEL, LlguidanceCompiler
from infd.grammar.protocol import Limits
from infd.grammar.trial import Trial
from infd.grammar.workers import WORKERS
from infd.offload import WORKER_STACK
from tests.grammar import vocabularies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.constraint import Constraint

PATTERNS = [{"pattern": f".*{a}.*{b}"} for a in "abcdef" for b in "uvwxyz"]
ENDLESS = JsonSchema(json.dumps({"allOf": PATTERNS}))  # takes the whole of any limit of time
LONG = Limits(seconds=60)


@pytest.fixture
def trial() -> Iterator[Trial]:
    trial = Trial()
    yield trial
    trial.close()


def written(trial: Trial, constraint: Constraint = JsonObject(), limits: Limits = Limits()) -> int:  # noqa: B008
    return len(trial(constraint, limits, {}, FUEL).grammars)


def failing(trial: Trial) -> tuple[threading.Thread, list[Exception]]:
    """Start a task without end on a thread, and return the list that gets its error."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            written(trial, ENDLESS, LONG)
        except InfdError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, errors


def children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def busy_fork(worker: int) -> int:
    """Return the process that runs the worker's task, once it has taken processor time."""
    while True:
        for fork in children(worker):
            fields = Path(f"/proc/{fork}/stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[11]) >= 5:  # ticks of 10 ms
                return fork


def test_no_worker_starts_before_the_first_constraint_and_a_spare_is_kept_after_it(trial: Trial):
    assert trial.workers.pids == []
    assert written(trial)
    first, spare = trial.workers.pids
    assert written(trial)
    assert trial.workers.pids == [first, spare]


def test_a_spare_is_kept_until_there_is_a_worker_for_each_thread(trial: Trial):
    with ExitStack() as stack:
        for _ in range(WORKERS + 2):
            stack.enter_context(trial.workers.worker())
    with ExitStack() as stack:
        lent = [stack.enter_context(trial.workers.worker()) for _ in range(WORKERS + 2)]
    assert len(set(map(id, lent))) == WORKERS + 2
    assert trial.workers.pids == []  # none of these had a task


def test_a_task_whose_worker_is_killed_gets_a_named_error_and_the_next_task_another_worker(trial: Trial):
    assert written(trial)
    before = trial.workers.pids
    thread, errors = failing(trial)
    busy = next(pid for pid in before if children(pid) and busy_fork(pid))
    os.kill(busy, signal.SIGKILL)
    thread.join()

    assert [type(each) for each in errors] == [GrammarInterrupted]
    assert errors[0].status == 503  # type: ignore[attr-defined]
    assert written(trial)
    assert busy not in trial.workers.pids


def test_a_task_whose_memory_ends_is_refused_and_its_worker_forks_again(trial: Trial):
    assert written(trial)
    worker = trial.workers.pids[0]
    thread, errors = failing(trial)
    os.kill(busy_fork(worker), signal.SIGKILL)  # as the kernel does if memory runs out
    thread.join()

    assert [str(each) for each in errors] == ["compiling the constraint takes too much memory"]
    assert isinstance(errors[0], GrammarFailed)
    assert written(trial)
    assert worker in trial.workers.pids


def test_a_worker_yields_to_the_daemon_and_its_memory_is_bounded(trial: Trial):
    assert written(trial)
    (fork,) = children(trial.workers.pids[0])
    nice = int(Path(f"/proc/{fork}/stat").read_text().rsplit(")", 1)[1].split()[16])
    assert nice == min(19, os.nice(0) + NICE)
    limits = Path(f"/proc/{fork}/limits").read_text().splitlines()
    assert next(line.split()[3:5] for line in limits if line.startswith("Max data size")) == [str(MEMORY)] * 2
    assert next(line.split()[3] for line in limits if line.startswith("Max stack size")) == str(WORKER_STACK)


def test_a_task_ends_at_its_limit_of_processor_time(trial: Trial):
    with pytest.raises(TooSlow, match=r"more than 0.05 s") as failed:
        written(trial, ENDLESS, Limits(seconds=0.05))
    assert failed.value.code == "grammar_too_large"
    with pytest.raises(TooSlow, match=r"more than 0.05 s"):
        trial.locate(ENDLESS, Limits(seconds=0.05), FUEL)
    assert written(trial)


DOUBLED = Lark("start: R0\n" + "".join(f"R{n}: R{n + 1} R{n + 1}\n" for n in range(25)) + 'R25: "a"?\n')


@pytest.mark.parametrize(
    ("constraint", "code"), [(DOUBLED, "grammar_too_large"), (Lark("start: missing"), "invalid_grammar")]
)
def test_what_the_worker_refuses_is_not_compiled_again(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, constraint: Constraint, code: str
):
    compiler, compiled = LlguidanceCompiler(vocabularies.byte_level(0), trial), []
    monkeypatch.setattr(compiler, "_compile", compiled.append)
    with pytest.raises(GrammarFailed) as refusal:
        compiler.compile(constraint, Limits())
    assert refusal.value.code == code
    assert compiled == []


def test_closing_ends_the_tasks_with_the_error_of_a_stopped_server(trial: Trial):
    assert written(trial)
    thread, errors = failing(trial)
    busy_fork(trial.workers.pids[0])
    trial.close()
    thread.join()

    assert [type(each) for each in errors] == [ServerStopped]
    with pytest.raises(ServerStopped):
        written(trial)


def test_a_text_that_is_not_unicode_is_malformed(trial: Trial):
    with pytest.raises(GrammarFailed, match="not valid Unicode"):
        written(trial, Regex("\ud800"))
