from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import gpu_kernels
import pytest
from gpu import main
from gpu_steps import issued

if TYPE_CHECKING:
    from pathlib import Path


def test_the_gpu_benchmark_can_be_tried_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = "--batches 1 3 --context 32 --prompt 40 --long 2 --steps 3 --rounds 1 --served 48"
    command = ["gpu.py", "--device", "cpu", "--models", "tiny", *sizes.split(), "--json", f"{tmp_path}/gpu.jsonl"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    lines = capsys.readouterr().out.splitlines()
    prompts, decoding, busy, narrow, served, kernels = 2, 4, 4, 2, 6, 21
    assert sum("tok/s" in line for line in lines) == prompts + decoding + busy + narrow + served
    found = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert set(found[0]) == {"machine", "torch", "ops"}
    assert sum("launched_us" in figure for figure in found) == kernels
    beside = [figure for figure in found if "floor_us" in figure]
    assert len(beside) == sum("floor" in line for line in lines) == sum("tok/s" in line for line in lines) + kernels
    assert sum(figure.get("name") == "captures beside the first" for figure in found) == 2


def test_without_graphs_steps_are_launched_and_without_a_peer_nobody_else_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = tmp_path / "gpu.jsonl"
    command = (
        f"gpu.py --device cpu --models tiny --batches 1 --context 32 --prompt 40 --steps 2 --rounds 1 --json {written}"
    )
    monkeypatch.setattr(
        sys, "argv", [*command.split(), *["--no-graphs", "--no-peer", "--served", "16", "--parts", "steps", "served"]]
    )
    main()
    names = [json.loads(line).get("name", "") for line in written.read_text().splitlines()]
    assert not [name for name in names if "replayed" in name or "by transformers" in name]
    assert [name for name in names if "with 4 adapters" in name]


def test_calls_of_cuda_are_counted_by_what_they_give_the_device() -> None:
    counts = [("cudaLaunchKernelExC", 3.0), ("cuLaunchKernel", 2.0), ("cudaMemcpyAsync", 1.5), ("cudaGraphLaunch", 1.0)]
    assert issued([*counts, ("aten::mm", 9.0)]) == {"launches": 5.0, "copies": 1.5, "replays": 1.0}


def test_what_is_measured_may_be_chosen_and_what_was_found_is_kept_where_the_rest_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("the machine is taken away")

    written = tmp_path / "gpu.jsonl"
    command = f"gpu.py --device cpu --models tiny --batches 1 --context 32 --rounds 1 --parts kernels --json {written}"
    monkeypatch.setattr(gpu_kernels, "shaping", lost)
    for chosen, found in (("", ["add_rms_norm", "silu_mul", "entry"] * 2), ("--only triton", [])):
        monkeypatch.setattr(sys, "argv", [*command.split(), *chosen.split()])
        with pytest.raises(RuntimeError, match="taken away"):
            main()
        kept = [json.loads(line)["name"] for line in written.read_text().splitlines()[1:]]
        assert [name.split()[1] for name in kept] == found
