"""Measure the host's cost of a decoding step on a GPU, and whether the GPU would wait for the host.

Scheduler, rows, sampler, executor and transfers are infd's; `host_device.py` simulates the device. The times of
Triton's launcher and of the GPU's driver are not included.

Parts of a step are reported in microseconds per token: the median over steps of wall time, because reading CPU time
costs more than some parts. With --paced the device takes a set time for each step, the event loop spends LOOP_US on
each token, and the report is the fraction of time in which the device was busy.

    python bench/host_step.py                      128 streams, greedy and at random
    python bench/host_step.py --paced              1, 32 and 128 streams on devices of several speeds
    python bench/host_step.py --beside OTHER_TREE  the same with another tree's infd, interleaved, as ratios
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

PARTS = ("plan", "forward", "sample", "read", "commit")
WAYS = {"greedy": {"temperature": 0.0}, "at random": {"temperature": 0.8, "top_p": 0.9}}
PACES = ((1, 0.5), (1, 2), (32, 1), (32, 4), (128, 4), (128, 8))  # streams, milliseconds of a step
LOOP_US = 10  # event loop's time for each token after commit
WARM = 8  # steps that are not counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def measure(streams: int, steps: int) -> dict[str, dict[str, float]]:
    """Return microseconds per token, by sampling method and part."""
    import torch
    from host_device import Pace, assembled, scheduled

    torch.set_num_threads(1)

    def once(way: dict[str, Any]) -> dict[str, float]:
        runner, capacity = assembled(streams, steps, Pace())
        scheduler = scheduled(capacity, streams, steps + 4, way)
        spent: dict[str, list[float]] = {part: [] for part in PARTS}
        tokens = 0
        flight: deque[tuple[Any, Any]] = deque()

        def timed(part: str, work: Callable[..., Any], *given: Any) -> Any:
            started = time.perf_counter_ns()
            done = work(*given)
            spent[part].append((time.perf_counter_ns() - started) / 1000)
            return done

        with runner.active():
            for number in range(steps):
                if number == WARM:
                    tokens, begun = 0, time.thread_time_ns()
                planned = timed("plan", scheduler.plan)
                pending = timed("sample", runner.sample, timed("forward", runner.forward, planned.plan))
                flight.append((planned, pending))
                if len(flight) == 2:
                    planned, pending = flight.popleft()
                    result = timed("read", runner.read, pending)
                    tokens += len(result.tokens)
                    timed("commit", scheduler.commit, planned, result)
            taken = (time.thread_time_ns() - begun) / 1000
        return {part: statistics.median(spent[part][WARM:]) / streams for part in PARTS} | {"all": taken / tokens}

    return {name: once(way) for name, way in WAYS.items()}


def paced(steps: int) -> dict[str, dict[str, float]]:
    """Return the percentage of time in which devices of several speeds were busy."""
    import torch
    import uvloop

    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)  # as the daemon has it
    return {
        f"{streams} streams, {step_ms} ms": {
            name: uvloop.run(_busy(streams, steps, step_ms / 1000, way)) for name, way in WAYS.items()
        }
        for streams, step_ms in PACES
    }


async def _busy(streams: int, steps: int, step_s: float, way: dict[str, Any]) -> float:
    from host_device import Pace, assembled, scheduled

    from infd.config import Config, DeviceConfig
    from infd.engine.steps.constraints import Constraints
    from infd.engine.steps.loop import StepLoop
    from infd.engine.streams.fanout import FanOut
    from infd.executors.local import LocalExecutor
    from infd.telemetry.events import Events

    pace = Pace(step_s)
    runner, capacity = assembled(streams, steps + WARM, pace)
    residence = SimpleNamespace(
        start_collapsing=lambda: None, close=lambda: None, memory=SimpleNamespace(whole=True), quiet=Event()
    )
    loaded = SimpleNamespace(
        runner=runner, capacity=capacity, depth=2, residence=residence, idle=lambda: False, facts={}
    )
    executor = LocalExecutor(Config(device=DeviceConfig(kind="cpu")), lambda *_: loaded)
    await executor.load()
    scheduler = scheduled(capacity, streams, steps + WARM, way)
    committed, begun, ended = 0, 0.0, asyncio.Event()
    pace.free = 0.0

    def handed_over(_: Any, now_s: float) -> None:
        until = time.perf_counter() + LOOP_US / 1e6
        while time.perf_counter() < until:
            pass

    def on_commit(_: Any, outcomes: list[Any]) -> None:
        nonlocal committed, begun
        committed += 1
        if committed == WARM:
            begun = time.perf_counter()
        if committed == steps:
            ended.set()
        fan.post(outcomes)

    fan = FanOut(handed_over, time.monotonic)
    constraints = Constraints(capacity.vocab_size, None)
    loop = StepLoop(
        scheduler, executor, constraints, Events(), time.monotonic, lambda _: None, on_commit, lambda _: None
    )
    running = asyncio.ensure_future(loop.run())
    await ended.wait()
    taken = time.perf_counter() - begun
    running.cancel()
    await asyncio.wait([running])
    await executor.close()
    return 100 * (steps - WARM) * step_s / taken


def run(tree: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure a tree's infd in another process with that tree's script, because names differ between trees.

    An editable install precedes PYTHONPATH, so a tree with a virtual environment runs in that environment.
    """
    own = os.path.join(tree, ".venv", "bin", "python")
    command = [
        own if os.path.exists(own) else sys.executable,
        os.path.join(tree, "bench", "host_step.py"),
        "--child",
        "--streams",
        str(arguments.streams),
        "--steps",
        str(arguments.steps),
    ]
    command += ["--paced"] if arguments.paced else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paced", action="store_true", help="how busy a device of some speed is kept")
    parser.add_argument("--streams", type=int, default=128, help="where it is not paced")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", help="another tree that holds an infd")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if arguments.child:
        # An editable install redirects `import infd` to the tree it was installed from, whatever sys.path says.
        sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable_" not in type(finder).__module__]
        sys.path.insert(0, here)
        print(json.dumps(paced(arguments.steps) if arguments.paced else measure(arguments.streams, arguments.steps)))
        return
    trees = [here, *([arguments.beside] if arguments.beside else [])]
    rounds = [[run(tree, arguments) for tree in trees] for _ in range(arguments.rounds)]
    if arguments.paced:
        print(f"percent of the time that the device had work, {LOOP_US} us of the loop for each token")
    else:
        print(f"microseconds of CPU time for each token, {arguments.streams} streams")
    print(f"medians of {arguments.rounds}")
    for way, parts in rounds[0][0].items():
        for part in parts:
            each = [[found[way][part] for found in trees] for trees in rounds]
            ours = statistics.median(found[0] for found in each)
            line = f"{way:20} {part:10} {ours:7.2f}"
            if arguments.beside:
                ratios: Sequence[float] = sorted(found[1] / found[0] for found in each)
                theirs = statistics.median(found[1] for found in each)
                spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
                line += f"   beside {theirs:7.2f}, times {statistics.median(ratios):.2f} {spread}"
            print(line)


if __name__ == "__main__":
    main()
