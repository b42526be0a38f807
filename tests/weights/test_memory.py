"""Loading needs memory for one copy of the weights and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOADING = Path(__file__).parents[2] / "bench" / "loading.py"
MIB = 2**20
SIZE_MIB = 96
SLACK_MIB = 64 * SIZE_MIB / 1024  # 64 MiB for a checkpoint of 1 GiB


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_at_its_peak_loading_takes_the_weights_and_at_most_the_largest_tensor_besides(dtype: str) -> None:
    command = [sys.executable, str(LOADING), "--mib", str(SIZE_MIB), "--dtype", dtype, "--json"]

    figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert figures["final"] >= SIZE_MIB * MIB * (2 if dtype == "float32" else 1) * 0.95
    assert figures["peak"] >= figures["final"] * 0.95, "the weights are not counted"
    assert figures["peak"] <= figures["final"] + figures["largest"] + SLACK_MIB * MIB
