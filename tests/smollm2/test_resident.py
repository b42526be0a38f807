"""A daemon's resident memory with SmolLM2-135M-Instruct: weights as kept, and little else."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infd.hub.packages import find
from tests.e2e.process import ROOT, Daemon

MODELS = Path(__file__).parents[2] / "build/test-data/infd/models"  # where `make test-data` puts it
INFDCTL = "from infd.admin.ctl import main; main()"
MORE = 1.15  # of what a daemon with the embedded model has beside its weights

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]


def resident(daemon: Daemon) -> int:
    fields = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    (kib,) = (field.split()[1] for field in fields if field.startswith("VmRSS:"))
    return int(kib) * 1024


def status(daemon: Daemon) -> dict[str, Any]:
    command = [sys.executable, "-c", INFDCTL, "--socket", str(daemon.admin_socket), "status", "--json"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    facts: dict[str, Any] = json.loads(said)
    return facts


def beside(directory: Path, model: str) -> int:
    """Start a daemon. Return what is resident beside the weights once it is ready: no page of the cache is, yet."""
    directory.mkdir()
    arguments = ["--device", "cpu", "--model", model, "--kv-cache-bytes", "16MiB"]
    with closing(Daemon(directory, arguments, {})) as daemon:
        daemon.ready()
        return resident(daemon) - int(status(daemon)["large_pages"]["of"])


def test_resident_memory_is_the_weights_and_the_need_of_any_model(tmp_path: Path) -> None:
    if (file := find("smollm2", MODELS)) is None:
        pytest.skip("make test-data")
    small, real = beside(tmp_path / "embedded", "embedded"), beside(tmp_path / "smollm2", str(file))
    print(f"beside weights, MiB: embedded {small >> 20}, SmolLM2 {real >> 20}")
    assert real <= MORE * small
