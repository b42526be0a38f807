from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from typing import TYPE_CHECKING, Any

import first_gpu
import gpu_kit
import gpu_probe
import pytest
import torch
from first_gpu import PLAN, ROOT, Run, Site, Stage, Without, bounds, dry_run, expectations, summary

from tests.kernels.flashinfer.documented import Package
from tests.runner.cuda_driver import Bank, FakeDriver

if TYPE_CHECKING:
    from pathlib import Path

PAGE = first_gpu.EXPECTED.read_text()
LINGERING = "../tests/bench/lingering"
EQUAL = "tests/runner/test_cuda_graphs.py::test_on_a_gpu_captured_steps_are_equal_to_those_that_are_not[qwen3]"
TESTS = [part for part in PLAN if part.tests]


def run(tmp_path: Path, **changed: Any) -> Run:
    given = {"out": tmp_path, "site": Site(None, tmp_path), "scratch": tmp_path, "until": time.monotonic() + 600.0}
    return Run(**{**given, "without": Without(), **changed})


def test_the_plan_can_be_walked_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = [part for part in PLAN if not part.tests]
    assert dry_run(scripts, Site(None, tmp_path), Without(graphs=True), tmp_path) == 0
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines() if line[0] != " "] == [part.name for part in scripts]
    missing = Stage("missing", "gpu", ("--models", "of-nobody"), 1, 1)
    assert dry_run([missing], Site(None, tmp_path), Without(), tmp_path) == 1


def test_every_test_that_the_plan_names_exists() -> None:
    """`--dry-run` collects the tests too, but not in `make test`: a renamed file would be noticed on the GPU."""
    named = {word.removeprefix("--ignore=") for part in TESTS for word in part.arguments if "tests/" in word}
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
    sources = "".join((ROOT / name).read_text() for name in named if name.endswith(".py"))
    tests = [name for name in (*first_gpu.NO_VMM, *first_gpu.NO_GRAPHS) if name.startswith("test_")]
    assert tests
    assert [name for name in tests if f"def {name}(" not in sources] == []


@pytest.mark.exhaustive
def test_the_plans_tests_are_collected_without_openai_and_flashinfer() -> None:
    wanting = ["tests/e2e/test_openai_client.py", "tests/e2e/test_lora.py", "tests/http/test_tools.py"]
    named = [word for part in TESTS for word in part.arguments if word.startswith(("tests/", "--ignore"))]
    absent = "import sys; sys.modules |= dict.fromkeys(('openai', 'flashinfer'))"
    collect = f"{absent}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    given = [*first_gpu.PYTEST[2:], "--collect-only", *dict.fromkeys([*named, *wanting])]
    env = Site(None, ROOT).environment(Without(), flashinfer=False)
    command = [sys.executable, "-c", collect, *given]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for name in named:
        assert name.startswith("--ignore") or f"\n{name}" in f"\n{done.stdout}", name
        assert not name.startswith("--ignore") or name.removeprefix("--ignore=") not in done.stdout


@pytest.mark.parametrize("deaf", [False, True])
def test_a_stage_that_exceeds_its_limit_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool
) -> None:
    monkeypatch.setattr(first_gpu, "GRACE_S", 0.2)
    walk = run(tmp_path)
    walk.part(Stage("lingers", LINGERING, ("--deaf",) if deaf else (), 1.0, 0.0))
    kept = [json.loads(line) for line in (tmp_path / "first_gpu.jsonl").read_text().splitlines()]
    assert kept == walk.lines
    assert [line.get("name", line.get("state")) for line in kept] == ["captures", "cut off"]
    assert walk.without.flags == ["--no-graphs"]
    assert "captures" in summary(walk.lines, walk.without)


def test_the_next_run_begins_at_the_first_stage_that_was_skipped(tmp_path: Path) -> None:
    walk = run(tmp_path, until=time.monotonic() + 30.0, without=Without(graphs=True))
    walk.part(Stage("steps-8b", LINGERING, (), 300, 90))
    walk.part(Stage("sleep", LINGERING, (), 300, 90))
    assert summary(walk.lines, walk.without).endswith("\ngo on with: --from steps-8b --no-graphs\n")


def test_a_stage_cut_off_by_the_runs_limit_is_repeated(tmp_path: Path) -> None:
    walk = run(tmp_path, until=time.monotonic() + first_gpu.KEPT_S + 1.0)
    walk.part(Stage("probe", LINGERING, (), 300, 0.0))
    assert first_gpu.unfinished(walk.lines) == "probe"


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ({"name": "arena", "ok": False}, ["--no-vmm"]),
        ({"name": "captures", "ok": False}, ["--no-graphs"]),
        ({"name": "captures", "ok": True}, []),
        ({"name": "captures", "failed": 1.0}, []),
        ({"test": EQUAL, "outcome": "passed"}, []),
        ({"test": EQUAL, "outcome": "failed"}, ["--no-graphs"]),
    ],
)
def test_a_failed_part_sets_the_flag_that_avoids_it_later(line: dict[str, Any], flags: list[str]) -> None:
    without = Without()
    without.learn(line)
    assert without.flags == flags


def test_without_mapped_memory_cuda_bindings_cannot_be_imported(tmp_path: Path) -> None:
    env = Site(None, tmp_path).environment(Without(vmm=True), flashinfer=False)
    tried = [sys.executable, "-c", "from infd.runner.arenas.driver import _bindings; _bindings()"]
    done = subprocess.run(tried, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "ImportError: bench/first_gpu.py was told to do without" in done.stderr


def test_the_kits_wheels_are_unpacked_where_stages_find_them(tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    kit.mkdir()
    with zipfile.ZipFile(kit / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "found = True\n")
    (kit / "msgspec-1-cp27-cp27-linux.whl").write_text("for another Python")
    env = Site(kit, tmp_path).environment(Without(), flashinfer=True)
    subprocess.run([sys.executable, "-c", "import carried, gpu_reports"], env=env, check=True)


def test_each_tests_outcome_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 'this' == 'that'\n"
        "def test_skips(): pytest.skip('no GPU here')\n"
        "@pytest.fixture\n"
        "def broken(): raise RuntimeError('set-up')\n"
        "def test_errs(broken): pass\n"
    )
    env = Site(None, tmp_path).environment(Without(), flashinfer=False)
    given = ["-m", "pytest", "-q", "-p", "gpu_reports", "-p", "no:cacheprovider", "--report-lines", "lines", "."]
    subprocess.run([sys.executable, *given], cwd=tmp_path, env=env, capture_output=True, check=False)
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    outcomes = ["passed", "failed", "skipped", "failed"]
    assert [line["outcome"] for line in lines] == outcomes
    assert "assert 'this' == 'that'" in lines[1]["said"]
    found = first_gpu.measured({"part": "kernel-tests", **line} for line in lines)
    assert found["kernel-tests", "tests", "failed"] == 2
    assert "FAILED test_it.py::test_errs" in summary([{"part": "kernel-tests", **line} for line in lines], Without())


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("2 to 3.5", (2, 3.5)),
        ("1,000 to 2,000", (1000, 2000)),
        ("at most 4", (float("-inf"), 4)),
        ("at least 0.5", (0.5, float("inf"))),
        ("1", (1, 1)),
    ],
)
def test_bounds_are_read_as_they_are_written(said: str, expected: tuple[float, float]) -> None:
    assert bounds(said) == expected


def test_every_row_of_the_page_belongs_to_a_stage_and_has_bounds() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| part |")]
    read = expectations(PAGE)
    assert len(read) == len(rows) > 60
    for each in read:
        for said in (each.h100, each.h200):
            least, most = bounds(said)
            assert least <= most


def test_measured_figures_are_shown_beside_the_expected_ones_of_that_gpu() -> None:
    lines: list[dict[str, Any]] = [
        {"part": "probe", "name": "versions", "gpu": "NVIDIA H200", "ok": True},
        {"part": "steps-0.6b", "model": "", "name": "machine", "GB_s": 3000.0},
        {"part": "steps-0.6b", "model": "qwen3-0.6b", "name": "captures", "failed": 0},
    ]
    said = summary(lines, Without()).splitlines()
    assert "an H200" in next(line for line in said if "gpu_expected.md" in line)
    (rate,) = (line.split() for line in said if "GB_s" in line)
    assert rate[0] == "below"
    assert rate[-3:] == ["4,100", "to", "4,400"]
    assert any(line.split()[0] == "ok" for line in said if "captures" in line)


def test_cases_about_memory_hold_on_the_books_of_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = gpu_probe.Probe(torch.device("cpu"))
    for case in (gpu_probe.arena, gpu_probe.graph_over_release, gpu_probe.park):
        bank = Bank(FakeDriver())
        monkeypatch.setattr(gpu_probe, "bank_of", lambda device, bank=bank: bank)
        with torch.inference_mode():
            found = case(probe)
        expected = {each.field for each in expectations(PAGE) if each.name == case.__name__}
        assert expected <= set(found)


@pytest.mark.exhaustive
def test_a_case_that_fails_or_ends_its_process_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "probe.py"
    script.write_text(
        "import sys, os, gpu_probe\n"
        "def fails(probe): raise RuntimeError('it is so')\n"
        "def ends(probe): os._exit(7)\n"
        "def holds(probe): return {'number': 1.0}\n"
        "gpu_probe.CASES = (fails, ends, holds)\n"
        "gpu_probe.attempt(sys.argv[sys.argv.index('--cases') + 1:], 'cpu')\n"
        "os._exit(9)\n"  # as CUDA may at exit after a lost device
    )
    monkeypatch.setattr(gpu_probe, "__file__", str(script))
    monkeypatch.setenv("PYTHONPATH", str(first_gpu.BENCH))
    with (tmp_path / "lines").open("w") as file:
        assert gpu_probe.report(gpu_probe.results(["fails", "ends", "holds"], "cpu"), file) == 2
    fails, ends, holds = (json.loads(line) for line in (tmp_path / "lines").read_text().splitlines())
    assert (fails["error"], ends["error"], holds["number"]) == (
        "RuntimeError('it is so')",
        "its process ended with 7",
        1.0,
    )
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["FAIL", "FAIL", "ok"]


def test_if_no_case_can_begin_all_have_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text("raise SystemExit('there is no GPU')\n")
    monkeypatch.setattr(gpu_probe, "__file__", str(script))
    found = list(gpu_probe.results(["arena", "park"], "cpu"))
    assert [(each["name"], each["ok"]) for each in found] == [("arena", False), ("park", False)]


def test_the_cases_that_need_no_cuda_run_on_a_cpu() -> None:
    probe = gpu_probe.Probe(torch.device("cpu"))
    expected: dict[str, set[str]] = {}
    for each in expectations(PAGE):
        if each.part in ("probe", "flashinfer-probe"):
            expected.setdefault(each.name, set()).add(each.field)
    assert set(expected) <= {case.__name__ for case in gpu_probe.CASES}
    for case in gpu_probe.CASES:
        with torch.inference_mode():
            try:
                found = case(probe)
            except gpu_probe.MissingError:
                continue
        assert expected.get(case.__name__, set()) <= set(found), case.__name__


class Overlapped(Package):
    """Its XQA with PDL reads the queries that were there before its predecessor wrote."""

    def xqa(self, q: torch.Tensor, *given: Any, enable_pdl: bool | None = None, **named: Any) -> None:
        read = q if enable_pdl is False or not self.calls else self._before
        self._before = q.clone()
        super().xqa(read, *given, **named)


def test_xqa_that_reads_before_its_input_is_written_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    probe = gpu_probe.Probe(torch.device("cpu"))
    monkeypatch.setattr(gpu_probe, "flashinfer_package", lambda probe: Package())
    with torch.inference_mode():
        found = gpu_probe.xqa_with_pdl(probe)
    assert {each.field for each in expectations(PAGE) if each.name == "xqa_with_pdl"} <= set(found)
    assert found["others"] == 0
    monkeypatch.setattr(gpu_probe, "flashinfer_package", lambda probe: Overlapped())
    with torch.inference_mode(), pytest.raises(RuntimeError, match="with PDL 6 of 6 rounds differ"):
        gpu_probe.xqa_with_pdl(probe)


def test_flashinfers_modules_are_tried_from_the_kit_without_compiling() -> None:
    asked = {part.name: gpu_probe.parse(part.arguments).cases for part in PLAN if part.script == "gpu_probe"}
    assert asked == {
        "probe": [case.__name__ for case in gpu_probe.CASES if case.__name__ not in gpu_probe.BY_NAME],
        "flashinfer-probe": ["xqa_with_pdl"],
    }
    assert all(part.flashinfer == (part.name == "flashinfer-probe") for part in PLAN if part.name in asked)


def test_the_kit_pins_the_versions_of_the_constraints() -> None:
    constraints = set((ROOT / "constraints.txt").read_text().splitlines())
    for name in ("gpu_kit.txt", "gpu_kit_flashinfer.txt"):
        pins = [line for line in (first_gpu.BENCH / name).read_text().splitlines() if "==" in line]
        assert pins
        assert set(pins) <= constraints


def test_the_kit_has_flashinfers_python_and_the_files_that_name_its_modules(tmp_path: Path) -> None:
    kept = ["__init__.py", "data/csrc/norm.cu", "data/build_utils.py", "jit/core.py", "tuned/h100.json"]
    left = ["__pycache__/core.pyc", "data/csrc/moe/gemm.cu", "data/cutlass/include/cute.hpp", "notes.md"]
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in gpu_kit.pruned(tmp_path)} == set(kept)
