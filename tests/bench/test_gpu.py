from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gpu import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_gpu_benchmark_can_be_tried_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = "--batches 1 3 --context 32 --prompt 40 --steps 3 --rounds 1 --served 48"
    command = ["gpu.py", "--device", "cpu", "--models", "tiny", *sizes.split(), "--json", f"{tmp_path}/gpu.json"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    lines = capsys.readouterr().out.splitlines()
    assert sum("floor" in line for line in lines) == 29
    assert sum("tok/s" in line for line in lines) == 12
