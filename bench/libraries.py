"""Compare infd with libraries that read the same file, in turns: rates, resident memory, and the loss of quality.

A peer is data: a name, the library of bench/library_worker.py, and the Python that has it. All peers run throughout,
and wait while another is measured; a ratio is of two measurements of one round. bench/peers.md tells how to get
llama.cpp's library.

    python bench/libraries.py FILE.gguf --peer llama.cpp=PYTHON --rounds 5
    python bench/libraries.py FILE.gguf --peer llama.cpp=PYTHON --peer transformers=PYTHON --text TEXT --rounds 0

With --text, each peer's logits are compared with those of transformers, in windows of --window tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from server_process import proportional_bytes

WORKER = Path(__file__).with_name("library_worker.py")
REFERENCE = "transformers"


class Workload(NamedTuple):
    """`streams` prompts of `read` tokens, from which `write` tokens follow; the time of one token is subtracted."""

    name: str
    streams: int
    read: int
    write: int


WORKLOADS = (
    Workload("one stream", 1, 32, 64),
    Workload("prompt of 512", 1, 512, 0),
    Workload("eight streams", 8, 32, 64),
)


class Worker:
    """A peer's process."""

    def __init__(self, name: str, python: str, model: str, threads: int) -> None:
        self.name = name
        command = [python, str(WORKER), name, model, "--threads", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.start_s: float = self._answer()["seconds"]

    def order(self, **fields: Any) -> dict[str, float]:
        assert self._process.stdin is not None
        print(json.dumps(fields), file=self._process.stdin, flush=True)
        return self._answer()

    def resident_bytes(self) -> int:
        return proportional_bytes(Path(f"/proc/{self._process.pid}"))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: its last lines are above")
        answer: dict[str, float] = json.loads(line)
        return answer


def rate(worker: Worker, workload: Workload, drawn: random.Random, tokens: int) -> float:
    """Return tokens a second; prompts are random, so that no prefix is cached."""

    def seconds(write: int) -> float:
        prompts = [[drawn.randrange(tokens) for _ in range(workload.read)] for _ in range(workload.streams)]
        return worker.order(prompts=prompts, tokens=write)["seconds"]

    if not workload.write:
        return workload.streams * workload.read / seconds(1)
    first = seconds(1)
    return workload.streams * workload.write / (seconds(workload.write + 1) - first)


def compare(workers: list[Worker], workloads: list[Workload], rounds: int, vocabulary: int) -> None:
    print("resident MiB, " + ", ".join(f"{each.name} {each.resident_bytes() / 2**20:.0f}" for each in workers))
    for workload in workloads:
        found: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for number in range(rounds + 1):
            drawn = random.Random(number)  # noqa: S311 - prompts are no secrets
            for worker in workers[:: 1 if number % 2 else -1]:
                found[worker.name].append(rate(worker, workload, drawn, vocabulary))
        ours = found[workers[0].name][1:]  # the first round warms up
        for name, rates in found.items():
            ratios = sorted(a / b for a, b in zip(ours, rates[1:], strict=True))
            line = f"{workload.name:14} {name:12} {statistics.median(rates[1:]):7.1f} tok/s"
            print(f"{line}   {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)


def quality(workers: list[Worker], texts: list[list[int]]) -> None:
    """Print each peer's perplexity and its divergence from the reference's distributions, in nats a token."""
    logs = {}
    with tempfile.TemporaryDirectory() as folder:
        for worker in workers:
            file = Path(folder) / worker.name
            worker.order(texts=texts, to=str(file))
            logits = np.fromfile(file, np.float32).reshape(sum(map(len, texts)), -1).astype(np.float64)
            file.unlink()
            logits -= logits.max(1, keepdims=True)
            logs[worker.name] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.concatenate([np.array(text) for text in texts])
    scored = np.ones(len(ids), bool)
    scored[np.cumsum([len(text) for text in texts]) - 1] = False  # nothing follows
    places = scored.nonzero()[0]
    losses = {name: -each[places, ids[places + 1]] for name, each in logs.items()}
    reference, theirs = logs[REFERENCE], losses[REFERENCE]
    for name, each in logs.items():
        divergence = (np.exp(reference) * (reference - each)).sum(1).mean()
        apart = losses[name] - theirs
        change, error = np.expm1(apart.mean()), apart.std() / len(apart) ** 0.5
        same = (each.argmax(1) == reference.argmax(1)).mean()
        print(
            f"{name:12} perplexity {np.exp(losses[name].mean()):.4f} ({100 * change:+.2f} %, standard error "
            f"{100 * error:.2f}), KL {divergence:.5f}, same best token {100 * same:.1f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--peer", action="append", default=[], metavar="LIBRARY=PYTHON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", action="append", choices=[each.name for each in WORKLOADS], help="repeatable")
    parser.add_argument("--vocabulary", type=int, default=40_000, help="random ids are below")
    parser.add_argument("--text", type=Path, help="a file of token ids, as JSON")
    parser.add_argument("--window", type=int, default=200)
    arguments = parser.parse_args()
    peers = {"infd": sys.executable} | dict(peer.split("=", 1) for peer in arguments.peer)
    workers = [Worker(name, python, arguments.model, arguments.threads) for name, python in peers.items()]
    print("start s, " + ", ".join(f"{each.name} {each.start_s:.2f}" for each in workers))
    if arguments.rounds:
        chosen = [each for each in WORKLOADS if each.name in (arguments.workload or [each.name])]
        compare([each for each in workers if each.name != REFERENCE], chosen, arguments.rounds, arguments.vocabulary)
    if arguments.text:
        ids = json.loads(arguments.text.read_text())
        quality(workers, [ids[at : at + arguments.window] for at in range(0, len(ids), arguments.window)])
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
