from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import gpu_kernels
import pytest
import torch
from first_gpu import EXPECTED, expectations
from gpu import main
from gpu_machine import Timed
from gpu_steps import issued
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpu_machine import Bench, Shape


@pytest.mark.exhaustive
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
    for each in expectations(EXPECTED.read_text()):
        if (
            "qwen3" in each.name
            and each.part not in ("tune", "products-8b", "experts")
            and not each.name.split(": ")[1].startswith(("captures", "calls"))
        ):
            assert any(each.field in figure for figure in beside if kind(figure["name"]) == kind(each.name)), each
    exact = [figure["off"] for figure in beside if "off" in figure]
    assert exact
    assert max(exact) < 0.1
    assert [figure["others"] for figure in beside if "others" in figure] == [0] * 4


def kind(name: str) -> str:
    """Return a figure's name without the model, the kernel and the numbers."""
    return re.sub(r"[\d,]*\d|native|triton|flashinfer fa3", "_", name.partition(": ")[2] or name)


@pytest.mark.exhaustive
def test_without_graphs_every_step_is_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = "--batches 1 --context 32 --prompt 40 --steps 2 --rounds 1 --parts steps"
    command = f"gpu.py --device cpu --models tiny --no-graphs {sizes} --json {tmp_path}/gpu.jsonl"
    monkeypatch.setattr(sys, "argv", command.split())
    main()
    names = [json.loads(line).get("name", "") for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert not [name for name in names if "replayed" in name]
    assert [name for name in names if "with 4 adapters" in name]


@pytest.mark.exhaustive
def test_calls_are_counted_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = f"gpu.py --device cpu --models tiny --batches 2 --context 32 --parts calls --json {tmp_path}/gpu.jsonl"
    monkeypatch.setattr(sys, "argv", command.split())
    main()
    names = [json.loads(line).get("name") for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert names[2:] == ["calls of 2 that decode, launched", "calls of 2 that decode, replayed"]


def test_cuda_calls_are_counted_by_kind_of_device_work() -> None:
    counts = [("cudaLaunchKernelExC", 3.0), ("cuLaunchKernel", 2.0), ("cudaMemcpyAsync", 1.5), ("cudaGraphLaunch", 1.0)]
    assert issued([*counts, ("aten::mm", 9.0)]) == {"launches": 5.0, "copies": 1.5, "replays": 1.0}


def test_parts_may_be_chosen_and_results_are_kept_if_a_later_part_fails(
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
        kept = [json.loads(line)["name"] for line in written.read_text().splitlines()[2:]]
        assert [name.split()[1] for name in kept] == found


def test_products_of_quantized_matrices_are_compared_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("triton", minversion="3.8")
    import gpu_machine
    import gpu_products

    from infd.kernels.triton import float8
    from tests.kernels.triton.conftest import compute_as_hardware

    compute_as_hardware(monkeypatch)

    def timed(bench: Bench, work: Callable[[], object]) -> Timed:
        work()
        return Timed(1.0, None)

    written = tmp_path / "gpu.jsonl"
    monkeypatch.setattr(sys, "argv", f"x --device cpu --models tiny --batches 1 20 130 --json {written}".split())
    monkeypatch.setattr(float8, "capability", lambda: (9, 0))
    monkeypatch.setattr(gpu_machine.Bench, "timed", timed)
    gpu_products.main()
    assert "fp8 in blocks, 192 x 64: no product of inputs as fp8 in groups of 128" in capsys.readouterr().out
    found = [json.loads(line) for line in written.read_text().splitlines()][1:]
    assert max(figure["off"] for figure in found if "off" in figure) < 0.01
    for each in expectations(EXPECTED.read_text()):
        if each.part == "products-8b" and "in blocks" not in each.name:
            assert any(each.field in figure for figure in found if kind(figure["name"]) == kind(each.name)), each


def test_attention_is_timed_with_the_default_and_with_the_tiling_that_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    import gpu_tune

    from infd.kernels.triton import blocks, tilings
    from infd.kernels.triton.tiles import Shape as Heads

    here = blocks.Gpu("NVIDIA H200", 132, 227 * blocks.KIB)
    heads, used = Heads(8, 2, 128, torch.bfloat16), []
    other = replace(heads.default_tiling(here), programs=8)

    def warm(model: Path, kept: Path) -> float:
        assert json.loads((model / "config.json").read_text())["num_attention_heads"] == 16
        tilings.write(tilings.ATTENTION, kept, here, found)
        return 1.0

    def attention(bench: Bench, name: str, family: Any, shape: Shape, spans: list[tuple[int, int]]) -> Timed:
        used.append(tilings.tilings(tilings.ATTENTION, bench.device)[heads])
        bench.figures.report(f"{name} attention, {len(spans)} spans of {spans[0][1]}", 2.0, 1.0, off=0.0)
        return Timed(3.0, 1.0 if used[-1] == other else 2.0)

    written = tmp_path / "gpu.jsonl"
    command = f"gpu_tune.py --device cpu --models qwen3-0.6b --batches 1 --rounds 1 --json {written}"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(blocks, "gpu", lambda device: here)
    monkeypatch.setattr(tilings.triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(tilings.triton.knobs.compilation, "listener", None)
    monkeypatch.setattr(gpu_tune, "warm", warm)
    monkeypatch.setattr(gpu_tune, "attention", attention)
    found: dict[str, blocks.Tiling] = {heads.name: other}
    gpu_tune.main()
    assert used == [heads.default_tiling(here)] * 3 + [other] * 3
    lines = {f"{line['model']}: {line['name']}": line for line in map(json.loads, written.read_text().splitlines())}
    assert lines["qwen3-0.6b: tuned attention beside the default, 1 spans of 1024"]["times"] == 0.5
    for each in expectations(EXPECTED.read_text()):
        if each.part == "tune":
            assert any(each.field in line for name, line in lines.items() if kind(name) == kind(each.name)), each
    found.clear()
    with pytest.raises(RuntimeError, match="no tiling is kept"):
        gpu_tune.main()
