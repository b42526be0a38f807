"""Fixtures shared by all tests."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

import pytest
import torch

from tests.e2e.process import Daemon
from tests.grammar.engines import engine
from tests.native import built, library
from tests.tiny import tiny

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["built", "engine", "library", "tiny"]

if not torch.cuda.is_available():
    # Triton reads the variable when a kernel is defined, its own kernels included; transformers imports triton.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files of which `make test` or `make test-all` selects nothing, because imports take long.

    Marks that a file imports have a name with "exhaustive" or "histories" in it.
    """
    if config.option.markexpr not in OMITTED or not collection_path.match("test_*.py"):
        return None
    return bool(OMITTED[config.option.markexpr].search(collection_path.read_text(encoding="utf-8"))) or None


# Texts of the files that an expression of `-m` omits.
OMITTED = {
    "not exhaustive": re.compile(r"^pytestmark = \[?pytest\.mark\.exhaustive\b", re.MULTILINE),
    "exhaustive or histories": re.compile(r"\A(?!.*(?:exhaustive|histories))", re.DOTALL | re.IGNORECASE),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Give the test a log without handlers, and take away those that it adds."""
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in (None, "infd", "infd.access")}
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def gpu() -> torch.device:
    """Return a GPU, or skip. `-m gpu` selects the tests with this fixture."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Limit torch to one thread: tiny products gain nothing from more, and on a busy machine others only spin."""
    torch.set_num_threads(1)


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Start `infd start` processes; kill those still running at the end."""
    daemons: list[Daemon] = []

    def start(
        *arguments: str, listening: socket.socket | None = None, module: str = "infd", **variables: str
    ) -> Daemon:
        directory = tmp_path / str(len(daemons))
        directory.mkdir()
        daemons.append(Daemon(directory, arguments, variables, listening, module))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()
