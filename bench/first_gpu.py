"""The first half hour on a GPU: probe, tests, then speed; later stages work around features whose probe failed.

    make gpu-kit                                          on a machine with a package index: collect missing packages
    python3 bench/first_gpu.py --out OUT                  on the GPU machine: run the plan, for at most --minutes
    python3 bench/first_gpu.py --out OUT --from steps-8b  resume the plan, as the summary's last lines say
    python bench/first_gpu.py --dry-run                   anywhere: build each command, import each entry point
    python bench/first_gpu.py --read A.jsonl B.jsonl      summarize earlier runs together

Each stage is a process with a time limit. Its results are copied at once to OUT/first_gpu.jsonl as lines of JSON, its
output to OUT/log.txt, and the summary, OUT/first_gpu.txt, is rewritten after every stage, so that a run can be ended at
any moment. The summary lists each measured figure beside the expectation in gpu_expected.md.

If memory cannot be mapped to lasting addresses, later stages use torch's allocator; if graphs cannot be captured, they
launch steps. This program uses only the standard library: the machine has torch, triton and transformers, and other
packages come from the kit (see gpu_kit.py).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TextIO

    Line = dict[str, Any]

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
EXPECTED = BENCH / "gpu_expected.md"
POLL_S = 0.2
GRACE_S = 8.0  # from interrupt to kill, for a stage to write its summary and end its server
KEPT_S = 5.0  # reserved for the summary
SHOWN = 40  # failed tests that the summary names

PYTEST = ["-m", "pytest", "-q", "-rfE", "--tb", "short", "-W", "default", "-m", "gpu", "--timeout", "120"]
PYTEST += ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "gpu_reports"]
COMPILING = [f"--ignore=tests/kernels/triton/test_{name}.py" for name in ("compiling", "models", "warming")]

# Features that later stages do without after a failed probe or test.
NO_VMM = {"arena", "graph_over_release"}
NO_GRAPHS = {
    "captures",
    "capture_beside_a_waiter",
    "test_on_a_gpu_captured_steps_are_equal_to_those_that_are_not",
}


class Stage(NamedTuple):
    """One process of the plan.

    script      file name in bench/ without suffix; "" for pytest
    arguments   of the script
    limit_s     time limit, after which the process is interrupted
    least_s     the stage is skipped if less time remains
    workers     pytest processes; 0: no xdist. Tests that measure free GPU memory must run alone
    steps       computes whole steps, which can run without graphs
    flashinfer  computes with the kit's FlashInfer
    prefix      wrapper program
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    limit_s: float
    least_s: float
    workers: int = 0
    steps: bool = False
    flashinfer: bool = False
    prefix: tuple[str, ...] = ()

    @property
    def tests(self) -> bool:
        return not self.script


SMALL, LARGE = ("--models", "qwen3-0.6b"), ("--models", "qwen3-8b")
RUNNER = tuple(
    f"tests/runner/{name}.py"
    for name in ("test_cuda_graphs", "arenas/test_sleep", "test_overlap", "readouts/test_scoring")
)
# Run by 8 workers at once, tests/executors too: each names the size of its cache, half a MiB, so what the others hold
# changes only the measured budget, which no test compares. RUNNER does compare free memory.
PARITY = tuple(f"tests/{room}/test_parity.py" for room in ("executors", "models", "adapters"))
KERNELS = ("tests/kernels/triton", "tests/kernels/reference/drawing", *COMPILING)
ATTENTION = ("tests/kernels/triton/test_attention.py", "-k", "split or view or tiles")
# Models whose FlashInfer modules the kit has: no windows, no score caps, heads of 128.
CARRIED = "naive_loop_gives and None-None or reads_8_bit and None- or gives_what_the_reference_gives"
TRITON = ("--only", "triton")
PLAN = (
    Stage("probe", "gpu_probe", (), 150, 30),
    Stage("runner-tests", "", (*RUNNER, "--maxfail", "10"), 240, 40),
    Stage("kernel-tests", "", (*KERNELS, "--maxfail", "40"), 300, 60, workers=8),
    Stage("parity-tests", "", (*PARITY, "--maxfail", "40"), 240, 40, workers=8),
    Stage("steps-0.6b", "gpu", (*SMALL, *TRITON, "--parts", "steps", "kernels"), 360, 90, steps=True),
    Stage("steps-8b", "gpu", (*LARGE, "--parts", "steps", "--steps", "32"), 300, 90, steps=True),
    Stage("served-0.6b", "gpu", (*SMALL, "--parts", "served", "--served", "256"), 300, 90, steps=True),
    Stage("calls-0.6b", "gpu", (*SMALL, "--parts", "calls", "--batches", "1"), 90, 40, steps=True),
    Stage("products-8b", "gpu_products", LARGE, 200, 60),
    Stage("experts", "gpu_experts", (), 150, 60),
    Stage("sleep", "sleep", ("--device", "cuda", "--mib", "4096", "--rounds", "2"), 150, 60),
    Stage("tune", "gpu_tune", SMALL, 420, 120),
    Stage("flashinfer-probe", "gpu_probe", ("--cases", "xqa_with_pdl"), 90, 30, flashinfer=True),
    Stage(
        "flashinfer-tests", "", ("tests/kernels/flashinfer", "-k", CARRIED, "--maxfail", "20"), 240, 40, flashinfer=True
    ),
    Stage(
        "flashinfer-kernels", "gpu", (*SMALL, "--parts", "kernels", "--only", "flashinfer"), 200, 60, flashinfer=True
    ),
    Stage(
        "flashinfer-steps",
        "gpu",
        (*LARGE, "--parts", "steps", "--steps", "32", "--flashinfer"),
        300,
        90,
        steps=True,
        flashinfer=True,
    ),
    Stage("sanitizer", "", ATTENTION, 300, 90, prefix=("compute-sanitizer", "--tool", "memcheck")),
)


@dataclass
class Without:
    """Features that later stages must do without."""

    vmm: bool = False
    graphs: bool = False

    def learn(self, line: Line) -> None:
        """Update from a stage's results."""
        name = line.get("test", "").rpartition("::")[2].partition("[")[0] or line.get("name", "")
        failed = line.get("ok") is False or line.get("outcome") == "failed"
        self.vmm |= failed and name in NO_VMM
        self.graphs |= failed and name in NO_GRAPHS

    @property
    def flags(self) -> list[str]:
        return [flag for flag, lacks in (("--no-vmm", self.vmm), ("--no-graphs", self.graphs)) if lacks]


class Site:
    """Packages for the stages that the machine lacks; the kit is unpacked on first use."""

    def __init__(self, kit: Path | None, scratch: Path) -> None:
        self._kit, self._scratch = kit, scratch

    def environment(self, without: Without, *, flashinfer: bool) -> dict[str, str]:
        """Return a stage's environment variables."""
        folders = [self._without_vmm()] if without.vmm else []
        folders += [BENCH, ROOT]
        if self._kit is not None:
            here = (f"-cp{sys.version_info.major}{sys.version_info.minor}-", "-py3-none-")
            wheels = [wheel for wheel in self._kit.glob("*.whl") if any(tag in wheel.name for tag in here)]
            folders.append(self._unpacked("wheels", wheels))
        if flashinfer and (archive := self.flashinfer) is not None:
            folders.append(self._unpacked("flashinfer", [archive]))
        made = {"FLASHINFER_DISABLE_JIT": "1"} if flashinfer else {}  # the kit has no sources to compile other modules
        return dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, folders)), PYTHONUNBUFFERED="1", **made)

    @property
    def flashinfer(self) -> Path | None:
        archive = self._kit / "flashinfer.tar.xz" if self._kit is not None else None
        return archive if archive is not None and archive.exists() else None

    def _unpacked(self, name: str, archives: Iterable[Path]) -> Path:
        folder = self._scratch / name
        if not folder.exists():
            folder.mkdir()
            for archive in archives:
                if archive.suffix == ".whl":
                    zipfile.ZipFile(archive).extractall(folder)  # noqa: S202 - fetched by pip
                else:
                    with tarfile.open(archive) as opened:
                        opened.extractall(folder, filter="data")
        return folder

    def _without_vmm(self) -> Path:
        """Return a folder that hides cuda-bindings, so that infd uses torch's allocator."""
        folder = self._scratch / "no-vmm" / "cuda" / "bindings"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("raise ImportError('bench/first_gpu.py was told to do without')\n")
        return self._scratch / "no-vmm"


def command(part: Stage, without: Without, lines: Path) -> list[str]:
    """Return a stage's command; it writes results to the file `lines`."""
    return [*part.prefix, sys.executable, *arguments(part, without, lines)]


def arguments(part: Stage, without: Without, lines: Path) -> list[str]:
    if part.tests:
        workers = ["-n", str(part.workers), "--dist", "loadfile"] if part.workers else []
        return [*PYTEST, *part.arguments, *workers, "--report-lines", str(lines)]
    launched = ["--no-graphs"] if part.steps and without.graphs else []
    return [str(BENCH / f"{part.script}.py"), *part.arguments, *launched, "--json", str(lines)]


def cannot(part: Stage, site: Site) -> str | None:
    """Return the reason why a stage cannot run here, or None."""
    if part.flashinfer and site.flashinfer is None:
        return "the kit has no FlashInfer (make gpu-kit KIT_FLAGS=--flashinfer)"
    if part.prefix and shutil.which(part.prefix[0]) is None:
        return f"there is no {part.prefix[0]}"
    return None


class Tail:
    """Reads complete lines appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def take(self) -> Iterator[Line]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    yield json.loads(line)


@dataclass
class Run:
    """One run of the plan.

    lines  all results, in order; also written to `out`
    """

    out: Path
    site: Site
    scratch: Path
    until: float
    without: Without
    lines: list[Line] = field(default_factory=list)

    def part(self, part: Stage) -> None:
        """Run a stage, within the remaining time."""
        left = self.until - time.monotonic() - KEPT_S
        if (reason := cannot(part, self.site)) is not None:
            self.write({"part": part.name, "state": "left out", "why": reason})
            return
        if left < part.least_s:
            self.write({"part": part.name, "state": "not begun", "why": f"{max(0.0, left):.0f} s were left"})
            return
        path = self.scratch / f"{part.name}.jsonl"
        env = self.site.environment(self.without, flashinfer=part.flashinfer)
        given = command(part, self.without, path)
        print(f"{part.name}: {' '.join(given)}", flush=True)
        began, limit = time.monotonic(), min(part.limit_s, left)
        with (self.out / "log.txt").open("a") as log:
            log.write(f"\n=== {part.name}: {' '.join(given)}\n")
            log.flush()
            status, whole = self._wait(given, env, log, Tail(path), part.name, began + limit)
        state = "done" if whole else "cut off"
        again = not whole and limit < part.limit_s
        self.write({"part": part.name, "state": state, "status": status, "s": time.monotonic() - began, "again": again})

    def _wait(
        self, given: Sequence[str], env: dict[str, str], log: TextIO, tail: Tail, name: str, until: float
    ) -> tuple[int, bool]:
        """Copy a process's results until it ends or its limit passes; return (exit status, ended by itself)."""
        process = subprocess.Popen(given, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        asked: float | None = None
        try:
            while process.poll() is None:
                now = time.monotonic()
                if asked is None and now > until:
                    asked = now
                    os.killpg(process.pid, signal.SIGINT)
                elif asked is not None and now > asked + GRACE_S:
                    break
                time.sleep(POLL_S)
                self._copy(name, tail)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            self._copy(name, tail)
        return status, asked is None

    def _copy(self, name: str, tail: Tail) -> None:
        for line in tail.take():
            self.without.learn(line)
            self.write({"part": name, **line})

    def write(self, line: Line) -> None:
        self.lines.append(line)
        with (self.out / "first_gpu.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


class Expectation(NamedTuple):
    """A row of gpu_expected.md: the expected figure on an H100 and on an H200."""

    part: str
    name: str
    field: str
    h100: str
    h200: str
    because: str

    def verdict(self, value: float, *, h200: bool) -> str:
        """Return whether a value meets the expectation: a range, an upper or lower bound, or equality."""
        least, most = bounds(self.h200 if h200 else self.h100)
        return "below" if value < least else "above" if value > most else "ok"


def bounds(said: str) -> tuple[float, float]:
    """Read `2 to 3`, `at most 3`, `at least 2` or `2`."""
    words = said.replace(",", "").split()
    if words[0] == "at":
        limit = float(words[2])
        return (float("-inf"), limit) if words[1] == "most" else (limit, float("inf"))
    return float(words[0]), float(words[-1])


def expectations(page: str) -> list[Expectation]:
    """Return the rows of the page's tables whose first column names a stage."""
    names = {part.name for part in PLAN}
    rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in page.splitlines())
    return [Expectation(*row) for row in rows if row[0] in names]


def measured(lines: Iterable[Line]) -> dict[tuple[str, str, str], float]:
    """Return all figures by stage, name and field; tests are counted by outcome."""
    found: dict[tuple[str, str, str], float] = {}
    for line in lines:
        if "test" in line:
            for outcome in ("passed", "failed", "skipped"):
                found.setdefault((line["part"], "tests", outcome), 0)
            found[line["part"], "tests", line["outcome"]] += 1
        name = f"{line['model']}: {line['name']}" if line.get("model") else line.get("name")
        if name is not None:
            numbers = {key: value for key, value in line.items() if isinstance(value, (int, float))}
            found |= {(line["part"], name, key): value for key, value in numbers.items()}
    return found


def summary(lines: Sequence[Line], without: Without) -> str:
    """Return the stages run, failures, and each expected figure beside the measured one."""
    said = ["parts"]
    for line in lines:
        if "state" in line:
            why = line.get("why") or f"status {line['status']}, {line['s']:.0f} s"
            said.append(f"  {line['part']:20} {line['state']:16} {why}")
    said += ["", *_failures(lines), "", *_figures(lines)]
    gone = [name for name, lacks in (("mapped memory", without.vmm), ("graphs", without.graphs)) if lacks]
    if gone:
        said.append(f"\nwithout {' and '.join(gone)}, since trying them failed")
    if (rest := unfinished(lines)) is not None:
        said.append(f"\ngo on with: --from {rest} {' '.join(without.flags)}".rstrip())
    return "\n".join(said) + "\n"


def _failures(lines: Sequence[Line]) -> Iterator[str]:
    tests = Counter((line["part"], line["outcome"]) for line in lines if "test" in line)
    for part in dict.fromkeys(name for name, _ in tests):
        counts = ", ".join(f"{tests[part, outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        yield f"{part}: {counts}"
    failed = [line for line in lines if line.get("outcome") == "failed" or line.get("ok") is False]
    for line in failed[:SHOWN]:
        error = line.get("error") or next(iter(reversed(line.get("said", "").splitlines())), "")
        yield f"  FAILED {line.get('test') or line['name']}: {error[:200]}"
    if len(failed) > SHOWN:
        yield f"  and {len(failed) - SHOWN} more"


def _figures(lines: Sequence[Line]) -> Iterator[str]:
    found = measured(lines)
    gpu = next((line["gpu"] for line in lines if "gpu" in line), "an unknown GPU")
    h200 = "H200" in gpu
    yield f"{gpu}, beside what gpu_expected.md expects of an {'H200' if h200 else 'H100'}"
    for each in expectations(EXPECTED.read_text()):
        value = found.get((each.part, each.name, each.field))
        if value is None:
            continue
        wanted = each.h200 if h200 else each.h100
        verdict = each.verdict(value, h200=h200)
        yield f"  {verdict:6} {each.part:13} {each.name:52} {value:12,.4g} {each.field:16} expected {wanted}"


def unfinished(lines: Sequence[Line]) -> str | None:
    """Return the first stage skipped for lack of time."""
    return next((line["part"] for line in lines if line.get("state") == "not begun" or line.get("again")), None)


def dry_run(parts: Sequence[Stage], site: Site, without: Without, scratch: Path) -> int:
    """Build every command, import every entry point and collect every test; return the number of failures."""
    failed = 0
    for part in parts:
        path = scratch / f"{part.name}.jsonl"
        print(f"{part.name}: {' '.join(command(part, without, path))}")
        if (reason := cannot(part, site)) is not None:
            print(f"  here: {reason}")
        env = site.environment(without, flashinfer=part.flashinfer)
        said = _collect(part, env) if part.tests else _import(part, arguments(part, without, path)[1:], env)
        print(f"  {'FAIL ' + said if said else 'ok'}", flush=True)
        failed += bool(said)
    return failed


def _collect(part: Stage, env: dict[str, str]) -> str:
    """Collect a stage's tests; return an error message, or None."""
    given = [sys.executable, *PYTEST, *part.arguments, "--collect-only"]
    collected = subprocess.run(given, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return "" if not collected.returncode else (collected.stdout + collected.stderr)[-3000:]


def _import(part: Stage, given: list[str], env: dict[str, str]) -> str:
    """Import a script in this process and parse its arguments; return an error message, or None."""
    sys.path[:0] = [folder for folder in env["PYTHONPATH"].split(os.pathsep) if folder not in sys.path]
    try:
        importlib.import_module(part.script).parse(given)
    except (Exception, SystemExit) as error:
        return repr(error)
    return ""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [part.name for part in PLAN]
    parser.add_argument("--out", type=Path, default=Path("first-gpu"), help="where everything is written")
    parser.add_argument("--kit", type=Path, default=ROOT / "gpu-kit", help="what `make gpu-kit` has filled")
    parser.add_argument("--minutes", type=float, default=9.5, help="in which the run ends, the summary included")
    parser.add_argument("--from", dest="first", choices=names, default=names[0], help="the first part that is run")
    parser.add_argument("--parts", choices=names, nargs="+", default=names, help="only these")
    parser.add_argument("--no-vmm", action="store_true", help="memory is torch's, as an earlier run found")
    parser.add_argument("--no-graphs", action="store_true", help="steps are launched, as an earlier run found")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--read", type=Path, nargs="+", help="print the summary of these lines, and run nothing")
    return parser.parse_args(argv)


def main() -> int:
    began, asked = time.monotonic(), parse()
    without = Without(vmm=asked.no_vmm, graphs=asked.no_graphs)
    if asked.read:
        lines = [json.loads(line) for path in asked.read for line in path.read_text().splitlines()]
        for line in lines:
            without.learn(line)
        print(summary(lines, without), end="")
        return 0
    names = [part.name for part in PLAN]
    parts = [part for part in PLAN[names.index(asked.first) :] if part.name in asked.parts]
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        site = Site(asked.kit if asked.kit.is_dir() else None, scratch)
        if asked.dry_run:
            return dry_run(parts, site, without, scratch)
        asked.out.mkdir(parents=True, exist_ok=True)
        run = Run(asked.out, site, scratch, began + 60 * asked.minutes, without)
        for part in parts:
            run.part(part)
            (asked.out / "first_gpu.txt").write_text(summary(run.lines, without))
        print(summary(run.lines, without), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
