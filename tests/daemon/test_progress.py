"""Progress of a long start is reported at a readable rate."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from infd.config import LogConfig
from infd.daemon import progress
from infd.daemon.progress import DRAW_EVERY_S, LINE_EVERY_S, Stage
from infd.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 2**20


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    for name in ("infd", "infd.access"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, int]]:
    return [(record.message, record.percent, record.mib) for record in caplog.records]


def test_without_a_terminal_it_is_a_line_now_and_then(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, progress.log.name)
    clock = Clock()
    with Stage("loading tiny", None, clock) as stage:
        for done in range(0, 100, 2):
            clock.time += LINE_EVERY_S / 10
            stage(done * MIB, 100 * MIB)

    assert lines(caplog) == [("loading tiny", at, at) for at in (18, 38, 58, 78, 98)]


def test_a_short_task_is_not_reported(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, progress.log.name)
    clock = Clock()
    with Stage("loading tiny", None, clock) as stage:
        clock.time += LINE_EVERY_S * 0.9
        stage(1, 2)
        stage(2, 2)

    assert lines(caplog) == []


def test_progress_after_the_end_is_ignored(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, progress.log.name)
    clock = Clock()
    stage = Stage("fetching org/tiny", None, clock)
    with stage:
        pass
    clock.time += 2 * LINE_EVERY_S
    stage(1, 2)

    assert lines(caplog) == []


def test_nothing_to_do_is_no_division_by_zero(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, progress.log.name)
    clock = Clock()
    with Stage("loading tiny", None, clock) as stage:
        clock.time += 2 * LINE_EVERY_S
        stage(0, 0)

    assert lines(caplog) == [("loading tiny", 0, 0)]


def drawn(clock: Clock) -> tuple[Stage, io.StringIO]:
    screen = io.StringIO()
    return Stage("loading [red]tiny", Console(file=screen, force_terminal=True, width=120), clock), screen


def test_on_a_terminal_it_is_a_bar_that_is_gone_at_the_end():
    clock = Clock()
    stage, screen = drawn(clock)
    with stage:
        clock.time += 2 * DRAW_EVERY_S
        stage(30 * MIB, 100 * MIB)
        clock.time += DRAW_EVERY_S / 2
        shown = screen.getvalue()
        stage(60 * MIB, 100 * MIB)
        assert screen.getvalue() == shown, "drawn more often than anybody can see"
        clock.time += 2 * DRAW_EVERY_S
        stage(61 * MIB, 100 * MIB)

    assert "loading [red]tiny" in shown, "a name is no markup"
    assert "31.5/104.9 MB" in shown
    assert "64.0/104.9 MB" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K"), "the line was not erased"


def test_log_lines_go_above_the_bar(logger: None, capfd: pytest.CaptureFixture[str]):
    log.configure(LogConfig(format="plain"))
    clock = Clock()
    screen = io.StringIO()
    with Stage("loading tiny", Console(file=screen, force_terminal=True, width=200), clock) as stage:
        clock.time += 2 * DRAW_EVERY_S
        stage(1, 2)
        logging.getLogger("infd.test").info("something else")
        clock.time += 2 * DRAW_EVERY_S
        stage(2, 2)
    logging.getLogger("infd.test").info("afterwards")

    text = screen.getvalue()
    assert "INFO infd.test something else" in text
    assert text.rindex("loading tiny") > text.index("something else")
    assert "something else" not in capfd.readouterr().err.replace("afterwards", "")
