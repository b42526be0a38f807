"""A pytest plugin that writes each test's outcome at once as a line of JSON, so that an interrupted run keeps them.

pytest -p gpu_reports --report-lines FILE
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

    import pytest

LONGEST = 2000  # characters of a failure


class Reports:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report.longreprtext, s=report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, report.outcome, report.longreprtext)

    def _write(self, test: str, outcome: str, said: str, **more: float) -> None:
        line = {"test": test, "outcome": outcome, **more}
        if outcome == "failed":
            line["said"] = said[-LONGEST:]
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-lines", type=Path, help="where each test's outcome is written")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("report_lines")
    if path is not None and not hasattr(config, "workerinput"):  # xdist's workers report to their parent process
        config.pluginmanager.register(Reports(path.open("w")), "lines")
