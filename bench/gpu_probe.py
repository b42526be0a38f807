"""Check infd's assumptions about CUDA, torch and the driver on a GPU, in two minutes: stage one of bench/first_gpu.py.

Each case tests one assumption with infd's own code. A failed case does not end the others: if it leaves CUDA unusable,
or hangs for CASE_S, the rest run in a new process. Each result is printed and written at once, as a line of JSON.

    python bench/gpu_probe.py --json probe.jsonl
    python bench/gpu_probe.py --cases arena graph_over_release
    python bench/gpu_probe.py --cases xqa_with_pdl     # with FlashInfer and its module built, such as the kit's
    python bench/gpu_probe.py --device cpu             # tests this program; cases that need CUDA are skipped
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_machine import Again

from infd.kernels.families.attention import AttentionBatch, KeyValuePages
from infd.kernels.families.draw import Drawing
from infd.kernels.flashinfer import presence as flashinfer_presence
from infd.kernels.reference import attention as reference_attention
from infd.kernels.reference.drawing.draw import Draw as ReferenceDraw
from infd.kernels.select import CANDIDATES, select
from infd.kernels.triton import presence as triton_presence
from infd.runner.arenas.vram import bank_of
from infd.runner.cuda_graphs.capture import CudaGraphs
from infd.runner.start.setup import choose_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TextIO

    from infd.kernels.families.attention import AttentionPlan
    from infd.runner.cuda_graphs.capture import Graphs

    Found = dict[str, Any]

CASE_S = 60.0
ATTENTION_OFF = 0.01  # bfloat16 means of a thousand values, 0.25 at most
GIB = 2**30


class MissingError(Exception):
    """The case needs what this machine lacks."""


class Probe:
    """One device, and the scale of the cases on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.scale = 1 if self.cuda else 2**10  # sizes are divided by this

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def graphs(self) -> Graphs:
        return CudaGraphs(self.device) if self.cuda else Again()

    def seconds(self, work: Callable[[], object]) -> float:
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def only_cuda(self) -> None:
        if not self.cuda:
            raise MissingError("needs CUDA")


def versions(probe: Probe) -> Found:
    """Report software versions; pyproject.toml has infd's requirements."""
    names = ("torch", "triton", "transformers", "numpy", "tokenizers", "aiohttp", "msgspec", "uvloop", "cuda-bindings")
    found: Found = {"python": sys.version.split()[0], "threads": torch.get_num_threads()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    if probe.cuda:
        properties = torch.cuda.get_device_properties(probe.device)
        found |= {"gpu": properties.name, "memory_gib": properties.total_memory / GIB, "cuda": torch.version.cuda}
        found |= {"multiprocessors": properties.multi_processor_count, "free_gib": bank_of(probe.device).free() / GIB}
    return found


def kernels_chosen(probe: Probe) -> Found:
    """Check that Triton's kernels are chosen; otherwise the reference would compute silently."""
    ops = select(probe.device, torch.bfloat16)
    ops.request(*CANDIDATES)
    reasons = {"triton": triton_presence.why_not(probe.device), "flashinfer": flashinfer_presence.cannot_compile()}
    if probe.cuda and reasons["triton"]:
        raise RuntimeError(f"triton: {reasons['triton']}")
    return {"chosen": {row.family: row.chosen for row in ops.selection}, "reasons": reasons}


def arena(probe: Probe) -> Found:
    """Check that torch accepts a tensor in mapped memory, and time mapping it again."""
    bank = bank_of(probe.device)
    if bank.sleep_refusal:
        raise RuntimeError(bank.sleep_refusal)
    size = 5 * GIB // probe.scale + 12345
    held = bank.arena(size, "the probe")
    x = held.take((2**20 // probe.scale,), torch.float32)
    first = x.data_ptr()
    if x.any():
        raise RuntimeError("memory that was mapped is not zeroed")
    x.fill_(3)
    free = bank.free()
    release_s = probe.seconds(held.release)
    given_back = bank.free() - free
    restore_s = probe.seconds(held.restore)
    if bool(x.any()) or x.data_ptr() != first:
        raise RuntimeError("memory that was mapped again is not zeroed, or has moved")
    if bank.dedicated and given_back < size:
        raise RuntimeError(f"releasing {size:,} bytes made {given_back:,} free")
    return {"release_ms": 1e3 * release_s, "restore_ms": 1e3 * restore_s, "restore_GB_s": size / restore_s / 1e9}


def graph_over_release(probe: Probe) -> Found:
    """Check that a graph stays valid when memory at its addresses is unmapped and mapped again."""
    bank, graphs = bank_of(probe.device), probe.graphs()
    held = bank.arena(2**28 // probe.scale, "the probe")
    side = 1024 if probe.cuda else 64
    weight, out = held.take((side, side), torch.bfloat16), held.take((8, side), torch.bfloat16)
    x = torch.randn(8, side, device=probe.device).bfloat16()
    weight.normal_()

    def multiply() -> None:
        out.copy_(torch.nn.functional.linear(x, weight))

    replay = graphs.capture(multiply)
    replay()
    expected, kept = out.clone(), weight.clone()
    held.release()
    held.restore()
    weight.copy_(kept)
    replay()
    if not out.equal(expected):
        raise RuntimeError("replayed over memory that was mapped again, a graph gives other numbers")
    return {}


def park(probe: Probe) -> Found:
    """Time copies of weights to the host and back, as in a level 1 sleep and wake."""
    bank = bank_of(probe.device)
    if not bank.dedicated:
        probe.only_cuda()
    size = 4 * GIB // probe.scale
    held = bank.arena(size, "the probe")
    x = held.take((size // 4,), torch.float32).fill_(7)
    parked = bank.park(held, lambda: None)
    down_s = probe.seconds(parked.fetch)
    held.release()
    held.restore()
    up_s = probe.seconds(parked.put_back)
    parked.drop()
    if not bool((x == 7).all()):
        raise RuntimeError("what was parked came back changed")
    return {"down_GB_s": size / down_s / 1e9, "up_GB_s": size / up_s / 1e9}


def broken_capture(probe: Probe) -> Found:
    """Check that later captures, pinned memory and random numbers work after a refused capture."""
    probe.only_cuda()
    graphs, x = probe.graphs(), torch.ones(1000, device=probe.device)
    issued: list[int] = []

    def waits() -> None:
        if issued:
            x.sum().item()
        issued.append(1)

    try:
        graphs.capture(waits)
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
    else:
        raise RuntimeError("a capture in which the host waited was not refused")
    torch.empty(2**20, dtype=torch.uint8, pin_memory=True)
    one, two = (graphs.capture(partial(_again, work)) for work in (partial(x.add_, 1), partial(x.mul_, 2)))
    before = x[0].item()
    one()
    two()
    torch.empty(2**22, dtype=torch.uint8, pin_memory=True)
    if x[0].item() != 2 * (before + 1):
        raise RuntimeError(f"captured behind a broken one, +1 and x2 make {x[0].item()} of {before}")
    torch.randn(3, device=probe.device)  # older torch refuses until another capture has ended
    return {"refused": refused}


def wake_up(probe: Probe) -> Found:
    """Time a thread's wake-up after an event: sleeping in the kernel, and polling."""
    probe.only_cuda()
    x = torch.ones(2**26, device=probe.device)
    found: Found = {}
    for blocking in (True, False):
        late = []
        for _ in range(50):
            event = torch.cuda.Event(blocking=blocking)
            for _ in range(4):
                x.mul_(1.0)
            event.record()
            woken: list[float] = []
            thread = threading.Thread(target=lambda e=event, w=woken: (e.synchronize(), w.append(time.perf_counter())))
            thread.start()
            while not event.query():
                pass
            ended = time.perf_counter()
            thread.join()
            late.append(woken[0] - ended)
        late.sort()
        name = "blocking" if blocking else "spinning"
        found |= {f"{name}_us": 1e6 * late[25], f"{name}_worst_us": 1e6 * late[-1]}
    return found


def capture_beside_a_waiter(probe: Probe) -> Found:
    """Check that a thread may wait for an event while another captures."""
    probe.only_cuda()
    graphs, x = probe.graphs(), torch.ones(2**26, device=probe.device)
    event = torch.cuda.Event(blocking=True)
    for _ in range(200):
        x.mul_(1.0)
    event.record()
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    replay = graphs.capture(partial(_again, partial(x.mul_, 1.0)))
    thread.join()
    replay()
    return {}


def captures(probe: Probe) -> Found:
    """Time a capture of 200 matrix products; a server captures once for each size of step."""
    graphs = probe.graphs()
    kept: list[Callable[[], None]] = []
    side = 4096 if probe.cuda else 64
    x = torch.randn(64, side, device=probe.device).bfloat16()
    weight = torch.randn(side, side, device=probe.device).bfloat16()

    def many() -> None:
        y = x
        for _ in range(200):
            y = torch.nn.functional.linear(y, weight)

    count = 20 if probe.cuda else 2
    taken = probe.seconds(lambda: kept.extend(graphs.capture(many) for _ in range(count)))
    return {"ms": 1e3 * taken / count}


def graphs_dropped_in_flight(probe: Probe) -> Found:
    """Check that a graph may be dropped, and another captured in its pool, while its replays run."""
    graphs, rounds, replays, additions = probe.graphs(), 50, 10, 8
    x = torch.ones(2**24 // probe.scale, device=probe.device)
    out, total = torch.zeros(1, device=probe.device), torch.zeros(1, device=probe.device)

    def work() -> None:
        y = x
        for _ in range(additions):  # each sum allocates from the pool
            y = y + 1.0
        out.add_(y[-1])

    for _ in range(rounds):
        replay = graphs.capture(work)
        out.zero_()
        for _ in range(replays):
            replay()
        total += out
        del replay
    expected = float(rounds * replays * (additions + 1))
    if total.item() != expected:
        raise RuntimeError(f"graphs that were dropped while they ran gave {total.item()} instead of {expected}")
    return {}


def launches(probe: Probe) -> Found:
    """Time the host in a torch call, a Triton launch, and the replay of a graph of 200 kernels."""
    x = torch.ones(256, 1024, device=probe.device).bfloat16()
    norm, weight = select(probe.device, torch.bfloat16).norm, torch.ones(1024, device=probe.device).bfloat16()

    def many() -> None:
        for _ in range(200):
            x.mul_(1.0)

    replay = probe.graphs().capture(many)

    def issued_us(work: Callable[[], object], times: int = 100) -> float:
        """`times`: few enough for the driver's queue."""
        work()
        rounds = []
        for _ in range(9):
            probe.wait()
            began = time.perf_counter()
            for _ in range(times):
                work()
            rounds.append((time.perf_counter() - began) / times)
        return 1e6 * statistics.median(rounds)

    return {
        "torch_us": issued_us(lambda: x.mul_(1.0)),
        "kernel_us": issued_us(lambda: norm.rms_norm(x, weight, 1e-6)),
        "replay_us": issued_us(replay, 2) if probe.cuda else 0.0,
        "replayed_kernel_us": 1e6 * min(probe.seconds(replay) for _ in range(5)) / 200,
    }


def rows_of_products(probe: Probe) -> Found:
    """Find the batch sizes at which a row of a matrix product has the same bits."""
    inner, outer = (4096, 6144) if probe.cuda else (64, 96)
    x = torch.randn(256, inner, device=probe.device).bfloat16()
    weight = torch.randn(outer, inner, device=probe.device).bfloat16()
    classes: list[tuple[torch.Tensor, list[int]]] = []
    for rows in (1, 2, 4, 8, 16, 17, 32, 33, 64, 128, 256):
        row = torch.nn.functional.linear(x[:rows], weight)[0]
        same = next((members for first, members in classes if first.equal(row)), None)
        if same is None:
            classes.append((row, [rows]))
        else:
            same.append(rows)
    return {"classes": [members for _, members in classes], "count": len(classes)}


def draws(probe: Probe) -> Found:
    """Count sampled tokens of 4096 rows that differ from the reference; check that NaN yields a valid token."""
    rows, vocab = (4096, 32000) if probe.cuda else (16, 500)
    draw = select(probe.device, torch.bfloat16).draw
    logits = 3 * torch.randn(rows, vocab, device=probe.device)
    ids = torch.arange(rows, dtype=torch.int32, device=probe.device)
    ones = torch.ones(rows, device=probe.device)
    drawing = Drawing(
        rows=ids.long(),
        largest=logits.amax(-1),
        seed=torch.stack((ids, ids * 7), 1),
        position=ids,
        temperature=ones,
        top_k=50 * torch.ones_like(ids),
        top_p=0.9 * ones,
        min_p=0 * ones,
    )
    found: Found = {}
    for name, truncated in (("whole", False), ("top_k_top_p", True)):
        expected = ReferenceDraw()(logits, drawing, truncated=truncated)
        found[f"{name}_others"] = int((draw(logits, drawing, truncated=truncated) != expected).sum())
    broken = logits[:2].clone()
    broken[0, 5], broken[1] = float("nan"), float("-inf")
    two = Drawing(*(each[:2] for each in drawing))._replace(largest=broken.amax(-1))
    tokens = draw(broken, two, truncated=True).tolist()
    if not all(0 <= token < vocab for token in tokens):
        raise RuntimeError(f"of NaN, and of nothing that is allowed, it draws the tokens {tokens}")
    return found


def xqa_with_pdl(probe: Probe) -> Found:
    """Check that XQA, launched before the kernels that write its inputs have ended (PDL), waits for them.

    Each round writes other queries, keys and values. `others` counts the rounds whose numbers differ from those without
    PDL, launched and replayed; `off` is the largest difference from the reference in the last round.
    """
    package = flashinfer_package(probe)
    from infd.kernels.flashinfer.attention import PagedAttention

    rows, start, rounds = (64, 1000, 300) if probe.cuda else (2, 40, 3)
    heads, kv_heads, head, page = 16, 8, 128, 16  # whose module the kit has
    held, device, dtype = start // page + 1, probe.device, torch.bfloat16
    pages = KeyValuePages(
        *(torch.randn(rows * held + 1, kv_heads, page, head, device=device).to(dtype) for _ in range(2))
    )
    table = torch.arange(1, rows * held + 1, dtype=torch.int32, device=device).view(rows, held)
    batch = AttentionBatch(
        page_tokens=page,
        window=None,
        starts=[start] * rows,
        counts=[1] * rows,
        offsets=list(range(rows + 1)),
        start=torch.full((rows,), start, dtype=torch.int32, device=device),
        table=table,
        slots=table[:, -1].long() * page + start % page,
    )
    first = torch.randn(rows, heads + 2 * kv_heads, head, device=device)
    number = torch.zeros(1, device=device)
    q, k, v = torch.empty_like(first, dtype=dtype).split((heads, kv_heads, kv_heads), 1)
    out = torch.empty(rows, heads, head, dtype=dtype, device=device)

    def attend(plan: AttentionPlan) -> None:
        number.add_(1)
        for part, given in zip((q, k, v), first.split((heads, kv_heads, kv_heads), 1), strict=True):
            torch.mul(given, number.cos(), out=part)
        plan.write(k, v, pages)
        out.copy_(plan.run(q, pages, scale=head**-0.5))

    def results(work: Callable[[], object]) -> list[torch.Tensor]:
        number.zero_()
        found = []
        for _ in range(rounds):
            work()
            found.append(out.clone())
        return found

    without = PagedAttention(WithoutPdl(package)).prepare(batch)
    expected = results(partial(attend, without))
    family = PagedAttention(package)
    plan = family.prepare(batch)
    launched = results(partial(attend, plan))
    replayed = results(probe.graphs().capture(partial(attend, plan)))
    if family.refused:
        raise RuntimeError(f"FlashInfer {family.refused['flashinfer']}")
    reference = reference_attention.PagedAttention().prepare(batch).run(q, pages, scale=head**-0.5)
    others = sum(
        not one.equal(other) for given in (launched, replayed) for one, other in zip(given, expected, strict=True)
    )
    off = float((out.float() - reference.float()).abs().max())
    if others or off > ATTENTION_OFF:
        raise RuntimeError(f"with PDL {others} of {2 * rounds} rounds differ, and the last is off by {off:.3g}")
    return {"others": others, "off": off}


class WithoutPdl:
    """FlashInfer, whose XQA is launched behind its predecessor's end."""

    def __init__(self, package: Any) -> None:
        self._package = package
        self.xqa = partial(package.xqa, enable_pdl=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)


def flashinfer_package(probe: Probe) -> Any:
    probe.only_cuda()
    if find_spec("flashinfer") is None:
        raise MissingError("needs FlashInfer")
    return import_module("flashinfer")


def _again(work: Callable[[], object]) -> None:
    """Run the captured work and return nothing: a tensor kept would hold memory of the graphs' pool."""
    work()


CASES = (
    versions,
    kernels_chosen,
    arena,
    graph_over_release,
    park,
    broken_capture,
    wake_up,
    capture_beside_a_waiter,
    captures,
    graphs_dropped_in_flight,
    launches,
    rows_of_products,
    draws,
    xqa_with_pdl,
)
BY_NAME = {"xqa_with_pdl"}  # FlashInfer may compile a module for it, which takes longer than CASE_S


def attempt(names: Sequence[str], device: str) -> None:
    """Run cases in this process, printing a line as each begins and ends. Return early once CUDA is unusable."""
    probe = Probe(choose_device(device))
    cases = {case.__name__: case for case in CASES}
    for name in names:
        print(json.dumps({"begun": name}), flush=True)
        faulthandler.dump_traceback_later(CASE_S, exit=True)
        began, result = time.perf_counter(), {"name": name, "ok": True}
        usable = True
        try:
            with torch.inference_mode():
                result |= cases[name](probe)
                probe.wait()
        except MissingError as reason:
            result["skipped"] = str(reason)
        except Exception as error:
            result |= {"ok": False, "error": repr(error)}
            try:
                probe.wait()
            except RuntimeError:
                usable = False
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({**result, "s": time.perf_counter() - began}), flush=True)
        if not usable:
            return


def results(names: Sequence[str], device: str) -> Iterator[Found]:
    """Yield the result of each case, starting new processes where needed."""
    left = list(names)
    while left:
        command = [sys.executable, __file__, "--attempt", "--device", device, "--cases", *left]
        begun, first = "", left[0]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said = json.loads(line)
                begun = said.get("begun", "")
                if not begun:
                    left.remove(said["name"])
                    yield said
        if process.returncode:
            # A process that died before its first case would die again; after a result only its exit failed.
            for name in [begun] if begun else left[:] if first in left else []:
                left.remove(name)
                yield {"name": name, "ok": False, "error": f"its process ended with {process.returncode}", "s": 0.0}


def describe(result: Found) -> str:
    verdict = "skipped" if "skipped" in result else "ok" if result["ok"] else "FAIL"
    numbers = {key: value for key, value in result.items() if key not in ("name", "ok", "s")}
    parts = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers.items())
    said = ", ".join(parts)
    return f"{verdict:8} {result['name']:24} {result['s']:5.1f} s   {said}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.__name__ for case in CASES]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    usual = [name for name in names if name not in BY_NAME]
    parser.add_argument("--cases", choices=names, nargs="+", default=usual)
    parser.add_argument("--json", type=Path, default=Path("gpu_probe.jsonl"), help="where results are written")
    parser.add_argument("--attempt", action="store_true", help="run in this process")
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse()
    if arguments.attempt:
        attempt(arguments.cases, arguments.device)
        return 0
    with arguments.json.open("w") as file:
        return report(results(arguments.cases, arguments.device), file)


def report(found: Iterator[Found], file: TextIO) -> int:
    """Print and write results; return the number of failures."""
    failed = 0
    for result in found:
        print(describe(result), flush=True)
        file.write(json.dumps(result) + "\n")
        file.flush()
        failed += not result["ok"]
    return failed


if __name__ == "__main__":
    sys.exit(main())
