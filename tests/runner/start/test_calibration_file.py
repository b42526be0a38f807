"""A start reuses the previous start's measurement if its key and one check agree."""

from __future__ import annotations

import json
import os
import time
from itertools import chain, cycle, repeat
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from infd.config import CacheConfig, Config, DeviceConfig, SchedulerConfig
from infd.runner.pulse import Pulse
from infd.runner.start import calibration_file, trial
from infd.runner.start.calibration_file import NAME
from tests.runner.driving import load
from tests.runner.fake_model import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DESCRIBED = MappingProxyType({"architectures": ["Fake"], "hidden_size": 8})


class Machine:
    """A machine's step time, and its number of steps run.

    beside  for each further step how many times as long it takes because of another process
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow = 1.0
        self.steps = 0
        self.beside: Iterator[float] = iter(())
        self._computed = 0.0
        self._run = trial.run
        monkeypatch.setattr(trial, "run", self)
        clocks = SimpleNamespace(perf_counter=time.perf_counter, thread_time=lambda: self._computed)
        monkeypatch.setattr(trial, "time", clocks)

    def __call__(self, runner: Any, plan: Any) -> float:
        self._run(runner, plan)
        self.steps += 1
        duration = self.slow * (0.06 + 0.002 * max(0, plan.tokens - 16))
        self._computed += duration
        return duration * next(self.beside, 1.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def settings(directory: Path | str, **scheduler: Any) -> Config:
    return Config(
        device=DeviceConfig(kind="cpu", threads=1, kernel_cache=str(directory)),
        scheduler=SchedulerConfig(max_num_seqs=8, **scheduler),
        cache=CacheConfig(bytes=2**20, page_tokens=4),
    )


def start(machine: Machine, config: Config, described: dict[str, Any] | None = None) -> tuple[int, tuple[int, ...]]:
    """Return the number of trial steps of a start, and its measurement."""
    before = machine.steps
    held = load(FakeModel(), config, Pulse(), max_len=200, described=described or dict(DESCRIBED)).capacity
    return machine.steps - before, (held.step_tokens, held.mixed_tokens, held.crowded_tokens, held.score_cost)


def test_the_next_start_reuses_the_measurement_after_one_check(machine: Machine, tmp_path: Path, caplog):
    caplog.set_level("INFO", "infd.runner")
    measured, found = start(machine, settings(tmp_path / "new"))
    assert "earlier start" not in caplog.text

    steps, again = start(machine, settings(tmp_path / "new"))

    assert (steps, again) == (2, found)  # the first step of all, and the shortest
    assert measured > 2
    assert f"measured by an earlier start; remove {tmp_path / 'new' / NAME}" in caplog.text


def test_a_measurement_is_discarded_with_its_file(machine: Machine, tmp_path: Path):
    measured, _ = start(machine, settings(tmp_path))
    (tmp_path / NAME).unlink()

    assert start(machine, settings(tmp_path))[0] == measured


@pytest.mark.parametrize("slow", [0.7, 1.3])
def test_steps_of_another_duration_are_measured_again_and_kept(machine: Machine, tmp_path: Path, slow: float):
    start(machine, settings(tmp_path))
    machine.slow = slow

    steps, found = start(machine, settings(tmp_path))

    assert steps > 2
    assert start(machine, settings(tmp_path)) == (2, found)


def test_a_disturbed_step_is_measured_again(machine: Machine, tmp_path: Path, monkeypatch):
    start(machine, settings(tmp_path))
    disturbed = iter([1.0, 3.0, 1.0])  # the first step of all, then twice the shortest
    run = machine.__call__

    def once(runner, plan):
        machine.slow = next(disturbed)
        return run(runner, plan)

    monkeypatch.setattr(trial, "run", once)
    assert start(machine, settings(tmp_path))[0] == 3


def test_long_steps_beside_another_process_are_run_again_until_one_is_calm(machine: Machine, tmp_path: Path):
    measured, found = start(machine, settings(tmp_path / "calm"))
    machine.beside = chain([1.0], cycle([2.0, 1.0]))  # the first step of all, then every second one

    steps, again = start(machine, settings(tmp_path / "busy"))

    assert (steps - 1, again) == (2 * (measured - 1), found)
    assert start(machine, settings(tmp_path / "busy"))[0] == 2


def test_what_another_process_disturbed_is_measured_again_by_the_next_start_once(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "infd.runner")
    _, calm = start(machine, settings(tmp_path / "calm"))
    machine.beside = chain([1.0, 1.0], repeat(2.0))  # all but the first step and the shortest
    _, busy = start(machine, settings(tmp_path / "busy"))
    assert busy < calm
    assert "the next start measures again" in caplog.text

    machine.beside = iter(())
    assert start(machine, settings(tmp_path / "busy"))[1] == calm
    assert start(machine, settings(tmp_path / "busy")) == (2, calm)

    for measures in (True, True, False):
        machine.beside = chain([1.0, 1.0], repeat(2.0))
        steps, found = start(machine, settings(tmp_path / "throttled"))
        assert (steps > 2, found) == (measures, busy)


@pytest.mark.parametrize(
    "changed",
    [
        {"described": {**DESCRIBED, "hidden_size": 16}},
        {"config": {"step_target_ms": 90.0}},
        {"version": "0.0.0"},
        {"machine": ["another"]},
        {"kernels": "another"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_everything_that_decides_step_time_is_part_of_the_key(machine: Machine, tmp_path: Path, monkeypatch, changed):
    start(machine, settings(tmp_path))
    if "version" in changed:
        monkeypatch.setattr(calibration_file, "__version__", changed["version"])
    if "machine" in changed:
        monkeypatch.setattr(calibration_file, "_machine", lambda _: changed["machine"])
    if "kernels" in changed:
        monkeypatch.setattr(calibration_file, "built_from", lambda: changed["kernels"])

    steps, _ = start(machine, settings(tmp_path, **changed.get("config", {})), changed.get("described"))

    assert steps > 2
    assert start(machine, settings(tmp_path, **changed.get("config", {})), changed.get("described"))[0] == 2


def test_models_do_not_evict_each_other_and_their_path_does_not_matter(machine: Machine, tmp_path: Path):
    config = settings(tmp_path)
    start(machine, config)
    start(machine, config, {"another": "model"})

    elsewhere = replace(config, model=replace(config.model, path="elsewhere"))

    assert start(machine, elsewhere)[0] == 2


def test_only_the_last_ones_are_kept(machine: Machine, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(calibration_file, "MOST", 2)
    for number in range(3):
        start(machine, settings(tmp_path), {"number": number})

    assert len(json.loads((tmp_path / NAME).read_text())) == 2
    assert [start(machine, settings(tmp_path), {"number": number})[0] for number in (1, 2)] == [2, 2]


SOUND = {"shortest_s": 0.06, "alone": 64, "mixed": 32, "crowded": 56, "score_cost": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"a": 1}',
        json.dumps({"a": SOUND | {"alone": 0}}).encode(),
        json.dumps({"a": SOUND | {"shortest_s": 0}}).encode(),
        b"{" + b" " * calibration_file.LARGEST_BYTES + b"}",
    ],
)
def test_a_file_that_is_broken_is_not_believed_but_replaced(machine: Machine, tmp_path: Path, content: bytes, caplog):
    (tmp_path / NAME).write_bytes(content)

    steps, found = start(machine, settings(tmp_path))

    assert steps > 2
    assert f"{tmp_path / NAME} cannot be read" in caplog.text
    assert start(machine, settings(tmp_path)) == (2, found)


def test_steps_larger_than_there_may_be_are_not_believed(machine: Machine, tmp_path: Path):
    _, found = start(machine, settings(tmp_path))
    path = tmp_path / NAME
    path.write_text(path.read_text().replace(f'"alone": {found[0]}', '"alone": 1000000'))
    assert "1000000" in path.read_text()

    assert start(machine, settings(tmp_path))[1] == found


def test_a_directory_that_cannot_be_written_does_not_end_the_start(machine: Machine, tmp_path: Path):
    (tmp_path / "file").touch()

    measured, found = start(machine, settings(tmp_path / "file"))

    assert start(machine, settings(tmp_path / "file")) == (measured, found)


def test_nothing_is_kept_where_there_is_no_directory(machine: Machine, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start(machine, settings(""))
    assert os.listdir(tmp_path) == []
