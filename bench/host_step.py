"""What a decoding step costs the host, by its parts, where a GPU would compute it, for each token.

The scheduler, the rows, the sampler and what carries numbers are infd's own. In the device's place are tensors of a few
numbers on the CPU, so that an operation costs about what it costs to launch one; a replayed graph does nothing, and the
model is its head alone. What Triton takes to launch a kernel of its own is not in it, nor is the GPU's driver.

All of it is CPU time. A part is the median of its steps, by the clock: to ask for CPU time costs more than some parts.

    python bench/host_step.py                      128 streams, greedy and at random
    python bench/host_step.py --beside OTHER_TREE  the same with another tree's infd, interleaved, as ratios
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from inspect import signature
from typing import TYPE_CHECKING, Any

PARTS = ("plan", "forward", "sample", "read", "commit")
WAYS = {"greedy": {"temperature": 0.0}, "at random": {"temperature": 0.8, "top_p": 0.9}}
VOCABULARY = 32
PROMPT = 24
WARM = 8  # steps that are not counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def measure(streams: int, steps: int) -> dict[str, dict[str, float]]:
    """Return microseconds of CPU time for each token, by the way tokens are chosen and by part."""
    import torch

    from infd.request import Request, SamplingParams
    from infd.runner.adapters import DeviceSlots
    from infd.runner.pulse import Pulse
    from infd.runner.rows import Rows
    from infd.runner.runner import Runner
    from infd.scheduler.layout import CacheLayout, Capacity, PageGroup
    from infd.scheduler.scheduler import Scheduler
    from infd.scheduler.sequence import Sequence

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    layout = CacheLayout((PageGroup(layers=(0,), page_tokens=16),))

    class Lasting:
        slots = None

        def refill(self, _: list[int]) -> None: ...

        def begin(self) -> None: ...

    class Attention:
        def prepare(self, _: Any) -> Lasting:
            return Lasting()

        def lasting(self, _: Any) -> Lasting:
            return Lasting()

    class Lora:
        def lasting(self, size: int, device: torch.device) -> None: ...

    class Model:
        vocab_size = VOCABULARY
        head = torch.randn(VOCABULARY, 4)

        def forward(self, batch: Any) -> Any:
            return torch.ones(len(batch.tokens), 4)

        def logits(self, hidden: Any, adapters: Any = None) -> Any:
            return hidden @ self.head.T

    class Draw:
        """What the host does around Triton's kernel, with an operation in its place."""

        def largest(self, logits: Any) -> Any:
            return logits.max(-1)

        def __call__(self, logits: Any, drawing: Any, *, truncated: bool) -> Any:
            tokens = torch.empty_like(drawing.rows)
            floats = (drawing.largest, drawing.temperature, drawing.top_p, drawing.min_p.log().abs())
            drawing.seed.contiguous(), torch.stack(floats, 1), drawing.top_k.contiguous()
            return tokens.fill_(7)

    class Nothing:
        """Captures a step as nothing at all."""

        def capture(self, work: Callable[[], None]) -> Callable[[], None]:
            work()
            return lambda: None

    def once(way: dict[str, Any]) -> dict[str, float]:
        length = PROMPT + steps + 8
        capacity = Capacity(
            layout=layout,
            pages=streams * (length // 16 + 2),
            rows=streams,
            step_tokens=streams * PROMPT,
            max_model_len=length + 8,
            vocab_size=VOCABULARY,
        )
        more = {"staging": pinned(cpu)} if "staging" in signature(Rows).parameters else {}
        rows = Rows(rows=streams, max_len=length + 8, page_tokens=[16], vocab_size=VOCABULARY, device=cpu, **more)
        runner = Runner(
            Model(), Attention(), Draw(), rows, layout, [None], DeviceSlots(Lora(), cpu), Pulse(), Nothing()
        )
        scheduler = Scheduler(capacity)
        for number in range(streams):
            prompt = tuple((number + i) % VOCABULARY for i in range(PROMPT))
            sampling = SamplingParams(max_tokens=steps + 4, **way)
            scheduler.add(Sequence(Request(id=str(number), prompt=prompt, sampling=sampling)))
        spent: dict[str, list[float]] = {part: [] for part in PARTS}
        tokens = 0
        flight: deque[tuple[Any, Any]] = deque()

        def timed(part: str, work: Callable[..., Any], *given: Any) -> Any:
            started = time.perf_counter_ns()
            done = work(*given)
            spent[part].append((time.perf_counter_ns() - started) / 1000)
            return done

        with runner.active():
            while runner.idle():
                pass
            for step in range(steps):
                if step == WARM:
                    tokens, begun = 0, time.thread_time_ns()
                plan = timed("plan", scheduler.plan)
                landing = timed("sample", runner.sample, timed("forward", runner.forward, plan))
                flight.append((plan, landing))
                if len(flight) == 2:
                    plan, landing = flight.popleft()
                    result = timed("read", runner.read, landing)
                    tokens += len(result.tokens)
                    timed("commit", scheduler.commit, plan, result)
            taken = (time.thread_time_ns() - begun) / 1000
        return {part: statistics.median(spent[part][WARM:]) / streams for part in PARTS} | {"all": taken / tokens}

    return {name: once(way) for name, way in WAYS.items()}


def pinned(device: Any) -> Any:
    """Return what carries to a GPU, over ordinary memory: each copy is one."""
    import torch

    from infd.runner.staging import Pinned

    class Event:
        def record(self) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

    class Copied(Pinned):
        def up(self, array: Any) -> Any:
            return super().up(array).clone()  # on one device, `to` is nothing

    return Copied(device, lambda size: torch.empty(size, dtype=torch.uint8), Event)


def run(tree: str, streams: int, steps: int) -> dict[str, dict[str, float]]:
    """Measure a tree's infd in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--child", "--streams", str(streams), "--steps", str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", help="another tree that holds an infd")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.streams, arguments.steps)))
        return
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    trees = [here, *([arguments.beside] if arguments.beside else [])]
    rounds = [[run(tree, arguments.streams, arguments.steps) for tree in trees] for _ in range(arguments.rounds)]
    print(f"microseconds of CPU time for each token, {arguments.streams} streams, medians of {arguments.rounds}")
    for way in WAYS:
        for part in (*PARTS, "all"):
            each = [[found[way][part] for found in trees] for trees in rounds]
            ours = statistics.median(found[0] for found in each)
            line = f"{way:10} {part:8} {ours:7.2f}"
            if arguments.beside:
                ratios: Sequence[float] = sorted(found[1] / found[0] for found in each)
                theirs = statistics.median(found[1] for found in each)
                spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
                line += f"   beside {theirs:7.2f}, times {statistics.median(ratios):.2f} {spread}"
            print(line)


if __name__ == "__main__":
    main()
