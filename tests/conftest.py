"""What tests of several rooms share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from tests.e2e.process import Daemon
from tests.native import built, library
from tests.tiny import tiny

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["built", "library", "tiny"]

if not torch.cuda.is_available():
    # Triton looks at this when a kernel is defined, its own among them; transformers' models import triton if they can.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def gpu() -> torch.device:
    """Return a GPU, or skip. Tests that take it are those of `-m gpu`."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep torch to one thread: tiny products gain nothing from more, and on a busy machine the others only spin."""
    torch.set_num_threads(1)


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Start real `infd start` processes; whatever is left of them at the end is killed."""
    daemons: list[Daemon] = []

    def start(*arguments: str, listening: socket.socket | None = None, **variables: str) -> Daemon:
        directory = tmp_path / str(len(daemons))
        directory.mkdir()
        daemons.append(Daemon(directory, arguments, variables, listening))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()
